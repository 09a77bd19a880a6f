"""Counts the cache room that requests need, and refuses those that can never have it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np

from razor_dist.cache.accounting import CacheAccounts, Ints
from razor_dist.cache.pages import PageTable
from razor_dist.config.errors import RequestError
from razor_dist.engine.request import Phase, Request
from razor_dist.parallel.sharding import shard_sizes

# Pinned prefixes that a refusal names: the server cuts a long message at its end.
_NAMED = 3
# Tokens of an answer that are worth giving where pinned prefixes leave no room for more.
_LEAST_ANSWER = 256
# Tokens of waiting prompts on every rank, those that they continue included.
Dealt = Mapping[Request, Ints]
_NONE: Dealt = {}


class PrefixSource(NamedTuple):
    """A sequence whose tokens a prompt may begin with."""

    key: int | None  # the sequence; None for an empty one
    begin: int  # its tokens that are taken
    short: bool  # all ranks may compute the rest in one step
    instead: bool = False  # the prompt takes its place: there may be no room beside it


class CacheNeed:
    """Quantities are those of `CacheAccounts`, without the last row, the scratch pool's."""

    def __init__(self, accounts: CacheAccounts) -> None:
        self._accounts, self._cache, self._sizes = accounts, accounts.cache, accounts.sizes[:-1]

    def check_or_fit(self, request: Request, pinned: Seq[Request]) -> None:
        """Check a request; with ``fit_max_tokens`` lower ``max_tokens`` before refusing it.

        Beside pinned prefixes an answer keeps `_LEAST_ANSWER` tokens at least. Raises as `check`.
        """
        try:
            self.check(request, pinned)
        except RequestError:
            if not request.params.fit_max_tokens:
                raise
            self._fit(request, pinned)
            self.check(request, pinned)

    def _fit(self, request: Request, pinned: Seq[Request]) -> None:
        """Lower ``max_tokens`` to the most that there is room for, if that is enough."""
        least = max(1, request.params.min_tokens)
        for beside, fewest in (((), least), (pinned, max(least, _LEAST_ANSWER))):
            most = request.max_tokens
            counts = range(min(fewest, most), most + 1)
            full = partial(self._is_full, request, beside)
            fitting = bisect.bisect_left(counts, True, key=full)
            request.max_tokens = counts[fitting - 1] if fitting else most
            if not fitting:
                return

    def _is_full(self, request: Request, pinned: Seq[Request], max_tokens: int) -> bool:
        """Return whether an answer of ``max_tokens`` has no room."""
        request.max_tokens = max_tokens
        try:
            self.check(request, pinned)
        except RequestError:
            return True
        return False

    def check(self, request: Request, pinned: Seq[Request]) -> None:
        """Refuse a request that is too large even for empty caches, or would wait for ever.

        Pinned prefixes end by abort only; ``pinned`` are those that only an abort frees.
        """
        sequences = 1 + len(request.forks)
        if sequences > self._cache.max_sequences:
            raise RequestError(
                f"n is {sequences}, and the engine has {self._cache.max_sequences} sequences; "
                "ask for fewer answers or start it with a larger max_num_seqs",
                param="n",
                code="max_num_seqs_exceeded",
            )
        own = self._lasting([request])
        need = self._lasting([request, *request.prefixes])
        if request.quota is not None:  # a context is worth nothing without a request behind it
            after = self._continuation(request)
            own, need = own + after, need + after
        over = self._exceeded(need)
        if over is not None:
            unit, what, setting = self._resource(over[0])
            answers = f" for {sequences} answers" if sequences > 1 else ""
            raise RequestError(
                f"the request needs {need[over] * unit} {what}{answers} ({request.total} in all), "
                f"which has {self._sizes[over] * unit}; shorten it or start the engine with "
                f"{setting}",
                code="kv_capacity_exceeded",
            )
        held = self._lasting(pinned)
        over = self._exceeded(held + own)
        most, of_all, remedy = self._cache.max_sequences, "engine's {} sequences", ""
        if self._cache.max_cached:  # pinned prefixes do not take those of answers
            most, sequences = self._cache.max_pinned, int(request.pinned)
            of_all = "{} prefixes that the engine keeps pinned"
        if sequences and len(pinned) + sequences > most:
            held_text = f"{len(pinned)} of the {of_all.format(most)}"
            setting = "a larger max_num_seqs"
        elif over is not None:
            unit, what, setting = self._resource(over[0])
            held_text = (
                f"{held[over] * unit} of the {self._sizes[over] * unit} {what}, where the request "
                f"needs {own[over] * unit}"
            )
            if request.max_tokens:
                remedy = f"give a lower max_tokens than {request.max_tokens}, "
        else:
            return
        names = [one.id for one in pinned[:_NAMED]] + ["..."] * (len(pinned) > _NAMED)
        raise RequestError(
            f"pinned prefixes hold {held_text}; {remedy}release one that is not needed, wait "
            f"until a context expires, or start the engine with {setting} ({len(pinned)} are "
            f"pinned: {', '.join(names)})",
            code="pinned_prefixes_hold_cache",
        )

    def check_quota(
        self, request: Request, quota: tuple[str, int], others: Iterable[Request]
    ) -> None:
        """Raise `RequestError` unless a prefix may be pinned beside its owner's ``others``."""
        request.quota, request.nbytes = quota, self.nbytes(request)
        held = self._held_by(quota[0], others)
        if held + request.nbytes > quota[1]:
            raise RequestError(
                f"this context would take {request.nbytes} bytes of the KV cache, and your others "
                f"hold {held} of the {quota[1]} that they may take together (--pinned-gb): "
                "end one, or wait until one expires",
                param="context",
                code="pinned_contexts_full",
            )

    def _held_by(self, owner: str, others: Iterable[Request]) -> int:
        """Bytes that an owner's pinned prefixes hold together: pages that they share count once.

        Of those that were released, the pages count that requests behind them still share.
        """
        others = list(others)
        own = [r for r in others if r.quota is not None and r.quota[0] == owner]
        shared = []
        for request in others:
            ends = [one.end for one in request.prefixes if one.ended and one in own]
            if ends and request.phase in (Phase.PREFILL, Phase.PREFILLED):
                answers = request.answers if request.phase is Phase.PREFILLED else []
                key = answers[0].key if answers else request.key
                stored = self._accounts.stored(key, ends[0])
                shared.append(self._accounts.full_pages(key, stored))
        return self._bytes(self._lasting(own, _NONE, *shared))

    def may_copy(self, request: Request, pages: int, others: Iterable[Request]) -> bool:
        """True if a pinned prefix may hold ``pages`` of its own beside `nbytes`, by its quota."""
        if request.quota is None:
            return True
        owner, most = request.quota
        own = request.nbytes + self.page_bytes(pages)
        return self._held_by(owner, others) + own <= most

    def page_bytes(self, pages: int) -> int:
        return int(self._accounts.weights[0] * pages)

    def fits(
        self, waiting: Seq[Request], pinned: Seq[Request], begun: Request, source: PrefixSource
    ) -> bool:
        """True if each of ``waiting`` fits beside ``pinned`` and a prompt ``begun`` from a source.

        `check` has counted ``begun``, and what continues it, as chunks of one prompt. The source
        may have been read in other chunks, which may have given a rank more of its tokens.
        """
        key, begin, end = source.key, source.begin, begun.end
        assert key is not None
        stored, chunks_end = self._accounts.stored(key, begin), begin if source.short else end
        own = self._accounts.need(stored, begin, chunks_end, begun.total)[:-1]
        dealt = {begun: stored + shard_sizes(begin, chunks_end, end, self._accounts.world_size)}
        held = own + self._lasting(pinned, dealt, self._accounts.full_pages(key, stored))
        needs = [self._lasting([request], dealt) for request in waiting]
        return all(self._exceeded(held + need) is None for need in [np.zeros_like(held), *needs])

    def fit_beside(self, waiting: Seq[Request], pinned: Seq[Request]) -> bool:
        """True if ``pinned`` prefixes fit together, and each of ``waiting`` beside all of them.

        They are counted as `check` counts them.
        """
        held = self._lasting(pinned)
        needs = [np.zeros_like(held), *(self._lasting([request]) for request in waiting)]
        sequences = max((1 + len(request.forks) for request in waiting), default=0)
        if self._cache.max_cached:  # pinned prefixes do not take those of answers
            sequences = 0
        fit = all(self._exceeded(held + need) is None for need in needs)
        return fit and len(pinned) + sequences <= self._cache.max_pinned

    def nbytes(self, request: Request) -> int:
        """Return a request's bytes on all ranks, without the prefix that it continues."""
        return self._bytes(self._need(request))

    def _bytes(self, quantities: Ints) -> int:
        return int((self._accounts.weights[: len(quantities), None] * quantities).sum())

    def _exceeded(self, need: Ints) -> tuple[int, int] | None:
        """Row and rank of what ``need`` has most too much of, if it does not fit empty caches."""
        over = need - self._sizes
        row, rank = map(int, np.unravel_index(over.argmax(), over.shape))
        return (row, rank) if over[row, rank] > 0 else None

    def _resource(self, row: int) -> tuple[int, str, str]:
        """Tokens in a unit of a row of ``_sizes``, what they are, and what makes it larger."""
        if row == 0:
            return self._cache.page_size, "tokens of KV cache on a rank", "a larger kv_tokens"
        setting = (
            "a larger max_num_seqs, shorter windows (window_max, or those of the head map) or more "
            "free memory"
        )
        return 1, "tokens of the streaming heads' cache", setting

    def _lasting(self, requests: Seq[Request], dealt: Dealt = _NONE, *more: Seq[PageTable]) -> Ints:
        """Return what requests take together until they end, ``more`` pages included.

        It is like ``_sizes``; ``dealt`` is as in `_stored`.
        """
        held = [r.key for r in requests if r.phase not in (Phase.WAITING, Phase.ENDED)]
        waiting = [self._need(r, dealt)[:-1] for r in requests if r.phase is Phase.WAITING]
        return sum(waiting, start=self._accounts.together(held, *more)[:-1])

    def _need(self, request: Request, dealt: Dealt = _NONE) -> Ints:
        """Return what a request takes that finds nothing in the cache but its pinned prefix."""
        stored = self._stored(request.prefix, dealt)
        chunks_end = request.base if request.short else request.end
        own = self._accounts.need(stored, request.base, chunks_end, request.total)
        end = request.end
        each = self._accounts.need(self._stored(request, dealt), end, end, request.total)
        return own + len(request.forks) * each

    def _continuation(self, request: Request) -> Ints:
        """Return what a short request takes that continues this one, like ``_sizes``."""
        end = request.end
        total = min(end + _LEAST_ANSWER, self._cache.max_tokens)
        return self._accounts.need(self._stored(request), end, end, total)[:-1]

    def _stored(self, prefix: Request | None, dealt: Dealt = _NONE) -> Ints:
        """Tokens on every rank of a prompt that is prefilled, and of those that it continues.

        Those of a waiting prompt are as ``dealt``, if known, or else as if all of it were read.
        """
        if prefix is None:
            return np.zeros(self._accounts.world_size, np.int64)
        if prefix in dealt:
            return dealt[prefix]
        if prefix.phase is not Phase.WAITING:
            return self._accounts.stored(prefix.key, prefix.end)
        chunks_end = prefix.base if prefix.short else prefix.end
        own = shard_sizes(prefix.base, chunks_end, prefix.end, self._accounts.world_size)
        return self._stored(prefix.prefix, dealt) + own
