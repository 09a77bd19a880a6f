"""Settings of engines that other libraries run in a job."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from razor_dist.config.schema import EngineConfig
from razor_dist.config.schema import JobConfig as JobConfig


class ExternalEngineConfig(EngineConfig):
    """Settings of a model that another library runs, in an engine's place in a task; frozen.

    Its fields beside the engine's decide the results, too.
    """

    @abstractmethod
    def open(self) -> Any:
        """Return what items get as their ``llm``, ready for use, in a process of its own.

        It has the methods of `razor_dist.LLM` that the task calls, ``failed``, ``close()`` and
        ``pids``, its processes.
        """
