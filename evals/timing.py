"""Timed runs of an engine, and engines that take turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import build_config

Say = Callable[[str], None]
# Makes a run: prompt and number of new tokens to a timed run.
Generate = Callable[[list[int], int], "Run"]


@dataclass(frozen=True)
class BenchSettings:
    """What is run.

    Attributes
    ----------
    model : str
    tokens, new_tokens : int
        Of the prompt, and generated after it; at least 1 and 2.
    repeats : int
        Timed runs of each engine, after one for warming up.
    threads : int
        Threads of a single rank; several ranks share them.
    world_sizes : tuple of int
        Numbers of ranks to compare; the first is the measure of the others.
    seed : int
        Of the prompt.
    """

    model: str = "smollm2"
    tokens: int = 7000
    new_tokens: int = 32
    repeats: int = 3
    threads: int = 2
    world_sizes: tuple[int, ...] = (1, 8)
    seed: int = 0

    def config(self, attention: str, world_size: int = 1) -> EngineConfig:
        """The engine's settings; what is not named here has its default."""
        return build_config(
            EngineConfig,
            model=self.model,
            attention=attention,
            world_size=world_size,
            threads=max(1, self.threads // world_size),
        )

    def prompt(self, vocab_size: int) -> list[int]:
        """Random token ids."""
        return random_tokens(vocab_size, self.tokens, self.seed)


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """``count`` token ids below ``vocab_size``."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return ids


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes
    ----------
    prefill_seconds : float
        From the request to its first token.
    decode_seconds : float
        Per token, from the first token to the last; or as `steady` has it.
    tokens : tuple of int
        Generated.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.prefill_seconds:.2f} s, {1000 * self.decode_seconds:.1f} ms/token"

    @classmethod
    def from_stamps(cls, begin: float, stamps: Sequence[float], tokens: Sequence[int]) -> Run:
        """From the moments at which the tokens came."""
        return cls.from_totals(stamps[0] - begin, stamps[-1] - begin, tokens)

    @classmethod
    def steady(cls, begin: float, stamps: Sequence[float], tokens: Sequence[int]) -> Run:
        """The same, but for decoding the median of the times between two tokens.

        A few steps record a CUDA graph, and take as long as many that replay it.
        """
        gaps = [after - before for before, after in itertools.pairwise(stamps)]
        return cls(stamps[0] - begin, statistics.median(gaps), tuple(tokens))

    @classmethod
    def from_totals(cls, first: float, last: float, tokens: Sequence[int]) -> Run:
        """From the seconds until the first token and the last of at least two."""
        return cls(first, (last - first) / (len(tokens) - 1), tuple(tokens))


@dataclass
class Timing:
    """The timed runs of one engine.

    Attributes
    ----------
    name : str
    runs : list of Run
    stats : dict
        For our engines, the measured ``kv_bytes_per_rank`` (peak) and bytes sent by purpose:
        ``prefill_bytes`` of the whole prompt, ``decode_bytes`` of one token, all ranks together.
    """

    name: str
    runs: list[Run] = field(default_factory=list)
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
        """Medians, every run, and what else was measured."""
        return {
            "name": self.name,
            "prefill_seconds": self.prefill,
            "decode_seconds_per_token": self.decode,
            "prefill_runs": [run.prefill_seconds for run in self.runs],
            "decode_runs": [run.decode_seconds for run in self.runs],
            **self.stats,
        }


def take_turns(
    engines: Mapping[str, Generate], prompt: list[int], new_tokens: int, repeats: int, say: Say
) -> dict[str, Timing]:
    """Warm every engine up, then time them in turn.

    Parameters
    ----------
    engines : mapping of name to function
    prompt : list of int
    new_tokens : int
        To generate in each run.
    repeats : int
        Timed runs of each engine.
    say : callable
        Told of every run.
    """
    timings = {name: Timing(name) for name in engines}
    for round_ in range(repeats + 1):
        for name, generate in engines.items():
            run = generate(prompt, new_tokens)
            kind = f"run {round_}" if round_ else "warm-up"
            say(f"{name}, {kind}: {run}")
            if round_:
                timings[name].runs.append(run)
    return timings
