"""Maps of equal bytes: retrieval heads, a class of long windows, and short windows for the rest.

**Bytes.** The keys and values of a sequence of N tokens on one rank: N tokens for a retrieval head;
for a streaming head the sinks, the compensation token and the window, which holds up to
``block - 1`` tokens more than its length. The most at any length up to N counts. The *KV footprint*
(PruLong, arXiv 2506.17121) also counts for how long tokens are kept: it is the number of tokens
that heads keep, summed over all positions, as a fraction of full attention's.

**Ladder.** All heads begin with the short window. A criterion gives the order in which heads become
retrieval heads. ``Mass`` measures, on ordinary text, the attention that a head gives to tokens
that a window drops; the heads that regain most of it get the middle window. Each step upgrades one
head, to the class that has less than its share of the bytes, and the ladder ends at the first step
beyond the budget. So for one middle window a larger budget shortens no head's window.

Letters: K key-value heads, G query heads for each of them, T tokens, L lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.heads.decision import Flags, Pairs, Scores, Windows, ranked
from razor_dist.heads.head_map import HeadMap, choose
from razor_dist.identify.criterion import Criterion, Sample, score
from razor_dist.kernels.query import Query
from razor_dist.models.shape import ModelShape

Masses = Mapping[int, Scores]
"""By window, in tokens: the mass that it drops of each KV head, ``[layers][K]``."""

_QUERIES: Final = 256  # whose weights are in memory at once
_DOUBLINGS: Final = 3  # of the short window, tried for the middle class


@dataclass(frozen=True)
class Budget:
    """Limit on the KV bytes of one sequence; see the module.

    Attributes
    ----------
    bytes : int
        The limit.
    tokens : int
        N, the sequence length at which bytes are counted.
    policy : StreamingPolicy
        The streaming heads' policy; each head's window replaces the policy's.
    shape : ModelShape
        Of the model.
    token_bytes : int
        Bytes of one token's key and value in one head.
    short : int
        The short window, in tokens.
    share : float
        Fraction of the bytes beyond short windows for middle windows; 0 makes two classes.
    middle : int or None
        The middle window; None takes the doubling of ``short`` whose map drops the least mass.
    longest : int or None
        The longest of these doublings that is tried; None: any.
    """

    bytes: int
    tokens: int
    policy: StreamingPolicy
    shape: ModelShape
    token_bytes: int
    short: int
    share: float
    middle: int | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"middle_share must be from 0 to below 1, got {self.share}")
        if not 0 < self.short < self.tokens:
            raise ConfigError(
                f"short_window is {self.short} tokens, but must be above 0 and below the "
                f"{self.tokens} of --budget-tokens: a window of all tokens drops nothing"
            )
        if self.bytes < self.least:
            raise ConfigError(
                f"budget is {self.bytes} bytes, but short windows of {self.short} tokens alone "
                f"take {self.least} at {self.tokens} tokens: give more, or a shorter --short-window"
            )
        if self.share and not self.middles:
            raise ConfigError(
                f"no window between the short one of {self.short} tokens and all {self.tokens} "
                "tokens is a doubling of it: give --middle-window, or --middle-share 0 for two "
                "classes"
            )
        for middle in self.middles if self.share else ():
            if not self.short < middle or self.cost(middle) >= self.tokens:
                raise ConfigError(
                    f"middle_window is {middle} tokens, but must be longer than the short window "
                    f"of {self.short} and too short for all {self.tokens} tokens"
                )

    @classmethod
    def of(
        cls, config: EngineConfig, shape: ModelShape, tokens: int, *, short: int | None, **rest: Any
    ) -> Budget:
        """Build a budget by a config's policy, whose window at N is the default of ``short``."""
        policy = StreamingPolicy.of(config)
        short = policy.window(tokens - 1) if short is None else short
        return cls(tokens=tokens, policy=policy, shape=shape, short=short, **rest)

    @property
    def heads(self) -> int:
        return self.shape.layers * self.shape.kv_heads

    @property
    def least(self) -> int:
        """KV bytes if every head has the short window."""
        return self.heads * self.cost(self.short) * self.token_bytes

    @property
    def middles(self) -> tuple[int, ...]:
        """Possible windows of the middle class: the given one, or doublings of the short one."""
        if self.middle is not None:
            return (self.middle,)
        found = (self.short << power for power in range(1, _DOUBLINGS + 1))
        longest = self.tokens if self.longest is None else self.longest
        return tuple(w for w in found if w <= longest and self.cost(w) < self.tokens)

    def cost(self, window: int | None) -> int:
        """The most tokens that a head of this window keeps; N for None, a retrieval head."""
        if window is None:
            return self.tokens
        own = self.policy.with_window(window, alibi=False)
        return min(self.tokens, own.sinks + own.compensation + own.capacity(self.tokens))

    def footprint(self, windows: Windows) -> float:
        """PruLong's KV footprint of reading N tokens one by one, as a fraction of full attention's.

        A token is kept while its key may still be read.
        """
        whole = self.tokens * (self.tokens + 1) // 2
        seen: dict[int | None, int] = {None: whole}
        for window in {window for row in windows for window in row} - {None}:
            assert window is not None
            own = self.policy.with_window(window, alibi=False)
            dropped = (own.starts(0, self.tokens) - own.sinks).clip(min=0)
            seen[window] = whole - int(dropped.sum()) + own.compensation * int((dropped > 0).sum())
        return sum(seen[window] for row in windows for window in row) / (self.heads * whole)


