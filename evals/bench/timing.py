"""Timed runs of an engine, and engines that take turns."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger(__name__)


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """Return ``count`` token ids below ``vocab_size``."""
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


# An engine: runs a prompt and generates so many new tokens.
Generate = Callable[[list[int], int], TimedRun]


@dataclass
class Timing:
    """The timed runs of one engine, and its other measurements."""

    name: str
    runs: list[TimedRun] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def prefill(self) -> float:
        """Median seconds of prefill."""
        return statistics.median(run.prefill_seconds for run in self.runs)

    @property
    def decode(self) -> float:
        """Median seconds per generated token."""
        return statistics.median(run.decode_seconds for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        """Return medians, every run, and the other measurements."""
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
    """Warm every engine up, then time ``repeats`` runs of each in turn."""
    timings = {name: Timing(name) for name in engines}
    for round_ in range(repeats + 1):
        for name, generate in engines.items():
            run = generate(prompt, new_tokens)
            log.info("%s, %s: %s", name, f"run {round_}" if round_ else "warm-up", run)
            if round_:
                timings[name].runs.append(run)
    return timings
