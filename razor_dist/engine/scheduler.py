"""The ranks' next steps: admission, and who is served together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.admission import Admission
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Request, prefixes
from razor_dist.engine.step_cost import Work
from razor_dist.parallel.sharding import is_even
from razor_dist.parallel.zigzag import Chunk, whole_shards
from razor_dist.protocol.step_plan import BatchEntry, StepPlan

# Tokens of an answer in one step at most.
_LONGEST_RUN = 64

# From answers, each with the tokens that a step can read of it, its last one among them, to what
# may follow these: fewer tokens than that.
Drafter = Callable[[Sequence[tuple[Request, int]]], list[list[int]]]


class Scheduler:
    """First come, first admitted (or by priority), as soon as all that a request needs is free.

    Whatever waits is admitted some day: what runs ends by itself, except for pinned prefixes, and
    `add` refuses a request that would not fit beside those. A pinned prefix counts from the moment
    it is queued, so none that comes later can take a waiting request's place: it waits behind it.

    A step computes the next token of every running sequence, whole short prompts, as many as
    `PrefillPolicy` lets into one step, and one chunk of a long prompt. If there are several long
    prompts, `PrefillPolicy` chooses which one goes on and how long its chunk is, so that no request
    is delayed by more than about ``max_step`` seconds at a time.

    ``running`` has the admitted requests by key, pinned prefixes included. Room in the caches is
    `Admission`'s; ``share`` and ``end_ids`` are its.
    """

    def __init__(
        self,
        cache: CacheConfig,
        world_size: int,
        prefill_policy: PrefillPolicy,
        *,
        share: bool = False,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.cache, self.world_size, self.prefill_policy = cache, world_size, prefill_policy
        self.admission = Admission(cache, world_size, prefill_policy, share=share, end_ids=end_ids)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.drafter: Drafter | None = None
        # Tokens of an answer after which no rollback window reaches the prompt's end.
        tails = [arena.tail - arena.policy.block for arena in cache.arenas]
        self._answer_kept = min(tails, default=0)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises `RequestError` with the code ``kv_capacity_exceeded`` if it could not be admitted
        with every cache empty but for the prompts it continues; ``pinned_prefixes_hold_cache`` if
        it could not be admitted until a pinned prefix is released.
        """
        request.short = self.prefill_policy.is_short(request)
        self.admission.demand.check(request, self._held())
        for one in (request, *request.siblings):
            if one.prefix is not None:
                one.prefix.continued_by += 1
        at = len(self.waiting)
        if self.prefill_policy.by_priority and not request.pinned:
            # Not before the prefix that it waits for, nor before the last request that uses a
            # released prefix, whose room was counted as free. A pinned prefix keeps its room, so
            # it overtakes no request.
            while (
                at
                and self.waiting[at - 1] is not request.prefix
                and not any(prefix.released for prefix in prefixes(self.waiting[at - 1]))
                and (self.waiting[at - 1].params.priority > request.params.priority)
            ):
                at -= 1
        self.waiting.insert(at, request)

    def _held(self) -> list[Request]:
        """Requests that only an abort frees: pinned prefixes, and the prompts that these continue.

        Waiting ones count as well. A released prompt does not count if only requests that will end
        by themselves continue it: all of them were queued before whatever is queued next.
        """
        pinned = [r for r in [*self.running.values(), *self.waiting] if r.pinned and not r.released]
        held = {r.key: r for k in pinned for r in [k, *prefixes(k)]}
        return list(held.values())

    def admit(self) -> list[StepPlan]:
        """Open the oldest waiting request whose prefix is ready, if all it needs is free.

        The last of the plans opens it; those before evict. One that waits for a prompt which has
        much in common with it, and is being read, or for its grammar, lets others pass; so does one
        whose pinned prefix is being read.
        """
        for index, request in enumerate(self.waiting):
            if not request.ready:
                continue
            prefix, together = request.prefix, [request, *request.siblings]
            if len(self.running) + len(together) > self.cache.max_sequences:
                break
            if prefix is not None and not (prefix.key in self.running and prefix.prefilled):
                continue
            if index and request.pinned:
                break  # a waiting request may not fit beside it, and it stays until released
            plans = self.admission.open(request, self.running.values())
            if plans is None:
                break
            if plans:
                del self.waiting[index]
                self.running |= {one.key: one for one in together}
                return plans
        return []

    def fork(self, request: Request) -> list[tuple[Request, StepPlan]]:
        """Begin the siblings of a request whose prompt is read; return them and their plans."""
        siblings, request.siblings = request.siblings, []
        return [(sibling, self.admission.fork(sibling)) for sibling in siblings]

    def next(self) -> StepPlan | None:
        """Plan a step: a token of each answer, prompts that join it whole, a part of a long one."""
        running = [r for r in self.running.values() if not r.unforked]
        unread = self.prefill_policy.first_class([r for r in running if not r.prefilled])
        answering = [r for r in running if r.prefilled and not (r.pinned or r.released)]
        short: list[Request] = []
        long: list[Request] = []
        for request in unread:
            (short if self.prefill_policy.joins(request) else long).append(request)
        # At least half of a step is left for a long prompt, or it would starve among short ones.
        joining, joined = self.prefill_policy.together(short, part=0.5 if long else 1.0)
        entries = [
            BatchEntry(
                r.key,
                torch.tensor(r.generated[-1:] + draft),
                sources=r.params.return_sources > 0,
                run=len(draft) > 0,
            )
            for r, draft in zip(answering, self._drafts(answering), strict=True)
        ]
        entries += [self._entry(r, math.inf, sharded=not r.short) for r in joining]
        if long:
            request = self.prefill_policy.choose(long)
            # Requests that still wait could not be admitted: shorter steps do not help them.
            others = [r for r in unread if r is not request]
            # An exact prefill has all heads' keys elsewhere until it ends.
            exact = self.cache.scratch_pages > 0 and not request.begin
            able = not exact and request.params.prompt_logprobs is None
            lengths = [r.length for r in answering]
            length, sharded = self.prefill_policy.take(
                request, others, answering=lengths, joined=joined, able=able
            )
            entries.append(self._entry(request, length, sharded=sharded))
        return StepPlan.step(entries) if entries else None

    def _drafts(self, answering: Sequence[Request]) -> list[list[int]]:
        """What may follow each answer; it is read with the answer's last token, and verified."""
        if self.drafter is None:
            return [[] for _ in answering]
        return self.drafter([(request, self._longest_run(request)) for request in answering])

    def _longest_run(self, request: Request) -> int:
        """Tokens of an answer, its last one among them, that one step can read at most."""
        # As many tokens are drawn.
        most = min(_LONGEST_RUN, request.max_tokens - len(request.generated))
        if self._answer_kept > len(request.generated):  # there a copy is kept
            most = min(most, self._answer_kept - len(request.generated))
        policies = {arena.policy for arena in self.cache.arenas}
        return min([most, *(policy.run(request.length, most) for policy in policies)])

    def _entry(self, request: Request, length: float, *, sharded: bool) -> BatchEntry:
        """Return a prompt's next tokens: its rest, or ``length`` of them in whole shards.

        If all ranks are to compute them, though it is no short prompt, every rank must have its
        window, and keep as many of its tokens as of a chunk, for which there is room: else they are
        a chunk, after which every rank has it.
        """
        left, begin = request.unread, request.prefilled_to
        n, count = len(left), request.params.prompt_logprobs
        if length < n:
            n = min(n, whole_shards(length, self.world_size))
        n = min([n, *(stop - begin for stop in request.stops if stop > begin)])
        if n < len(left):
            self.admission.checkpoint(request, begin + n)
        last = n == len(left) or begin + n in request.stops
        if not (sharded or request.short):
            last = True
            sharded = not (request.whole and is_even(Chunk(begin, begin + n, self.world_size)))
        return BatchEntry(
            request.key,
            torch.from_numpy(left[:n].astype(np.int64)),
            sharded=sharded,
            last=last,
            prompt_logprobs=-1 if count is None else count,
            following=-1 if count is None or n == len(left) else int(left[n]),
        )

    def done(self, plan: StepPlan, seconds: float) -> list[tuple[Request, int]]:
        """Note that a step has been made, and in what time.

        Return its requests, in order, and how many tokens of each prompt it has read.
        """
        step = [(self.running[p.sequence], p) for p in plan.entries]
        read = [(r, 0 if r.prefilled else len(entry.tokens)) for r, entry in step]
        chunks, wholes, answers, before, tokens, pairs = 0, 0, 0, 0, 0.0, 0.0
        for (request, n), entry in zip(read, plan.entries, strict=True):
            at, dealt = request.length, entry.sharded and self.world_size > 1
            # What is not sharded may be computed by every rank, but attends to the rank's own part
            # of what is before it.
            times = 1 if entry.sharded else self.prefill_policy.repeats
            chunks |= dealt
            wholes += n > 0 and not dealt
            # Each token of a run reads what is before it, and has its own logits.
            answers += 0 if n else len(entry.tokens)
            before += at * (1 if n else len(entry.tokens))
            tokens += times * n
            pairs += n * (at + times * n / 2)
        self.prefill_policy.cost.learn(
            Work(1, chunks, wholes, answers, before, tokens, pairs), seconds
        )
        in_turn = [
            r for r in self.running.values() if not (r.prefilled or self.prefill_policy.joins(r))
        ]
        for (request, count), entry in zip(read, plan.entries, strict=True):
            if count:
                took = self.prefill_policy.work(request, count, sharded=entry.sharded)
                self.prefill_policy.took(in_turn, request, took)
        for (request, count), entry in zip(read, plan.entries, strict=True):
            begin = request.prefilled_to
            request.prefilled_to += count
            request.whole = entry.last or not entry.sharded
            if entry.sharded:
                assert request.allocation is not None
                chunk = Chunk(begin, request.prefilled_to, self.world_size)
                request.allocation.chunks.append(chunk)
            if count and request.prefilled:
                self.admission.prefilled(request)
        return read

    def copies(self, requests: Sequence[Request]) -> list[StepPlan]:
        """Return the plans that keep copies of requests that have come to where one is wanted."""
        plans: list[StepPlan] = []
        if self.admission.prefix_cache is None:
            return plans
        for request in requests:
            if self.running.get(request.key) is not request:
                continue  # it has ended
            reading = request.prefilled_to in request.stops and not request.prefilled
            if reading or 0 < self._answer_kept == len(request.generated):
                plans += self.admission.copy(request)
        return plans

    def remove(self, request: Request) -> list[StepPlan]:
        """Forget a request; return the plans that free its caches or keep them, if it has any.

        It stays until the requests that continue it have ended, or until a long prompt of which
        much has been read can be kept.
        """
        request.released = True
        if request.continued_by:
            return []
        if request.unforked:
            assert request.prefix is not None
            request.prefix.siblings.remove(request)
            if self.running.pop(request.key, None) is not None:
                self.admission.forgo(request)
            return self._release_prefix(request)
        if request in self.waiting:
            self.waiting.remove(request)
            return self._release_prefix(request)
        if self.admission.is_worth_keeping(request):
            # While a prompt is read in chunks, no rank has the whole window: a last one sees to it.
            request.cut(min(request.end, request.prefilled_to + 2 * self.world_size))
            return []
        del self.running[request.key]
        plans = self.admission.end(request, keep=request.prefilled and request.sound)
        return [*plans, *self._release_prefix(request)]

    def _release_prefix(self, request: Request) -> list[StepPlan]:
        prefix = request.prefix
        if prefix is None:
            return []
        prefix.continued_by -= 1
        return self.remove(prefix) if prefix.released else []
