"""A million tokens with the needle model: exact answers, time, memory and bytes.

One document is prefilled and kept; each question about it continues the kept caches. The million
tokens on eight ranks, and the scaling table of razor against full attention::

    python -m razor_dist.evals.million --out runs/million
    python -m razor_dist.evals.million --out runs/million --lengths 16K 64K 256K \
        --attention razor full

A run that ended is in ``OUT/runs.jsonl`` and is not made again, whatever is asked for with it, so
that a length is added by naming it. One with a wrong answer is: it stays in the file, and in the
table of all runs, ``OUT/table.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from razor_dist import LLM, SamplingParams
from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import parse_size, tokens
from razor_dist.engine.messages import Message
from razor_dist.evals.hidden_words import Hidden, hide_words
from razor_dist.evals.million_table import is_exact, polynomial, table
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.evals.timing import Say
from razor_dist.llm.prefix import Prefix

# Tokens of an answer at most; five words and the end are due.
_ANSWER = 16
# Room for a question and its answer behind the document.
_ROOM = 64


@dataclass(frozen=True)
class RunSettings:
    """One run; what is equal in all of these is not measured twice.

    Attributes
    ----------
    length : int
        Tokens of the document.
    attention : str
        ``razor`` or ``full``.
    world_size : int
    threads : int
        Of a rank.
    chunked_prefill_size : int or None
    window_min, block : int
        The streaming heads' window, of constant length (``window_ratio: null``).
    depths : tuple of int
        Where the answers are hidden, in percent.
    seed : int
        Of the document.
    """

    length: int
    attention: str
    world_size: int
    threads: int
    chunked_prefill_size: int | None
    window_min: int
    block: int
    depths: tuple[int, ...]
    seed: int

    def open(self, model: Path) -> LLM:
        """The engine."""
        return LLM(
            str(model),
            world_size=self.world_size,
            attention=self.attention,
            head_map=str(model / HEAD_MAP) if self.attention == "razor" else None,
            threads=self.threads,
            chunked_prefill_size=self.chunked_prefill_size,
            window_min=self.window_min,
            window_ratio=None,
            block=self.block,
            max_model_len=self.length + _ROOM,
            max_num_seqs=2,
            # The ranks share the cores, and a chunk's last steps take seconds at a million tokens.
            collective_timeout=1800.0,
            heartbeat_timeout=1800.0,
        )


class Progress:
    """Says after every chunk what was read, and how long the rest will take.

    Takes tqdm's place: `LLM.prefill` is given `begin`, and calls `update`.

    Parameters
    ----------
    say : callable
    every : float
        Seconds from one line to the next, at least.
    clock : callable
        In seconds.
    """

    def __init__(
        self, say: Say, every: float = 5.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._say, self._every, self._clock = say, every, clock
        self._total, self._began, self._said = 0, 0.0, 0.0
        self.read: list[int] = []
        self.seconds: list[float] = []

    def begin(self, total: int, **_: Any) -> Self:
        """The prompt has ``total`` tokens."""
        self._total, self._began = total, self._clock()
        return self

    def update(self, count: int) -> None:
        """``count`` more tokens are read."""
        if not count:
            return
        read = count + (self.read[-1] if self.read else 0)
        seconds = self._clock() - self._began
        self.read.append(read)
        self.seconds.append(seconds)
        if seconds - self._said < self._every and read < self._total:
            return
        self._said = seconds
        left = f", about {self._left():.0f} s left" if read < self._total else ""
        self._say(f"  read {read:,} of {self._total:,} tokens in {seconds:.0f} s{left}")

    def _left(self) -> float:
        """Seconds until all is read, by a n + b n² fitted to the chunks so far."""
        if len(self.read) < 2:
            return self.seconds[-1] * ((self._total / self.read[-1]) ** 2 - 1)
        a, b = polynomial(self.read, self.seconds)
        return max(0.0, a * self._total + b * self._total**2 - self.seconds[-1])

    def set_description(self, _: str) -> None:
        """Of no interest."""

    def close(self) -> None:
        """Nothing is held."""


def measure(settings: RunSettings, model: Path, say: Say) -> dict[str, Any]:
    """Make one run.

    Returns
    -------
    dict
        A line of ``runs.jsonl``.
    """
    document = hide_words(settings.length, settings.depths, settings.seed)
    say(f"{settings.attention}, {tokens(settings.length)} tokens, {settings.world_size} ranks")
    with settings.open(model) as llm:
        loaded = llm.stats()
        progress = Progress(say)
        cpu = _cpu_seconds()
        began = time.perf_counter()
        with llm.prefill(document.text, progress.begin) as prefix:
            prefill_seconds = time.perf_counter() - began
            prefill_cpu = _cpu_seconds() - cpu
            prefilled = llm.stats()
            answers = [_ask(llm, prefix, hidden) for hidden in document.hidden]
            answered = llm.stats()
            read = prefix.num_tokens
    for answer in answers:
        verdict = "exact" if answer["exact"] else f"WRONG, {answer['wanted']!r} was hidden"
        say(f"  at {answer['depth']} %: {answer['said']!r}: {verdict}")
    return {
        "settings": asdict(settings),
        "read": read,
        "prefill_seconds": prefill_seconds,
        "prefill_cpu_seconds": prefill_cpu,
        "chunks": len(progress.read),
        "first_token_seconds": statistics.median(a["first_token_seconds"] for a in answers),
        "decode_seconds": statistics.median(a["decode_seconds"] for a in answers),
        "answers": answers,
        "rss_loaded": loaded["rss_per_rank"],
        "rss_peak": answered["peak_rss_per_rank"],
        "kv_bytes": prefilled["kv_bytes_per_rank"],
        "prefill_bytes": _sent(loaded, prefilled),
        "question_bytes": _sent(prefilled, answered),
        "machine": _machine(),
    }


def _ask(llm: LLM, prefix: Prefix, hidden: Hidden) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=_ANSWER)
    [output] = llm.generate(hidden.question, params, prefix=prefix)
    answer, metrics = output.outputs[0], output.metrics
    assert metrics.total_seconds is not None and metrics.time_to_first_token is not None
    after_first = metrics.total_seconds - metrics.time_to_first_token
    return {
        "depth": hidden.depth,
        "key": hidden.key,
        "wanted": hidden.answer,
        "said": answer.text,
        "exact": answer.text == hidden.answer and answer.finish_reason == "stop",
        "first_token_seconds": metrics.time_to_first_token,
        "decode_seconds": after_first / max(1, len(answer.token_ids) - 1),
    }


def _sent(before: Message, after: Message) -> dict[str, int]:
    """Bytes that all ranks sent between two counts, by purpose."""
    return {p: n - before["bytes_sent"][p] for p, n in after["bytes_sent"].items()}


def _cpu_seconds() -> float:
    """Of the ranks so far: on a busy machine they say more than the clock does."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in times)


