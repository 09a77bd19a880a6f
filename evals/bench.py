"""Speed and memory side by side: transformers' own ``generate``, our engine, and its ranks.

Every engine gets the same prompt of random token ids (fixed seed) and generates greedily, past
end-of-sequence tokens, so that lengths are fixed. A run is a list of the moments at which its
tokens came: prefill ends with the first, decode is what lies between the first and the last. Each
engine is warmed up with a whole run; then they take turns, and medians are compared.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from razor_dist.evals.bench_engines import OWN, STOCK, one_process, rank_name, ranks
from razor_dist.evals.timing import BenchSettings, Say, Timing


@dataclass(frozen=True)
class Ratio:
    """One comparison of two medians, and the bar it is held to (None: reported only)."""

    name: str
    value: float
    bar: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        return None if self.bar is None else self.value <= self.bar


@dataclass(frozen=True)
class Results:
    """All that was measured.

    Attributes
    ----------
    settings : BenchSettings
    single, parallel : dict of name to Timing
        In one process, and on ranks.
    """

    settings: BenchSettings
    single: dict[str, Timing]
    parallel: dict[str, Timing]

    @property
    def ratios(self) -> list[Ratio]:
        """See `ratios`."""
        return ratios(self.single, self.parallel, self.settings)

    @property
    def same_tokens(self) -> bool:
        """Whether full attention generated the tokens that transformers did."""
        return self.single[OWN["full"]].runs[0].tokens == self.single[STOCK].runs[0].tokens

    def as_json(self) -> dict[str, Any]:
        """Everything, the machine included."""
        return {
            "machine": machine(),
            "settings": asdict(self.settings),
            "prompt": "random token ids",
            "full_attention_generates_the_tokens_of_transformers": self.same_tokens,
            "one_process": [timing.as_json() for timing in self.single.values()],
            "ranks": [timing.as_json() for timing in self.parallel.values()],
            "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in self.ratios],
        }


def run(settings: BenchSettings, say: Say) -> Results:
    """Measure everything.

    Parameters
    ----------
    settings : BenchSettings
    say : callable
        Told of every run as it ends.
    """
    single, vocab_size = one_process(settings, say)
    return Results(settings, single, ranks(settings, vocab_size, say))


def ratios(
    single: Mapping[str, Timing], parallel: Mapping[str, Timing], settings: BenchSettings
) -> list[Ratio]:
    """The comparisons that matter, with their bars."""
    stock = single[STOCK]
    found = []
    for attention, name in OWN.items():
        own, held = single[name], attention == "razor"
        against = f"{attention} / transformers"
        found += [
            Ratio(f"prefill, {against}", own.prefill / stock.prefill, 0.75 if held else None),
            Ratio(f"decode, {against}", own.decode / stock.decode, 0.6 if held else None),
        ]
    first, *others = settings.world_sizes
    one = parallel[rank_name("razor", first)]
    for size in others:
        many = parallel[rank_name("razor", size)]
        against = f"razor, P={size} / P={first}"
        bar = 1.5 if (first, size) == (1, 8) else None
        found.append(Ratio(f"prefill, {against}", many.prefill / one.prefill, bar))
        found.append(Ratio(f"decode, {against}", many.decode / one.decode))
    return found


def machine() -> dict[str, Any]:
    """Where it was measured."""
    info = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name()
    return info


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as well as the system tells it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
