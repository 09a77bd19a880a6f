"""Settings of a job, beside those of its engines."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field

from razor_dist.config.schema import EngineConfig


class JobConfig(EngineConfig):
    """The engine's settings and the job's; frozen. Evaluations derive theirs from it."""

    ray: bool = Field(
        default=True, description="Engines of Ray actors; otherwise processes of this host."
    )
    ray_address: str | None = Field(
        default=None,
        min_length=1,
        description="Cluster, as ray.init takes it; none: RAY_ADDRESS, else a local one.",
    )
    engines: int | None = Field(
        default=None, ge=1, description="Engines at once; none: as many as the cluster holds."
    )
    cpus_per_rank: float = Field(
        default=1.0, gt=0, description="CPUs reserved for a rank; below 1 ranks share one."
    )
    placement: Literal["STRICT_PACK", "PACK"] = Field(
        default="STRICT_PACK", description="An engine's ranks on one node, or rather on one."
    )
    cluster_timeout: float = Field(
        default=600.0, gt=0, description="Seconds to wait until the cluster has room."
    )
    attempts: int = Field(
        default=3, ge=1, description="How often an item is tried while engines fail under it."
    )
    new_folder: bool = Field(
        default=False, description="Begin FOLDER-2 if FOLDER holds results of other settings."
    )
    retry_failed: bool = Field(
        default=False, description="Try again what an earlier run recorded as failed."
    )


class ExternalEngineConfig(EngineConfig):
    """Settings of what stands in an engine's place: a model that another library runs; frozen.

    A task's ``engines`` may hold one. Its fields beside the engine's decide the results, too.
    """

    @abstractmethod
    def open(self) -> Any:
        """What items get as their ``llm``, ready for use, in a process of its own.

        Returns
        -------
        object
            With the methods of `razor_dist.LLM` that the task calls, and ``failed``, ``close()``
            and ``pids``, its processes.
        """
