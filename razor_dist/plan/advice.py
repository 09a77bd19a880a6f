"""Advice on settings that make a deployment fit, or faster, each confirmed by a plan with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from razor_dist.config.sizes import tokens
from razor_dist.kernels.quantized import has_scale
from razor_dist.plan.deployment import Deployment

# The window that is proposed, as in the shipped settings of GLM-4-9B-1M.
_WINDOW_TOKENS = 8192
# Numbers of ranks that are tried: up to two nodes of eight devices.
_RANKS = (1, 2, 4, 8, 16)
# Settings are named if they free this share of a rank's memory, or save this share of the time.
_WORTH_NAMING = 0.01
_WORTH_SECONDS = 0.25

# From changed settings to the deployment's bytes per rank.
Bytes = Callable[[dict[str, Any]], int]


@dataclass(frozen=True)
class Remedy:
    setting: str
    value: Any
    frees: int  # bytes per rank

    def __str__(self) -> str:
        return f"{self.name} frees {self.frees / 1e9:.1f} GB"

    @property
    def name(self) -> str:
        return f"{self.setting}: {self.value}"


@dataclass(frozen=True)
class Remedies:
    """Settings that free memory, the most first; ``together`` are the fewest with which it fits."""

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
        """For each setting, the value that frees most, in the order of ``alone``."""
        found: dict[str, Remedy] = {}
        for one in self.alone:
            found.setdefault(one.setting, one)
        return list(found.values())


def remedies(d: Deployment, context: int, before: int, budget: float, needs: Bytes) -> Remedies:
    """Try each setting that can free some of ``before`` bytes per rank, then several together.

    Settings that would make the engine refuse the deployment are left out.
    """

    def taken(changes: dict[str, Any]) -> bool:
        changed = replace(d, config=d.config.model_copy(update=changes))
        return changed.refusal in (None, d.refusal)

    levers = [(name, to) for name, to in _levers(d, context) if taken({name: to})]
    tried = [Remedy(name, to, before - needs({name: to})) for name, to in levers]
    worth = [remedy for remedy in tried if remedy.frees > _WORTH_NAMING * before]
    worth.sort(key=lambda remedy: -remedy.frees)
    alone = Remedies(tuple(worth), ())
    for count in range(1, len(alone.best) + 1):
        together = alone.best[:count]
        # The first alone has been planned already.
        after = needs(_changes(together)) if count > 1 else before - together[0].frees
        if after <= budget:
            return replace(alone, together=tuple(together))
    return alone


def _changes(remedies: Sequence[Remedy]) -> dict[str, Any]:
    return {one.setting: one.value for one in remedies}


def _shorter_window(d: Deployment, context: int) -> tuple[int, int] | None:
    """The longest window and a shorter one to propose; None if there is none in the settings."""
    windows = [heads.policy.window(context - 1) for heads in d.streaming]
    least = max(_WINDOW_TOKENS, d.config.window_min)
    if d.head_map.windows is not None or not windows or max(windows) <= least:
        return None
    return max(windows), least


def _levers(d: Deployment, context: int) -> Iterator[tuple[str, Any]]:
    config, windows = d.config, _shorter_window(d, context)
    if windows is not None:
        yield "window_max", windows[1]
    if d.dtype == torch.float32:
        yield "dtype", "bf16"
    elif d.kv_dtype == torch.float32:
        yield "kv_dtype", "bf16"
    if not has_scale(d.kv_dtype):
        yield "kv_dtype", "int8"
    if config.max_num_seqs > 1:
        yield "max_num_seqs", 1
    if (config.kv_tokens or 0) > context:
        yield "kv_tokens", context
    if d.chunked_prefill_size >= 8 * d.world_size:
        yield "chunked_prefill_size", d.chunked_prefill_size // 4


def fewest_ranks(
    d: Deployment, fits: Callable[[dict[str, Any]], bool], found: Remedies | None = None
) -> str:
    """Name the fewest ranks on which it fits, alone and with the settings ``found``."""

    def fewest(changes: dict[str, Any]) -> str:
        fit = (n for n in _RANKS if fits({"world_size": n, **changes}))
        return str(next(fit, f"more than {_RANKS[-1]}"))

    said = f"fewest ranks that fit: {fewest({})}"
    if found is not None and found.alone:
        # More ranks take longer chunks by default, and so larger activations.
        changes = {"chunked_prefill_size": d.chunked_prefill_size} | _changes(found.best)
        names = ", ".join(f"{name}: {value}" for name, value in changes.items())
        said += f"; with {names}: {fewest(changes)}"
    return said


def faster_windows(
    d: Deployment, context: int, seconds: float, prefill: Callable[[dict[str, Any]], float]
) -> list[str]:
    """Name the seconds that shorter windows would save of a prefill; empty if few, or fixed."""
    windows = _shorter_window(d, context)
    if windows is None or d.exact:
        return []
    longest, least = windows
    shorter = prefill({"window_max": least})
    if shorter > (1 - _WORTH_SECONDS) * seconds:
        return []
    return [
        f"streaming heads keep {tokens(longest)} tokens; with window_max: {least} the prompt would "
        f"take {shorter:.1f} s instead of {seconds:.1f} s"
    ]