def _machine() -> dict[str, Any]:
    import torch

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


class Runs:
    """What was measured so far, in a folder.

    Parameters
    ----------
    folder : Path
        Made if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._table = folder / "runs.jsonl", folder / "table.md"
        self.all: list[dict[str, Any]] = []
        if self._lines.exists():
            # A run that was killed while it wrote left a line without an end: it is made again.
            whole = self._lines.read_text().rpartition("\n")
            self.all = [json.loads(line) for line in whole[0].splitlines()]
            if whole[2]:
                self._lines.write_text(whole[0] + whole[1])

    def __contains__(self, settings: RunSettings) -> bool:
        """Whether there is such a run and all of its answers are exact."""
        wanted = json.loads(json.dumps(asdict(settings)))
        return any(run["settings"] == wanted and is_exact(run) for run in self.all)

    def add(self, run: dict[str, Any]) -> None:
        """Keep a run, and write the table anew."""
        with self._lines.open("a") as file:
            file.write(json.dumps(run) + "\n")
        self.all.append(json.loads(json.dumps(run)))
        self.write_table()

    def write_table(self) -> None:
        """Write ``table.md``."""
        self._table.write_text(table(self.all))


def run_all(
    wanted: Sequence[RunSettings],
    runs: Runs,
    say: Say,
    measure: Callable[[RunSettings, Path, Say], dict[str, Any]] = measure,
) -> bool:
    """Make the runs that are missing, one after the other.

    Returns
    -------
    bool
        Whether all of the wanted runs are there, every answer exact.
    """
    missing = [settings for settings in wanted if settings not in runs]
    if not missing:
        return True
    with tempfile.TemporaryDirectory() as folder:
        model = build_needle_model(Path(folder) / "needle")
        for settings in missing:
            runs.add(measure(settings, model, say))
    return all(settings in runs for settings in wanted)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:  # argparse shows the message of this one alone
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs asked for, or what is left of them; 0 if every answer is exact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--lengths", "--length", nargs="+", type=_size, default=[2**20], help="such as 64K 1M"
    )
    parser.add_argument("--attention", nargs="+", choices=["razor", "full"], default=["razor"])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--chunked-prefill-size", type=_size, help="default: the engine's")
    parser.add_argument("--window-min", type=int, default=256)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--depths", nargs="+", type=int, default=[10, 50, 90])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:  # before the hours that longer ones take
        hide_words(min(args.lengths), args.depths, args.seed)
    except ValueError as error:
        parser.error(str(error))
    wanted = [
        RunSettings(
            length,
            attention,
            args.world_size,
            args.threads,
            args.chunked_prefill_size,
            args.window_min,
            args.block,
            tuple(args.depths),
            args.seed,
        )
        for length in sorted(args.lengths)
        for attention in args.attention
    ]
    runs = Runs(args.out)
    runs.write_table()
    exact = run_all(wanted, runs, lambda line: print(line, flush=True))
    print(table(runs.all))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
