"""The tests marked ``gpu``, as a part of ``razor-dist bench gpu``: each outcome as it comes.

pytest runs in a process of its own. If a test ends that process, hangs or breaks its CUDA context,
another process runs the tests that are left.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import razor_dist
from razor_dist.evals.bench.gpu import Bench, Skipped
from razor_dist.evals.bench.measure import Table
from razor_dist.jobs.process import Child

_ROOT = Path(razor_dist.__file__).parents[1]
_OPTIONS = "-vv --tb=short --no-summary -m gpu -p no:cacheprovider --continue-on-collection-errors"
# After these, no test of the same process would pass.
_BROKEN = re.compile(r"CUDA error|Triton Error \[CUDA\]|BrokenProcessPool|TimeoutError")
# Seconds that a test may take, or pytest until it has begun the first.
_PATIENCE = 120.0
_WAITING, _RUNNING = "not begun", "not finished"
_KINDS = ("passed", "failed", "skipped", _RUNNING, _WAITING)


def run_tests(
    bench: Bench, files: Sequence[str], root: Path = _ROOT, env: Mapping[str, str] | None = None
) -> Iterator[tuple[dict[str, Any], list[Table]]]:
    """Yield the outcomes so far by file and test whenever one is known, and a table at the end."""
    if not (root / "tests").is_dir():
        raise Skipped(f"there is no folder {root / 'tests'}; run from a checkout")
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        raise Skipped("needs pytest and hypothesis: make gpu-wheels")
    if not bench.cuda:
        raise Skipped("needs a CUDA device")
    tests: dict[str, str] = {}
    why = ""  # the last process ended, if not by itself
    while True:
        done = [name for name, outcome in tests.items() if outcome != _WAITING]
        with Child(_run, root, list(files), done, env=os.environ | (env or {})) as child:
            for ending in _outcomes(bench, child, tests):
                why = ending
                yield {"tests": _by_file(tests)}, []
        waiting = Counter(tests.values())[_WAITING]
        # A process that ends before its first test would do so again.
        if bench.is_late or waiting in (0, len(tests) - len(done)):
            break
    yield {}, _tables(tests)
    counts = Counter(map(_kind, tests.values()))
    said = ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind])
    if not tests:
        raise RuntimeError(why or "pytest found no tests")
    if counts["skipped"] == len(tests):
        raise Skipped(f"{said}, the first: {next(iter(tests.values())).partition(': ')[2]}")
    if counts["passed"] + counts["skipped"] < len(tests):
        raise RuntimeError(said)


def _outcomes(bench: Bench, child: Child, tests: dict[str, str]) -> Iterator[str]:
    """Fill in ``tests`` while the process is of use; yield after each outcome, and why it ended."""
    while True:
        try:
            if child.connection.poll(min(bench.left, _PATIENCE)):
                changed, going_on = child.connection.recv()
                tests |= changed
                yield ""
                if going_on:
                    continue
                return
            why = "no time was left" if bench.is_late else f"nothing came for {_PATIENCE:.0f} s"
        except (EOFError, OSError):
            why = f"its process ended with {child.wait()}"
        kind = _RUNNING if bench.is_late else "failed"
        tests |= {name: f"{kind}: {why}" for name, now in tests.items() if now == _RUNNING}
        yield why
        return


def _run(connection: Connection, root: Path, files: Sequence[str], done: Sequence[str]) -> None:
    """Run pytest without the tests that are ``done``."""
    import pytest

    os.chdir(root)
    pytest.main([*_OPTIONS.split(), "-o", "addopts=", *files], [_Reporter(connection, set(done))])
    connection.send(({}, False))


class _Reporter:
    """A plugin of pytest that sends outcomes by test, and whether the process is of use."""

    def __init__(self, connection: Connection, done: set[str]) -> None:
        self._connection, self._done = connection, done

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collection_finish(self, session: Any) -> None:
        self._connection.send(({item.nodeid: _WAITING for item in session.items}, True))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._connection.send(({nodeid: _RUNNING}, True))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self._send(report)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed and report.nodeid not in self._done:
            self._send(report, at_collection=True)

    def _send(self, report: Any, at_collection: bool = False) -> None:
        text, outcome = report.longreprtext, report.outcome
        if report.failed:
            print("\n" + text, flush=True)
            reasons = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
            outcome = f"failed: {next(iter(reasons), text.strip())[:200]}"
        elif report.skipped:
            outcome = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
        broken = report.failed and not at_collection and _BROKEN.search(text)
        self._connection.send(({report.nodeid: outcome}, not broken))


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def _by_file(tests: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, outcome in tests.items():
        file, _, test = name.partition("::")
        found.setdefault(file, {})[test or "collection"] = outcome
    return found


def _tables(tests: Mapping[str, str]) -> list[Table]:
    """Counts by file, and what has neither passed nor been skipped."""
    by_file, others = [["tests", *_KINDS]], [["test", "outcome"]]
    for file, outcomes in _by_file(tests).items():
        counts = Counter(map(_kind, outcomes.values()))
        by_file.append([file, *(str(counts[kind]) for kind in _KINDS)])
    for name, outcome in tests.items():
        if _kind(outcome) not in ("passed", "skipped"):
            others.append([name, outcome])
    return [Table("Tests:", by_file), *([Table("Of them:", others, "left")] if others[1:] else [])]
