"""Stops of a prefill at which a copy of its caches is kept, so that other prompts begin there.

Streaming heads' caches have the windows of a sequence's last positions alone, so that a prompt
which parts from a cached one further back finds nothing, unless a copy was kept as of there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from razor_dist.cache.accounting import CacheAccounts
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Awaited, Prefill, Request
from razor_dist.prefix.index import common_tokens

# Pages of tokens that a prompt must have in common with another to wait for it, or for a copy to be
# kept where they part.
WORTH_PAGES = 4
# Ends of a conversation's messages where copies are kept: the first, which is the system prompt's
# or a document's, and as many of the latest.
_LATEST_ENDS = 3


class Checkpoints:
    """Chooses positions in prompts; ``end_ids`` are the tokens that end each message of a chat."""

    def __init__(
        self, accounts: CacheAccounts, policy: PrefillPolicy, end_ids: Iterable[int]
    ) -> None:
        self._accounts, self._policy, self._end_ids = accounts, policy, sorted(end_ids)
        self._worth = WORTH_PAGES * accounts.cache.page_size

    def plan(self, prefill: Prefill, common: int) -> None:
        """Set a new prefill's checkpoints.

        One is where it parts from the cached sequence with which it has most tokens in ``common``;
        the others, optional, are at ends of messages.
        """
        if prefill.short or not prefill.request.uses_prefix_cache:
            return
        stop = self._stop(prefill, min(common, prefill.end - 1))
        if stop - prefill.begin >= self._worth:
            prefill.stop_at(stop)
        for end in self._message_ends(prefill):
            prefill.stop_at(end, optional=True)

    def _stop(self, prefill: Prefill, position: int) -> int:
        """Return where prefill can stop: all chunks but a prompt's last have whole shards."""
        shards = 2 * self._accounts.world_size
        return prefill.begin + (position - prefill.begin) // shards * shards

    def _message_ends(self, prefill: Prefill) -> list[int]:
        """Return where other conversations may part from this one: at ends of its messages.

        Not near its own end, where its caches can be cut anywhere.
        """
        ends, begin = [], prefill.begin
        first_cut = self._accounts.first_cut(prefill.end, begin)
        tokens = prefill.request.tokens[begin:first_cut]
        for at in np.flatnonzero(np.isin(tokens, self._end_ids)).tolist():
            stop = self._stop(prefill, prefill.begin + at + 1)
            if stop - begin >= self._worth and stop < prefill.end:
                ends.append(stop)
                begin = stop
        return [*ends[:1], *ends[1:][-_LATEST_ENDS:]]

    def awaited(self, request: Request, cached: int, prefills: Sequence[Prefill]) -> Awaited | None:
        """Return which of the ``prefills`` a prompt waits for, if one will soon cache more of it.

        That is more than the ``cached`` tokens. Where the prompts part a prefill may leave no
        caches by itself: then it is to stop there.
        """
        worth = cached + self._worth
        for prefill in prefills:
            other = prefill.request
            if other.key > request.key or other.namespace != request.namespace:
                continue
            if not other.cache_prompt:  # it will cache nothing
                continue
            if prefill.end < worth or other.tokens[0] != request.tokens[0]:
                continue
            common = min(
                common_tokens(other.tokens[: prefill.end], request.tokens), request.end - 1
            )
            if common < worth:
                continue
            ends_soon = self._ends_soon(prefill, common, common - cached)
            if ends_soon and common >= self._accounts.first_cut(prefill.end, prefill.begin):
                return _comes(prefill, prefill.end)
            stop = self._stop(prefill, common)
            if prefill.position < stop < prefill.end and stop >= worth and not prefill.short:
                prefill.stop_at(stop)
                return _comes(prefill, stop)
        return None

    def _ends_soon(self, prefill: Prefill, common: int, shared: int) -> bool:
        """True if the rest of a prefill behind ``common`` tokens has at most ``shared`` tokens.

        Also if all that is left of the prefill takes about one step. A prompt must not wait for the
        end of a much longer one because both begin with the same system prompt.
        """
        left = prefill.end - prefill.position
        if prefill.short or self._policy.is_quick(left, prefill.position):
            return True
        return prefill.end - max(prefill.position, common) <= shared


def _comes(prefill: Prefill, position: int) -> Awaited:
    """True while a prefill goes on, is not cut, and has not come to a position."""
    end = prefill.end
    return lambda prefills: (
        prefill in prefills and prefill.end == end and prefill.position < position
    )
