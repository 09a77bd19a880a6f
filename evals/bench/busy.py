"""Factors by which engines slow down beside processes that compute without end.

transformers' own ``generate`` runs with OpenMP's defaults, as its users have it; ours as ranks of
an `LLM`, with its defaults. Each engine is loaded in a process of its own, warmed up, and timed
with each number of busy processes, 0 among them. What counts is the factor by which they slow it,
beside the factor of transformers.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from statistics import median

import psutil

from razor_dist.config.cores import usable_cores
from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench.engine import STOCK, rank_name, stock_engine, timed_generate
from razor_dist.evals.bench.measure import BenchRecord, Generate, Table, random_tokens
from razor_dist.evals.bench.settings import PLAIN, BusyBenchSettings, EngineBenchSettings
from razor_dist.jobs.process import call
from razor_dist.llm.llm import LLM
from razor_dist.models.loader import read_config
from razor_dist.models.registry import resolve_model

log = logging.getLogger(__name__)

# The most by which ours may slow down more than transformers: one or two ranks, and more.
_FEW_RANKS, _MORE_RANKS = 1.3, 2.0
# A program that computes until its parent has gone.
_SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
_PHASES = ("prefill", "decode")

# Seconds of prefill, CPU seconds of the whole run, and seconds a token.
Row = dict[str, float]


def run(settings: BusyBenchSettings) -> BenchRecord:
    plain = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    found: dict[str, dict[str, Row]] = {}
    for size in (None, *settings.ranks):
        name = STOCK if size is None else rank_name("razor", size)
        log.info("%s ...", name)
        rows = call(measure, settings, size, env=plain)
        if "failed" in rows:
            raise ConfigError(f"{name}: {rows['failed']}")
        found[name] = rows
    table = [["", "tokens", "busy", "prefill, s", "factor", "decode, ms/token", "factor", "CPU s"]]
    compared = [["factor / that of transformers", "ratio", "bar", ""]]
    ratios: dict[str, float] = {}
    few = [rank_name("razor", size) for size in (1, 2)]
    for name, rows in found.items():
        for tokens in settings.lengths:
            for busy in settings.busy_processes:
                factors = _factors(rows, tokens, busy)
                row = rows[f"{tokens}, {busy}"]
                cells = [f"{row['prefill']:.2f}", f"{factors['prefill']:.2f}"]
                cells += [f"{1000 * row['decode']:.1f}", f"{factors['decode']:.2f}"]
                table.append([name, f"{tokens:,}", str(busy), *cells, f"{row['cpu']:.1f}"])
                if name != STOCK and busy:
                    stock = _factors(found[STOCK], tokens, busy)
                    bar = _FEW_RANKS if name in few else _MORE_RANKS
                    for phase in _PHASES:
                        key = f"{phase}, {name}, {tokens:,} tokens, {busy} busy"
                        ratios[key] = ratio = factors[phase] / stock[phase]
                        verdict = "met" if ratio <= bar else "missed"
                        compared.append([key, f"{ratio:.2f}", f"≤ {bar:g}", verdict])
    figures = {"prompt": "random token ids", "seconds": found, "ratios": ratios}
    notes = [f"{usable_cores()} cores. A factor is the time over that with no busy process."]
    tables = [Table("", table), Table("", compared)]
    return BenchRecord("busy", settings, figures, tables, notes)


def _factors(rows: Mapping[str, Row], tokens: int, busy: int) -> Row:
    quiet, slowed = rows[f"{tokens}, 0"], rows[f"{tokens}, {busy}"]
    return {phase: slowed[phase] / quiet[phase] for phase in _PHASES}


def measure(settings: BusyBenchSettings, size: int | None) -> dict[str, Row]:
    """Time one engine; ``size`` is its number of ranks, None for transformers.

    Returns a `Row` of medians for each ``"TOKENS, BUSY"``.
    """
    vocabulary = read_config(resolve_model(settings.model)).vocab_size
    found = {}
    with ExitStack() as stack:
        generate = _engine(settings, size, stack)
        for tokens in settings.lengths:
            prompt = random_tokens(vocabulary, tokens, settings.seed)
            generate(prompt[:500], settings.new_tokens)
            runs: dict[int, list[Row]] = {busy: [] for busy in settings.busy_processes}
            for _ in range(settings.repeats):
                for busy, rows in runs.items():
                    with _busy_processes(busy):
                        rows.append(_timed(generate, prompt, settings.new_tokens))
            for busy, rows in runs.items():
                columns = {key: [row[key] for row in rows] for key in rows[0]}
                found[f"{tokens}, {busy}"] = {k: median(of) for k, of in columns.items()}
    return found


def _engine(settings: BusyBenchSettings, size: int | None, stack: ExitStack) -> Generate:
    if size is None:
        tokens = str(max(settings.lengths))
        return stock_engine(EngineBenchSettings(model=settings.model, tokens=tokens))
    return timed_generate(stack.enter_context(LLM(settings.model, world_size=size, **PLAIN)))


def _timed(generate: Generate, prompt: list[int], new_tokens: int) -> Row:
    before, run = _cpu_seconds(), generate(prompt, new_tokens)
    cpu = _cpu_seconds() - before
    return {"prefill": run.prefill_seconds, "decode": run.decode_seconds, "cpu": cpu}


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and the engine's, without busy processes."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if _SPIN not in process.cmdline():
                times = process.cpu_times()
                seconds += times.user + times.system
    return seconds


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Run ``count`` processes that compute without end, each in a session of its own."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _SPIN], start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(0.5 if count else 0.0)  # until they run
        yield
