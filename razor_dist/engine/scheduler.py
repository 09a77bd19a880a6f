"""The ranks' next steps: admission, and who is served together."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from razor_dist.cache.accounting import Ints
from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.admission import Admission, Wait
from razor_dist.engine.batch import Batch
from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Answer, Phase, Prefill, Request
from razor_dist.protocol.step_plan import BatchEntry, Compute, StepPlan
from razor_dist.protocol.structured_outputs import Grammar

# Priority of an aborted prompt's last chunk, which is short: the caches are held until then.
_FIRST = -sys.maxsize


class Computed(NamedTuple):
    """The part of a step that was one sequence's."""

    of: Prefill | Answer
    entry: BatchEntry


class Scheduler:
    """First come, first admitted (or by priority), as soon as all that a request needs is free.

    Whatever waits is admitted some day: what runs ends by itself, except for pinned prefixes, and
    `add` refuses a request that would not fit beside those. A pinned prefix counts from the moment
    it is queued, and passes others that wait only if each fits beside it: it takes no one's place.

    `Batch` says what a step computes. `Admission` has the caches, and takes ``end_ids``.
    """

    def __init__(
        self,
        cache: CacheConfig,
        world_size: int,
        prefill_policy: PrefillPolicy,
        *,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.cache, self.world_size, self.prefill_policy = cache, world_size, prefill_policy
        self.admission = Admission(
            cache, world_size, prefill_policy, end_ids=end_ids, beside=self._beside
        )
        self.room = self.admission.room
        self.waiting: deque[Request] = deque()
        # By the keys of their sequences: prompts that are being prefilled, in the order in which
        # they were admitted; answers; pinned prefixes that are prefilled.
        self.prefills: dict[int, Prefill] = {}
        self.running: dict[int, Answer] = {}
        self.pinned = self.room.pinned
        self.batch = Batch(cache, world_size, prefill_policy, self.admission.checkpoint)

    @property
    def active(self) -> int:
        """Sequences that are read or answered, answers that are to fork included."""
        forks = sum(len(prefill.request.forks) for prefill in self.prefills.values())
        return len(self.prefills) + forks + len(self.running)

    @property
    def sequences(self) -> int:
        """Sequences taken of `CacheConfig.max_sequences`: `active`, and pinned without a cache."""
        return self.active + (0 if self.cache.max_cached else len(self.pinned))

    @property
    def on_ranks(self) -> Ints:
        """Rank 0's accounts of each rank, to be compared with the rank's own; int64 ``[n, P]``.

        The rows are `CacheAccounts.free`, references to pages, and sequences. Answers that will
        fork from their prompt have room reserved here, which no rank knows of yet: it is left out.
        """
        accounts = self.room.accounts
        forks = [fork.key for one in self.prefills.values() for fork in one.request.forks]
        free, held = sum(map(accounts.exclusive, forks), start=accounts.free), accounts.held(*forks)
        ranks = range(accounts.world_size)
        references = [sum(len(one.tables[rank].pages) for one in held) for rank in ranks]
        return np.vstack([free, references, [len(held) for _ in ranks]])

    @property
    def idle(self) -> bool:
        """True if nothing is to be computed: what is there only waits to be continued."""
        return not (self.waiting or self.prefills or self.running)

    @property
    def compiling(self) -> list[Future[Grammar]]:
        """The grammars that requests wait for; none while a step has sequences to compute.

        Such a step waits for no grammar, and among thousands of requests the search takes time.
        """
        if self.prefills or self.running:
            return []
        return [r.grammar for r in self.waiting if r.grammar and not r.grammar.done()]

    def add(self, request: Request) -> None:
        """Queue a request; lower its ``max_tokens`` first, if that may be (`SamplingParams`).

        Raises `RequestError` with the code ``kv_capacity_exceeded`` if it could not be admitted
        with every cache empty but for the prompts it continues; ``pinned_prefixes_hold_cache`` if
        it could not be admitted until a pinned prefix is released.
        """
        request.short = self.prefill_policy.is_short(request, request.base)
        self.admission.need.check_or_fit(request, self._held())
        for prefix in request.prefixes:  # it waits until they are prefilled
            prefix.priority = min(prefix.priority, request.priority)
        at = len(self.waiting)
        if self.prefill_policy.by_priority and not request.pinned:
            # A pinned prefix keeps its room, so it overtakes no request.
            while at and _may_overtake(request, self.waiting[at - 1]):
                at -= 1
        self.waiting.insert(at, request)

    def _held(self, *, released: bool = False) -> list[Request]:
        """Requests that only an abort frees: pinned prefixes, and prompts that these wait for.

        Waiting ones count as well. If only requests that will end by themselves continue a
        ``released`` prompt, it counts only if wanted: they were queued before what is queued next.
        """
        prefills = [prefill.request for prefill in self.prefills.values()]
        requests = [*self.pinned.values(), *prefills, *self.waiting]
        pinned = [r for r in requests if r.pinned and (released or not r.released)]
        held = dict.fromkeys(r for one in pinned for r in (one, *one.prefixes))
        return [request for request in held if not request.ended]

    def _beside(self, request: Request) -> tuple[list[Request], list[Request]]:
        """Return the requests that wait and are not pinned, and the other pinned ones."""
        waiting = [other for other in self.waiting if not other.pinned]
        return waiting, [other for other in self._held(released=True) if other is not request]

    def admit(self) -> tuple[list[Request], list[StepPlan]]:
        """Open waiting requests while all that they need is free; return them and the plans.

        The oldest goes first. One that waits for its grammar, or for what will cache its beginning,
        lets others pass; so does one whose pinned prefix is being prefilled, and so does a pinned
        prefix beside which another that waits does not fit, or one too many.
        """
        first = next((request for request in self.waiting if request.ready), None)
        if first is not None and self._has_place(first):
            for answer in self.running.values():
                self.room.grown(answer.key, answer.length)
        opened: list[Request] = []
        plans: list[StepPlan] = []
        while (request := self._admit_one(plans)) is not None:
            opened.append(request)
        return opened, plans

    def _has_place(self, request: Request) -> bool:
        return self.sequences + 1 + len(request.forks) <= self.cache.max_sequences

    def _admit_one(self, plans: list[StepPlan]) -> Request | None:
        going = list(self.prefills.values())
        all_fit: bool | None = None  # the same for every pinned request that waits
        full = len(self.pinned) + sum(one.request.pinned for one in going) >= self.cache.max_pinned
        for index, request in enumerate(self.waiting):
            if not request.ready:
                continue
            if not self._has_place(request):
                break
            if request.prefix is not None and request.prefix.phase is not Phase.PREFILLED:
                continue
            if request.pinned and index and all_fit is None:
                all_fit = self.admission.all_fit_beside(request)
            if request.pinned and (full or (index and not all_fit)):
                continue
            awaitable = self.prefill_policy.not_after(request, going)
            opened = self.admission.open(request, awaitable, plans)
            if opened is Wait.ROOM:
                break
            if isinstance(opened, Prefill):
                del self.waiting[index]
                self.prefills[request.key] = opened
                plans += self._let_go(request.prefix)
                return request
        return None

    def next(self) -> Compute | None:
        """Plan a step; None if nothing is to be computed."""
        return self.batch.plan(list(self.prefills.values()), list(self.running.values()))

    def done(self, plan: Compute, seconds: float) -> list[Computed]:
        """Note that a step has been made, and in what time; return what it computed, in order."""
        policy, going = self.prefill_policy, self.prefills | self.running
        step = [Computed(going[entry.sequence], entry) for entry in plan.entries]
        in_turn = [prefill for prefill in self.prefills.values() if not policy.joins(prefill)]
        policy.learn([(of, len(entry.tokens), entry.sharded) for of, entry in step], seconds)
        prefilled = [(of, entry) for of, entry in step if isinstance(of, Prefill)]
        for of, entry in prefilled:
            policy.took(in_turn, of, policy.work(of, len(entry.tokens), sharded=entry.sharded))
        for of, entry in prefilled:
            self.room.advance(of, entry)
        return step

    def start(self, prefill: Prefill) -> list[StepPlan]:
        """Begin the answers to a prompt that is prefilled, or pin it.

        The first answer goes on with the prompt's sequence, the others fork from it. If the first
        was aborted, that sequence ends.
        """
        request = prefill.request
        request.enter(Phase.PREFILLED)
        del self.prefills[request.key]
        plans = [self.admission.fork(answer) for answer in request.forks]
        self.running |= {answer.key: answer for answer in request.answers}
        if request.pinned and self._needs(request):
            plans += self.room.pin(request)
        elif request.key not in self.running:
            plans += self.room.end(request, request.key, prefill.tokens, keep=True)
        return [*plans, *self._let_go(request)]

    def copies(self, step: Iterable[Computed]) -> list[StepPlan]:
        """Return the plans that keep copies of sequences that have come to where one is wanted."""
        plans: list[StepPlan] = []
        for of, _ in step:
            if isinstance(of, Prefill) and of.position in of.checkpoints and not of.done:
                plans += self.room.checkpoint(of)
        for answer in self.running.values():
            if 0 < self.batch.answer_kept == len(answer.generated):
                plans += self.room.copy(answer.request, answer.key, answer.tokens)
        return plans

    def end(self, answer: Answer, *, keep: bool = True) -> list[StepPlan]:
        """End an answer; return the plans that free its caches, or ``keep`` them, if it has any."""
        request = answer.request
        request.answers.remove(answer)
        plans: list[StepPlan] = []
        if request.phase is Phase.PREFILLED:
            del self.running[answer.key]
            plans += self.room.end(request, answer.key, answer.tokens, keep=keep)
        elif request.phase is Phase.PREFILL and answer.key != request.key:
            self.room.accounts.close(answer.key)  # no rank knows of it
        return [*plans, *self._let_go(request)]

    def release(self, request: Request) -> list[StepPlan]:
        """Release a pinned prefix; it stays while requests wait that continue it.

        Those that have been opened hold its pages, or copies, themselves.
        """
        request.released = True
        return self._let_go(request)

    def _needs(self, request: Request) -> bool:
        """False once nothing is to come of it: no answer, and no request that continues it."""
        continued = (other.prefix is request for other in self.waiting)
        return any(continued) if request.released else request.pinned or bool(request.answers)

    def _let_go(self, request: Request | None) -> list[StepPlan]:
        """End a request that is no longer needed."""
        return [] if request is None or self._needs(request) else self._end_request(request)

    def _end_request(self, request: Request) -> list[StepPlan]:
        """Forget a request that is not needed, unless its long prefill can soon be cached."""
        plans: list[StepPlan] = []
        waited = request.phase is Phase.WAITING
        if waited:
            self.waiting.remove(request)
            for one in request.prefixes:  # no longer as urgent as what waited for it
                others = (r.priority for r in self.waiting if one in r.prefixes)
                one.priority = min([one.params.priority, *others])
        elif request.phase is Phase.PREFILL:
            prefill = self.prefills[request.key]
            if self.admission.is_worth_keeping(prefill):
                # While a prompt is prefilled in chunks, no rank has the whole window: a last one
                # sees to it.
                prefill.cut(min(prefill.end, prefill.position + 2 * self.world_size))
                request.priority = _FIRST
                return []
            del self.prefills[request.key]
            plans += self.room.end(request, request.key, prefill.tokens, keep=prefill.instead)
        elif self.pinned.pop(request.key, None) is not None:
            plans += self.room.end(request, request.key, request.tokens, keep=True)
        request.enter(Phase.ENDED)
        plans += self.admission.end_load()
        return [*plans, *self._let_go(request.prefix)] if waited else plans


def _may_overtake(request: Request, other: Request) -> bool:
    """True if a request may wait before another, of a later priority, that came earlier.

    It may not pass the prefix that it waits for, nor the last request that uses a released prefix,
    whose room was counted as free.
    """
    released = any(one.released and not one.ended for one in other.prefixes)
    later = other.params.priority > request.params.priority
    return later and other is not request.prefix and not released