@dataclass(frozen=True)
class WindowDecision:
    """A decision of windows within a budget."""

    budget: Budget
    windows: Windows
    middle: int | None  # the middle window; None in a map of two classes

    @property
    def retrieval(self) -> Flags:
        return tuple(tuple(window is None for window in row) for row in self.windows)

    @cached_property
    def counts(self) -> dict[int | None, int]:
        """Heads by window: None for retrieval heads, then the longest."""
        flat = [window for row in self.windows for window in row]
        kinds = [None, *sorted({window for window in flat if window is not None}, reverse=True)]
        return {kind: flat.count(kind) for kind in kinds}

    @property
    def bytes(self) -> int:
        tokens = sum(count * self.budget.cost(window) for window, count in self.counts.items())
        return tokens * self.budget.token_bytes

    def mass(self, masses: Masses) -> float:
        """Mean over heads of the attention mass that their windows drop, from 0 to 1."""
        dropped = sum(
            masses[window][layer][head]
            for layer, row in enumerate(self.windows)
            for head, window in enumerate(row)
            if window is not None
        )
        return dropped / self.budget.heads

    def __str__(self) -> str:
        names = ", ".join(
            f"{count} keep everything" if window is None else f"{count} a window of {window}"
            for window, count in self.counts.items()
        )
        budget, full = self.budget, self.budget.heads * self.budget.tokens
        return (
            f"{self.bytes:,} of {budget.bytes:,} bytes at {budget.tokens:,} tokens "
            f"({self.bytes / budget.token_bytes / full:.1%} of full attention's; KV footprint "
            f"{budget.footprint(self.windows):.1%}): of {budget.heads} KV heads {names}"
        )


def plan(order: Pairs, budget: Budget, masses: Masses) -> WindowDecision:
    """Choose windows for KV heads, in the ``order`` of a criterion, the best first."""
    if budget.share == 0:
        return _climb(order, (), budget, None)
    found = [_climb(order, _by_mass(masses, budget, one), budget, one) for one in budget.middles]
    return min(found, key=lambda one: one.mass(masses))


def _by_mass(masses: Masses, budget: Budget, middle: int) -> Pairs:
    """Order heads by the mass that the middle window keeps and the short one drops."""
    pairs = zip(masses[budget.short], masses[middle], strict=True)
    return ranked(tuple(tuple(a - b for a, b in zip(*rows, strict=True)) for rows in pairs))


