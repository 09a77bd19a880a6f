"""The batch of a step: which sequences are in it, and with how many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Answer, Prefill
from razor_dist.parallel.sharding import is_even, shard_sizes
from razor_dist.parallel.zigzag import Chunk, whole_shards
from razor_dist.protocol.step_plan import BatchEntry, Compute

# Tokens of an answer in one step at most.
_LONGEST_RUN = 64

# Takes answers, each with the most tokens that a step can read of it (its last one counts), and how
# many tokens of prompts each rank computes in the step. Returns a draft for each answer, at least
# one token shorter.
Drafter = Callable[[Sequence[tuple[Answer, int]], Sequence[int]], list[list[int]]]


class Batch:
    """Plans steps.

    A step computes the next token of every running sequence, whole short prompts, as many as
    `PrefillPolicy` lets into one step, and one chunk of a long prompt. If there are several long
    prompts, `PrefillPolicy` chooses which one goes on and how long its chunk is, so that no request
    is delayed by more than about ``max_step`` seconds at a time.

    ``checkpoint`` is called with each prompt that goes on, and the position where its next chunk
    ends: it may have the caches saved as of there.
    """

    def __init__(
        self,
        cache: CacheConfig,
        world_size: int,
        prefill_policy: PrefillPolicy,
        checkpoint: Callable[[Prefill, int], None],
    ) -> None:
        self._cache, self._ranks, self._policy = cache, world_size, prefill_policy
        self._checkpoint = checkpoint
        self.drafter: Drafter | None = None
        # Tokens of an answer after which no rollback window reaches the prompt's end: a copy is
        # kept there.
        tails = [arena.tail - arena.policy.block for arena in cache.arenas]
        self.answer_kept = min(tails, default=0)

    def plan(self, prefills: Sequence[Prefill], running: Sequence[Answer]) -> Compute | None:
        """Plan a step: a token of each answer, prompts that join it whole, a part of a long one."""
        policy = self._policy
        prefills = policy.first_class(prefills)
        short: list[Prefill] = []
        long: list[Prefill] = []
        for prefill in prefills:
            (short if policy.joins(prefill) else long).append(prefill)
        # At least half of a step is left for a long prompt, or it would starve among short ones.
        joining, joined = policy.together(short, part=0.5 if long else 1.0)
        pieces = [self._entry(p, math.inf, sharded=not p.short) for p in joining]
        if long:
            chosen = policy.choose(long)
            # Requests that still wait could not be admitted: shorter steps do not help them.
            others = [prefill for prefill in prefills if prefill is not chosen]
            # An exact prefill has all heads' keys elsewhere until it ends.
            exact = self._cache.scratch_pages > 0 and not chosen.begin
            able = not exact and chosen.request.params.prompt_logprobs is None
            lengths = [answer.length for answer in running]
            length, sharded = policy.take(
                chosen, others, answering=lengths, joined=joined, able=able
            )
            pieces.append(self._entry(chosen, length, sharded=sharded))
        drafts = self._drafts(running, pieces)
        entries = [
            BatchEntry(
                answer.key,
                torch.tensor(answer.generated[-1:] + draft),
                sources=answer.params.return_sources > 0,
                run=len(draft) > 0,
            )
            for answer, draft in zip(running, drafts, strict=True)
        ]
        entries += pieces
        return Compute.of(entries) if entries else None

    def _drafts(self, running: Sequence[Answer], pieces: list[BatchEntry]) -> list[list[int]]:
        """Return each answer's draft, which is read with its last token and verified."""
        if self.drafter is None:
            return [[] for _ in running]
        beside = [0] * self._ranks
        for piece in pieces:
            n = len(piece.tokens)
            own = shard_sizes(0, n, n, self._ranks) if piece.sharded else [n] * self._ranks
            beside = [sum(of_rank) for of_rank in zip(beside, own, strict=True)]
        return self.drafter([(answer, self._longest_run(answer)) for answer in running], beside)

    def _longest_run(self, answer: Answer) -> int:
        """Tokens of an answer, its last one among them, that one step can read at most."""
        # A token is drawn after each token of the run.
        most = min(_LONGEST_RUN, answer.request.max_tokens - len(answer.generated))
        if self.answer_kept > len(answer.generated):  # there a copy is kept
            most = min(most, self.answer_kept - len(answer.generated))
        policies = {arena.policy for arena in self._cache.arenas}
        return min([most, *(policy.run(answer.length, most) for policy in policies)])

    def _entry(self, prefill: Prefill, length: float, *, sharded: bool) -> BatchEntry:
        """Return a prompt's next tokens: its rest, or ``length`` of them in whole shards.

        All ranks compute tokens of a long prompt, instead of a chunk, only if every rank has its
        window and stores as many of these tokens as of a chunk, for which there is room. Else they
        are a chunk, after which every rank has the window.
        """
        left, begin = prefill.remaining, prefill.position
        n, count = len(left), prefill.request.params.prompt_logprobs
        if length < n:
            n = min(n, whole_shards(length, self._ranks))
        n = min([n, *(stop - begin for stop in prefill.checkpoints if stop > begin)])
        if n < len(left):
            self._checkpoint(prefill, begin + n)
        last = n == len(left) or begin + n in prefill.checkpoints
        if not (sharded or prefill.short):
            last = True
            even = is_even(Chunk(begin, begin + n, self._ranks))
            sharded = not (prefill.whole_window and even)
        return BatchEntry(
            prefill.key,
            torch.from_numpy(left[:n].astype(np.int64)),
            sharded=sharded,
            last=last,
            prompt_logprobs=-1 if count is None else count,
            following=-1 if count is None or n == len(left) else int(left[n]),
        )
