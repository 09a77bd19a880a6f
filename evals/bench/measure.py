"""Seconds, memory, timed runs of engines, what a device can do at most, and a bench's record.

Peaks of data sheets belong to other clocks, dtypes and numbers of threads. The ceilings are
measured in this process, in the dtype and with the threads of the runs that are held against them.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

from razor_dist.config.errors import ConfigError
from razor_dist.config.memory import resident_bytes
from razor_dist.evals.bench.settings import BenchSettings
from razor_dist.evals.report import Align, machine, markdown
from razor_dist.files import replacing
from razor_dist.kernels.linear import linear

log = logging.getLogger(__name__)

# Linux's way to begin a new peak of resident memory (proc_pid_clear_refs(5)).
_NEW_PEAK = Path("/proc/self/clear_refs")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; CUDA works behind the program's back."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Cost:
    """Seconds of a piece of work; bytes held when it began, and at most during it."""

    seconds: float = 0.0
    before_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def cost_on(device: torch.device) -> Iterator[Cost]:
    """Measure a ``with`` block; the figures are there once it has ended.

    Memory is torch's allocations on CUDA, and the process's resident memory on CPU; raises
    `ConfigError` where a CPU's peak cannot be measured.
    """
    cost, cuda = Cost(), device.type == "cuda"
    if cuda:
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif _NEW_PEAK.exists():
        _NEW_PEAK.write_text("5")
    else:
        raise ConfigError(
            "the peak of a CPU's memory is measured with Linux's /proc/self/clear_refs, which is "
            "missing here; measure on Linux, or with device cuda"
        )
    cost.before_bytes = torch.cuda.memory_allocated(device) if cuda else resident_bytes()[0]
    began = time.perf_counter()
    yield cost
    synchronize(device)
    cost.seconds = time.perf_counter() - began
    cost.peak_bytes = torch.cuda.max_memory_allocated(device) if cuda else resident_bytes()[1]


class CeilingSizes(NamedTuple):
    """Sizes of the operations that measure a device, and about how long each is repeated."""

    buffer_bytes: int  # read again and again; far more than the caches hold
    side: int  # rows and columns of the matrices
    seconds: float = 1.0


# The last-level caches are 50 MB on an H100 or H200, and tens of MB for each socket of a CPU. More
# than 2 GiB in 16 bits would be more numbers than kernels index in 32 bits.
SIZES = {"cuda": CeilingSizes(2 << 30, 8192), "cpu": CeilingSizes(1 << 30, 2048)}
_WIDTH = 4096


class Rates(NamedTuple):
    """The most that a machine does in a second; a multiplication and an addition count as two."""

    bandwidth: float  # bytes read
    products: float  # operations of a matrix product
    attention: float = 0.0  # operations of attention at prefill; 0 where not measured
    int8_products: float = 0.0  # as `products`, by linear layers of 8 bits; 0 where not measured

    def or_better(self, other: Rates) -> Rates:
        """Return the higher of both rates, field by field: a busy machine measures too low."""
        return Rates(*map(max, self, other))


@torch.inference_mode()
def measure_ceilings(
    device: torch.device, dtype: torch.dtype, sizes: CeilingSizes | None = None
) -> Rates:
    """Measure a device at ``sizes`` (by default `SIZES`), with torch's present number of threads.

    Bytes are those of a buffer that is summed or multiplied with a vector (the faster counts):
    both read it once and write next to nothing. A matrix product is computed by torch's ``matmul``
    and as the engine's linear layers do (`razor_dist.kernels.linear`), which on some CPUs is much
    faster.
    """
    size, side, seconds = sizes or SIZES[device.type]

    def best(*operations: Callable[[], object]) -> float:
        return min(fastest(operation, device, seconds) for operation in operations)

    rows = -(-size // (_WIDTH * dtype.itemsize))
    buffer = torch.ones(rows, _WIDTH, dtype=dtype, device=device)
    vector = torch.ones(_WIDTH, dtype=dtype, device=device)
    reading = best(buffer.sum, lambda: buffer @ vector, lambda: linear(vector, buffer))
    # Random numbers: a GPU that multiplies zeros draws less power and keeps a higher clock.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
    multiplying = best(lambda: a @ b, lambda: linear(a, b))
    return Rates(buffer.nbytes / reading, 2 * side**3 / multiplying)


def fastest(operation: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest call, of calls that take about ``seconds`` in all."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    timer = Timer(
        "call()", globals={"call": operation}, num_threads=torch.get_num_threads(), timer=clock
    )
    return float(min(timer.blocked_autorange(min_run_time=seconds).times))


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return ids


@dataclass(frozen=True)
class TimedRun:
    """Seconds to the first token, seconds per token from there on, and the tokens of one run."""

    prefill_seconds: float
    decode_seconds: float
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.prefill_seconds:.2f} s, {1000 * self.decode_seconds:.1f} ms/token"

    @classmethod
    def from_stamps(
        cls, begin: float, stamps: Sequence[float], tokens: Sequence[int], *, steady: bool = False
    ) -> TimedRun:
        """Make a run from the moments at which its tokens came; the first and last will do.

        If ``steady``, the decode time is the median of the times between two tokens instead of
        their mean: a few steps record a CUDA graph, and take as long as many that replay it.
        """
        gaps = [after - before for before, after in itertools.pairwise(stamps)]
        decode = statistics.median(gaps) if steady else sum(gaps) / (len(tokens) - 1)
        return cls(stamps[0] - begin, decode, tuple(tokens))


Generate = Callable[[list[int], int], TimedRun]  # an engine; of a prompt and a number of new tokens


@dataclass
class Timing:
    name: str
    runs: list[TimedRun] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill(self) -> float:
        return statistics.median(run.prefill_seconds for run in self.runs)

    @property
    def decode(self) -> float:
        return statistics.median(run.decode_seconds for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prefill_seconds": self.prefill,
            "decode_seconds_per_token": self.decode,
            "prefill_runs": [run.prefill_seconds for run in self.runs],
            "decode_runs": [run.decode_seconds for run in self.runs],
            **self.stats,
        }


def take_turns(
    engines: Mapping[str, Generate], prompt: list[int], new_tokens: int, repeats: int
) -> dict[str, Timing]:
    timings = {name: Timing(name) for name in engines}
    for round_ in range(repeats + 1):
        for name, generate in engines.items():
            run = generate(prompt, new_tokens)
            log.info("%s, %s: %s", name, f"run {round_}" if round_ else "warm-up", run)
            if round_:
                timings[name].runs.append(run)
    return timings


# Cells are padded up to this many characters.
_WIDEST = 48


@dataclass(frozen=True)
class Table:
    """A table in Markdown, its columns padded so that a terminal shows them straight."""

    title: str
    rows: Sequence[Sequence[str]]
    align: Align = "numbers"

    def __str__(self) -> str:
        columns: list[list[str]] = []
        for column in zip(*self.rows, strict=True):
            width = min(max(map(len, column)), _WIDEST)
            right = columns and self.align == "numbers"
            columns.append([f"{cell:>{width}}" if right else f"{cell:{width}}" for cell in column])
        return f"{self.title}\n\n{markdown(zip(*columns, strict=True), self.align)}".lstrip()


@dataclass(frozen=True)
class BenchRecord:
    """The result of a bench: ``figures`` for JSON; tables, and notes below them, for a page."""

    bench: str  # subcommand of ``razor-dist bench``
    settings: BenchSettings
    figures: dict[str, Any]
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    others: dict[Path, bytes] = field(default_factory=dict)  # files beside JSON and Markdown

    def as_json(self) -> dict[str, Any]:
        command, values = self.settings.command(self.bench), self.settings.values()
        return {"command": command, "machine": machine(), "settings": values, **self.figures}

    def page(self) -> str:
        command = f"`{self.settings.command(self.bench)}`"
        return "\n\n".join([command, *map(str, self.tables), *self.notes]) + "\n"

    def write(self) -> None:
        figures, page, *_ = self.settings.files
        if figures is not None:
            with replacing(figures) as draft:
                draft.write_text(json.dumps(self.as_json(), indent=2, default=str) + "\n")
        if page is not None:
            page.write_text(self.page(), encoding="utf-8")
        for file, content in self.others.items():
            file.write_bytes(content)
