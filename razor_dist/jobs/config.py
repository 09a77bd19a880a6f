"""Settings of engines that other libraries run in a job."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from razor_dist.config.schema import EngineConfig
from razor_dist.config.schema import JobConfig as JobConfig


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
