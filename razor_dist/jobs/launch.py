"""Runs a task as a job's settings say: on Ray, or on processes of this host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from razor_dist.config.errors import ConfigError
from razor_dist.jobs.config import JobConfig
from razor_dist.jobs.job import Summary, run_task
from razor_dist.jobs.pool import EnginePool
from razor_dist.jobs.task import Task


def run_job(
    task: Task,
    config: JobConfig,
    folder: str | Path,
    *,
    on_open: Callable[[Path], None] | None = None,
) -> Summary:
    """Compute what ``folder`` lacks of a task's results.

    Parameters
    ----------
    task : Task
        Its engines' settings are its own; of ``config`` only the job's are used here.
    config : JobConfig
    folder : str or Path
        See `razor_dist.jobs.results`.
    on_open : callable, optional
        As `run_task`.

    Returns
    -------
    Summary
        ``failed`` counts the items without a result.

    Raises
    ------
    ClusterError
        If the cluster cannot be reached, or has no room for an engine in time.
    RazorError
        As `run_task`.
    """
    return run_task(
        task,
        folder,
        _engine_pool(task, config),
        attempts=config.attempts,
        new_folder=config.new_folder,
        retry_failed=config.retry_failed,
        on_open=on_open,
    )


def _engine_pool(task: Task, config: JobConfig) -> AbstractContextManager[EnginePool]:
    if not config.ray:
        from razor_dist.jobs.local_engine import host_pool

        return host_pool(task, config.engines or 1)
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError(
            "this job runs on Ray, which is not installed: pip install 'razor-dist[ray]', "
            "or use processes of this host (ray: false, --no-ray)"
        ) from None
    from razor_dist.jobs.ray_engine import ray_pool

    return ray_pool(task, config)
