"""Runs a task to its end: what is missing is computed, each result stored at once.

`run_job` runs it as a job's settings say, on Ray or on processes of this host; `run_task` on any
engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from razor_dist.config.errors import ConfigError
from razor_dist.jobs.config import JobConfig
from razor_dist.jobs.pool import EnginePool, Outcome, run_items
from razor_dist.jobs.progress import JobProgress
from razor_dist.jobs.results import Record, ResultStore, json_line
from razor_dist.jobs.task import Item, PartResult, Task, job_settings

log = logging.getLogger(__name__)


class JobSummary(NamedTuple):
    """The end of a run.

    Attributes
    ----------
    folder : Path
        Where the results are.
    done, failed : int
        Records in the results, those of earlier runs included.
    earlier : int
        Those that earlier runs had left.
    """

    folder: Path
    done: int
    failed: int
    earlier: int


def run_job(
    task: Task,
    config: JobConfig,
    folder: str | Path,
    *,
    on_open: Callable[[Path], None] | None = None,
) -> JobSummary:
    """Compute what ``folder`` lacks of a task's results.

    Parameters
    ----------
    task : Task
        Its engines' settings are its own; of ``config`` only the job's are used here.
    config : JobConfig
    folder : str or Path
        See `razor_dist.jobs.results`.
    on_open : callable, optional
        As in `run_task`.

    Returns
    -------
    JobSummary
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
        from razor_dist.jobs.host_engine import host_pool

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


def run_task(
    task: Task,
    folder: str | Path,
    pool: AbstractContextManager[EnginePool],
    *,
    attempts: int = 3,
    new_folder: bool = False,
    retry_failed: bool = False,
    on_open: Callable[[Path], None] | None = None,
) -> JobSummary:
    """Compute the results of a task that its folder does not hold yet.

    When nothing is missing any more, the results are put into the order of the task's items.

    Parameters
    ----------
    task : Task
    folder : str or Path
        See `razor_dist.jobs.results`.
    pool : context manager of EnginePool
        The engines, such as `razor_dist.jobs.ray_engine.ray_pool` makes. It is entered only if
        anything is missing.
    attempts : int
        How often an item is tried while engines fail under it.
    new_folder : bool
        Begin another folder where this one is of other settings: `ResultStore.open`.
    retry_failed : bool
        Try again what an earlier run has recorded as failed.
    on_open : callable, optional
        Called with the folder, which may be another than the one asked for, before any work: what
        it writes there is there however the run ends.

    Raises
    ------
    ConfigError
        If the folder or the items do not fit: see `ResultStore.open`.
    RazorError
        If no engine can be opened any more. The results so far are kept.
    """
    items = _checked(task)
    with ResultStore.open(folder, job_settings(task), new_folder=new_folder) as store:
        if on_open is not None:
            on_open(store.folder)
        if retry_failed and (dropped := store.drop_failed()):
            log.info("%d failed items are tried again", dropped)
        parts = store.parts()
        missing = [
            replace(item, parts=parts.get(item.id, {}))
            for item in items
            if item.id not in store.records
        ]
        earlier = len(items) - len(missing)
        try:
            if missing:
                _compute(missing, earlier, store, pool, attempts)
        except KeyboardInterrupt:
            log.warning(
                "interrupted; what is done is kept in %s: run it again to continue", store.folder
            )
            raise
        store.finish([item.id for item in items])
        failed = sum(record["status"] == "failed" for record in store.records.values())
        return JobSummary(store.folder, len(store.records) - failed, failed, earlier)


def _compute(
    items: Sequence[Item],
    earlier: int,
    store: ResultStore,
    pool: AbstractContextManager[EnginePool],
    attempts: int,
) -> None:
    with pool as (open_engine, engines), JobProgress(items, earlier) as progress:
        for event in run_items(items, open_engine, engines=engines, attempts=attempts):
            if isinstance(event, Outcome):
                store.append(_record(event))
                progress.finished(event)
                continue
            if isinstance(event.update, PartResult):
                store.append_part(event.item.id, event.update.key, event.update.result)
            progress.updated(event)


def _checked(task: Task) -> Sequence[Item]:
    items = task.items()
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ConfigError(f"two items of the job have the id {item.id!r}")
        seen.add(item.id)
        if item.engine not in task.engines:
            known = ", ".join(map(repr, task.engines))
            raise ConfigError(
                f"item {item.id!r} names the engine {item.engine!r}; the task has {known}"
            )
    return items


def _record(outcome: Outcome) -> Record:
    record: Record = {
        "id": outcome.item.id,
        "status": "done",
        "result": outcome.result,
        "error": None,
        "run": {
            "seconds": round(outcome.seconds, 3),
            "attempts": outcome.attempts,
            "engine": outcome.engine,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        },
    }
    error = outcome.error
    if error is None:
        try:
            json_line(record)
        except (TypeError, ValueError) as unfit:
            error = TypeError(f"the task's result is not JSON data: {unfit}")
    if error is not None:
        failure = {"type": type(error).__name__, "message": str(error)}
        record |= {"status": "failed", "result": None, "error": failure}
    return record