def _climb(order: Pairs, by_mass: Pairs, budget: Budget, middle: int | None) -> WindowDecision:
    """Upgrade heads one by one until the next is beyond the budget."""
    windows: dict[tuple[int, int], int | None] = dict.fromkeys(order, budget.short)
    short = budget.cost(budget.short)
    left = budget.bytes // budget.token_bytes - budget.heads * short
    spent = {None: 0, middle: 0}  # tokens, by class
    queues = {None: list(reversed(order)), middle: list(reversed(by_mass or order))}
    while queues[None]:
        wants_middle = spent[middle] * (1 - budget.share) < spent[None] * budget.share
        kind = middle if middle is not None and wants_middle and queues[middle] else None
        head = queues[kind].pop()
        if windows[head] is None:  # a retrieval head already
            continue
        price = budget.cost(kind) - budget.cost(windows[head])
        if price > left:
            break
        if windows[head] == middle:  # its bytes are no longer the middle class's
            spent[middle] -= budget.cost(middle) - short
        windows[head] = kind
        spent[kind] += budget.cost(kind) - short
        left -= price
    rows = range(budget.shape.layers)
    table = tuple(tuple(windows[i, j] for j in range(budget.shape.kv_heads)) for i in rows)
    return WindowDecision(budget, table, middle)


def budgeted(found: HeadMap, budget: Budget, masses: Masses) -> tuple[HeadMap, WindowDecision]:
    """Give a map's heads windows within a budget, by the order of its own scores.

    Raise `HeadMapError` if its scores rank no KV heads (`razor_dist.heads.head_map.choose`).
    """
    chosen = plan(choose(found, budget.heads).kept, budget, masses)
    about: dict[str, Any] = {
        "bytes": budget.bytes,
        "tokens": budget.tokens,
        "short_window": budget.short,
        "middle_window": chosen.middle,
        "middle_share": budget.share,
        "sinks": budget.policy.sinks,
        "block": budget.policy.block,
        "compensation": budget.policy.compensation,
    }
    windows = None if all(map(all, chosen.retrieval)) else chosen.windows
    # Query heads that another rule selected do not count here.
    changed = replace(
        found,
        retrieval=chosen.retrieval,
        windows=windows,
        selected={},
        settings={**found.settings, "budget": about},
        verification=None,
    )
    return changed, chosen


class Mass(Criterion):
    """Sums the mass, without the sinks', that windows drop in the second half of each text."""

    def __init__(self, model: PreTrainedModel, windows: Sequence[int], sinks: int) -> None:
        shape = ModelShape.from_config(model.config)
        self._windows, self._sinks = torch.tensor(sorted(windows)), sinks
        self._dropped = torch.zeros(len(windows), shape.layers, shape.kv_heads, dtype=torch.float64)
        self._queries = 0

    def begin(self, sample: Sample) -> None:
        super().begin(sample)
        self._queries += len(sample.ids) - len(sample.ids) // 2

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        out, lse_KGT = query.attend(k, v, causal=True)
        end, device = len(self.sample.ids), k.device
        keys_K1DT, windows_L = k[:, None].float().transpose(-1, -2), self._windows.to(device)
        for start in range(end // 2, end, _QUERIES):
            stop = min(start + _QUERIES, end)
            products = query.q[:, :, start:stop].float() * query.scale @ keys_K1DT[..., :stop]
            weights = torch.exp(products - lse_KGT[:, :, start:stop, None])
            weights[..., : self._sinks] = 0
            # Windows drop the keys before `first`, all of which precede the query.
            first_TL = torch.arange(start, stop, device=device)[:, None] + 1 - windows_L
            before = weights.mean(1).cumsum(-1, dtype=torch.float64)
            index = (first_TL - 1).clamp(min=0).expand(len(k), -1, -1)
            dropped_KTL = before.gather(-1, index) * (first_TL > 0)
            self._dropped[:, layer] += dropped_KTL.sum(1).T.cpu()
        return out.to(query.q.dtype).flatten(0, 1).transpose(0, 1)

    def scores(self) -> Tensor:
        """Return the mean mass dropped, by window in ascending order: float64 ``[L layers, K]``."""
        return (self._dropped / max(1, self._queries)).flatten(0, 1)


def masses(
    model: PreTrainedModel,
    batch: Iterable[Sample],
    windows: Sequence[int],
    sinks: int,
    on_sample: Callable[[int], None] | None = None,
) -> Masses:
    """Measure the mass that each window drops, in one pass per sample."""
    layers = ModelShape.from_config(model.config).layers
    rows = score(model, batch, Mass(model, windows, sinks), on_sample)
    starts = range(0, len(rows), layers)
    return {
        window: rows[start : start + layers]
        for window, start in zip(sorted(windows), starts, strict=True)
    }
