"""What would make a deployment fit, or faster; all advice is planned before it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from razor_dist.config.sizes import tokens
from razor_dist.plan.deployment import Deployment

# The window that is proposed, in tokens: what the shipped settings of GLM-4-9B-1M have.
_WINDOW = 8192
# Numbers of ranks that are tried: up to two nodes of eight devices.
_RANKS = (1, 2, 4, 8, 16)
# Settings are named if they free this part of a rank's memory, or save this part of the time.
_WORTH_NAMING = 0.01
_WORTH_SECONDS = 0.25

# Bytes per rank of a deployment with some settings changed.
Bytes = Callable[[dict[str, Any]], int]


@dataclass(frozen=True)
class Remedy:
    changes: dict[str, Any]
    frees: int  # bytes per rank

    def __str__(self) -> str:
        return f"{self.name} frees {self.frees / 1e9:.1f} GB"

    @property
    def setting(self) -> str:
        return next(iter(self.changes))

    @property
    def name(self) -> str:
        return f"{self.setting}: {self.changes[self.setting]}"


@dataclass(frozen=True)
class Remedies:
    """Settings that free memory, the most first; ``together`` are as many as it takes to fit."""

    alone: tuple[Remedy, ...]
    together: tuple[Remedy, ...]

    def __str__(self) -> str:
        if not self.alone:
            return "no setting frees memory"
        said = ", ".join(map(str, self.alone))
        if self.together:
            return f"{said}; with {' and '.join(r.name for r in self.together)} it fits"
        return f"{said}: not enough"

    @property
    def best(self) -> list[Remedy]:
        """The best remedy for each setting."""
        return list({one.setting: one for one in reversed(self.alone)}.values())[::-1]

    @property
    def changes(self) -> dict[str, Any]:
        return {name: value for one in self.best for name, value in one.changes.items()}


def remedies(d: Deployment, context: int, budget: float, needs: Bytes) -> Remedies:
    """Try each setting that can free memory for a prompt of ``context`` tokens, then several."""
    before = needs({})
    tried = [Remedy({n: v}, before - needs({n: v})) for n, v in _levers(d, context)]
    worth = [remedy for remedy in tried if remedy.frees > _WORTH_NAMING * before]
    worth.sort(key=lambda remedy: -remedy.frees)
    chosen: list[Remedy] = []
    for remedy in worth:
        if any(remedy.setting == one.setting for one in chosen):
            continue
        chosen.append(remedy)
        if needs({name: v for one in chosen for name, v in one.changes.items()}) <= budget:
            return Remedies(tuple(worth), tuple(chosen))
    return Remedies(tuple(worth), ())


def _levers(d: Deployment, context: int) -> Iterator[tuple[str, Any]]:
    config = d.config
    windows = [heads.policy.window(context - 1) for heads in d.streaming]
    least = max(_WINDOW, config.window_min)
    if d.head_map.windows is None and windows and max(windows) > least:
        yield "window_max", least
    if d.dtype == torch.float32:
        yield "dtype", "bf16"
    elif d.kv_dtype == torch.float32:
        yield "kv_dtype", "bf16"
    if d.kv_dtype != torch.int8:
        yield "kv_dtype", "int8"
    if config.max_num_seqs > 1:
        yield "max_num_seqs", 1
    if (config.kv_tokens or 0) > context:
        yield "kv_tokens", context
    if d.chunked_prefill_size >= 8 * d.world_size:
        yield "chunked_prefill_size", d.chunked_prefill_size // 4


def fewest_ranks(
    d: Deployment, budget: Callable[[int], float], needs: Bytes, found: Remedies | None = None
) -> str:
    """Say on how many ranks it fits, a power of two up to 16; also with the settings ``found``."""

    def fewest(changes: dict[str, Any]) -> str:
        fit = (n for n in _RANKS if needs({"world_size": n, **changes}) <= budget(n))
        return str(next(fit, f"more than {_RANKS[-1]}"))

    said = f"fewest ranks that fit: {fewest({})}"
    if found is not None and found.alone:
        # More ranks take longer chunks by default, and so larger activations.
        changes = {"chunked_prefill_size": d.chunked_prefill_size} | found.changes
        names = ", ".join(f"{name}: {value}" for name, value in changes.items())
        said += f"; with {names}: {fewest(changes)}"
    return said


def faster_windows(
    d: Deployment, context: int, seconds: float, prefill: Callable[[dict[str, Any]], float]
) -> list[str]:
    """Say what long windows cost a prefill of ``seconds``, if they are the settings' choice."""
    windows = [heads.policy.window(context - 1) for heads in d.streaming]
    least = max(_WINDOW, d.config.window_min)
    if d.head_map.windows is not None or d.exact or not windows or max(windows) <= least:
        return []
    shorter = prefill({"window_max": least})
    if shorter > (1 - _WORTH_SECONDS) * seconds:
        return []
    return [
        f"streaming heads keep {tokens(max(windows))} tokens; with window_max: {least} the prompt "
        f"would take {shorter:.1f} s instead of {seconds:.1f} s"
    ]
