"""Runs a task to its end: computes the missing results and stores each at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from razor_dist.config.errors import ConfigError, DocumentError, RequestError
from razor_dist.config.extras import install_command
from razor_dist.config.schema import JobConfig
from razor_dist.jobs.pool import EnginePool, ItemUpdate, Outcome, run_items
from razor_dist.jobs.progress import JobProgress
from razor_dist.jobs.results import Record, ResultStore, has_failed, json_line
from razor_dist.jobs.task import RETRYABLE, Item, PartResult, Task, job_settings

log = logging.getLogger(__name__)


class JobSummary(NamedTuple):
    """Counts of a task's items at the end of a run; its folder may have more records."""

    folder: Path
    done: int
    failed: int
    earlier: int  # items that earlier runs had left


def run_job(
    task: Task,
    config: JobConfig,
    folder: str | Path,
    *,
    on_open: Callable[[Path], None] | None = None,
    on_done: Callable[[Path], None] | None = None,
) -> JobSummary:
    """Compute a task's results that ``folder`` lacks, on Ray or on processes of this host.

    The engines' settings are the task's; only the job's settings are used of ``config``. Otherwise
    as `run_task`. Raises `ClusterError` if the cluster cannot be reached or has no room in time.
    """
    pool: AbstractContextManager[EnginePool]
    if config.ray:
        try:
            import ray  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"this job runs on Ray, which is not installed: {install_command('ray')}, or use "
                "processes of this host (ray: false, --no-ray)"
            ) from None
        from razor_dist.jobs.ray_engine import ray_pool

        pool = ray_pool(task, config)
    else:
        from razor_dist.jobs.host_engine import host_pool

        pool = host_pool(task, config.engines or 1)
    return run_task(task, folder, pool, config, on_open=on_open, on_done=on_done)


def run_task(
    task: Task,
    folder: str | Path,
    pool: AbstractContextManager[EnginePool],
    config: JobConfig | None = None,
    *,
    on_open: Callable[[Path], None] | None = None,
    on_done: Callable[[Path], None] | None = None,
) -> JobSummary:
    """Compute a task's results that its folder lacks, on any engines.

    At the end the results are put into the order of the task's items. ``pool`` is entered only if
    results are missing. ``on_open`` is called before any work with the folder, which may be a new
    one (`JobConfig.new_folder`); its files stay however the run ends. ``on_done`` is called at the
    end, while no other process may write to the folder. Raises `ConfigError` if the folder or the
    items do not fit (`ResultStore.open`), and another `RazorError` if no engine can be opened any
    more; the results so far are kept.
    """
    config = config or JobConfig()
    items = _checked(task)
    extends = getattr(task, "extends", lambda there, here: False)
    own = job_settings(task)
    with ResultStore.open(folder, own, new_folder=config.new_folder, extends=extends) as store:
        if on_open is not None:
            on_open(store.folder)
        if dropped := store.drop_failed(retryable=not config.retry_failed):
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
                missing = list(getattr(task, "measured", list)(missing))
                at_once = getattr(task, "at_once", 1)
                with pool as (open_engine, engines), JobProgress(missing, earlier) as progress:
                    run = run_items(missing, open_engine, engines, config.attempts, at_once)
                    # Its threads end before the pool, also where a result cannot be written.
                    with closing(run) as events:
                        _take(events, store, progress)
        except KeyboardInterrupt:
            log.warning(
                "interrupted; what is done is kept in %s: run it again to continue", store.folder
            )
            raise
        store.finish([item.id for item in items])
        if on_done is not None:
            on_done(store.folder)
        failed = sum(has_failed(store.records[item.id]) for item in items)
        return JobSummary(store.folder, len(items) - failed, failed, earlier)


def _take(
    events: Iterable[Outcome | ItemUpdate], store: ResultStore, progress: JobProgress
) -> None:
    """Store and log the items' outcomes, parts and progress."""
    for event in events:
        if isinstance(event, Outcome):
            store.append(_record(event))
            progress.finished(event)
            continue
        if isinstance(event.update, PartResult):
            store.append_part(event.item.id, event.update.key, event.update.result)
        progress.updated(event)


def _checked(task: Task) -> Sequence[Item]:
    items = task.items()
    times = Counter(item.id for item in items)
    for item in items:
        if times[item.id] > 1:
            raise ConfigError(f"two items of the job have the id {item.id!r}")
        if item.engine not in task.engines:
            known = ", ".join(map(repr, task.engines))
            raise ConfigError(
                f"item {item.id!r} names the engine {item.engine!r}; the task has {known}"
            )
    return items


def _record(outcome: Outcome) -> Record:
    error = outcome.error
    if error is None:
        try:
            json_line(outcome.result or {})
        except (TypeError, ValueError) as unfit:
            error = TypeError(f"the task's result is not JSON data: {unfit}")
    failure: Record | None = None
    if error is not None:
        failure = {"type": type(error).__name__, "message": str(error)}
        of_document = isinstance(error, DocumentError) and error.retryable
        if of_document or (isinstance(error, RequestError) and error.code in RETRYABLE):
            failure["retryable"] = True
    return {
        "id": outcome.item.id,
        "status": "failed" if failure else "done",
        "result": None if failure else outcome.result,
        "error": failure,
        "run": {
            "seconds": round(outcome.seconds, 3),
            "attempts": outcome.attempts,
            "engine": outcome.engine,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        },
    }
