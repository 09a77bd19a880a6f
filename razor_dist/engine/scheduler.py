"""The ranks' next steps: admission, then long and short steps in turn."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from razor_dist.cache.sequence import shard_sizes
from razor_dist.config.errors import RequestError
from razor_dist.engine.capacity import CacheConfig
from razor_dist.engine.request import Request
from razor_dist.engine.step import Op, StepPlan
from razor_dist.engine.turns import Turns
from razor_dist.parallel.zigzag import whole_shards

Ints = npt.NDArray[np.int64]


class Scheduler:
    """First come, first admitted (or by priority), as soon as all that a request needs is free.

    Whatever waits is admitted some day: what runs ends by itself, except for pinned prefixes, and
    `add` refuses a request that would not fit beside those. A pinned prefix counts from the moment
    it is queued, so none that comes later can take a waiting request's place: it waits behind it.

    Long steps, chunks of long prompts, alternate with short steps: the next token of all requests
    that are already answering, and whole short prompts, as many as `Turns` lets into one step.
    Several long prompts are prefilled at once: `Turns` says which goes next, and how far, so that
    nobody is delayed by more than about ``max_step`` seconds at a time.

    Every rank's pools have the sizes of ``cache``; how much of them is free differs by rank, and is
    known here by the same arithmetic that the ranks allocate with. ``running`` has the admitted
    requests by key, pinned prefixes included.
    """

    def __init__(self, cache: CacheConfig, world_size: int, turns: Turns) -> None:
        self.cache, self.world_size, self.turns = cache, world_size, turns
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        # Row by row, on every rank: pages of the pool, places of the streaming heads' arenas, one
        # after the other, and pages of the scratch pool, which only prompts take.
        places = [arena.places for arena in cache.arenas]
        sizes = [cache.num_pages, *places, cache.scratch_pages]
        self._free: Ints = np.full((world_size, len(sizes)), sizes).T
        self._sizes = self._free[:-1].copy()
        self._short_last = True
        # On one rank a chunk is the same in a long and in a short step, unless prefill is exact.
        self._one_kind = world_size == 1 and not cache.scratch_pages

    def _pages(self, tokens: Ints | list[int]) -> Ints:
        return -(-np.asarray(tokens) // self.cache.page_size)

    def _need(self, request: Request) -> Ints:
        """Pages and places that a request takes, like ``_free``."""
        size = self.world_size
        new = shard_sizes(request.begin, request.chunks_end, request.total, size)
        scratch = np.zeros(size, np.int64)
        if request.prefix is None and self.cache.scratch_pages:
            scratch = self._pages(shard_sizes(0, request.chunks_end, request.chunks_end, size))
        # Full pages are shared with the prefix; a partly filled one is copied.
        held = self._shards(request.prefix)
        pages = self._pages(held + new) - held // self.cache.page_size
        # Of an arena whatever is free can be taken, wherever it is (`StreamingCache`).
        places = [np.full(size, arena.width(request.total)) for arena in self.cache.arenas]
        return np.stack([pages, *places, scratch])

    def _shards(self, prefix: Request | None) -> Ints:
        """Tokens of a pinned prefix on every rank."""
        if prefix is None:
            return np.zeros(self.world_size, np.int64)
        own = shard_sizes(prefix.begin, prefix.chunks_end, prefix.end, self.world_size)
        return self._shards(prefix.prefix) + own

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises `RequestError` with the code ``kv_capacity_exceeded`` if it could not be admitted
        with every cache empty but for the prompts it continues; ``pinned_prefixes_hold_cache`` if
        it could not be admitted until a pinned prefix is released.
        """
        request.short = self.turns.is_short(request, self.world_size)
        self._check_size(request)
        self._check_beside_pinned(request)
        for one in (request, *request.siblings):
            if one.prefix is not None:
                one.prefix.continued_by += 1
        at = len(self.waiting)
        if self.turns.by_priority and not request.pinned:
            # Not before the prefix that it waits for, nor before who alone keeps a released one,
            # whose room was counted as free; and a pinned prefix, which keeps what it gets, goes
            # before nobody.
            while (
                at
                and self.waiting[at - 1] is not request.prefix
                and not any(prefix.released for prefix in prefixes(self.waiting[at - 1]))
                and (self.waiting[at - 1].params.priority > request.params.priority)
            ):
                at -= 1
        self.waiting.insert(at, request)

    def _check_size(self, request: Request) -> None:
        """Refuse a request that is too large even for caches that hold nothing else."""
        together = [request, *request.siblings]
        if len(together) > self.cache.max_sequences:
            raise RequestError(
                f"n is {len(together)}, and the engine has {self.cache.max_sequences} sequences; "
                "ask for fewer answers or start it with a larger max_num_seqs",
                param="n",
            )
        need = self._lasting([*together, *prefixes(request)])
        over = self._exceeded(need)
        if over is not None:
            unit, what, setting = self._resource(over[0])
            answers = f" for {len(together)} answers" if request.siblings else ""
            raise RequestError(
                f"the request needs {need[over] * unit} {what}{answers} ({request.total} in all), "
                f"which has {self._sizes[over] * unit}; shorten it or start the engine with "
                f"{setting}",
                code="kv_capacity_exceeded",
            )

    def _check_beside_pinned(self, request: Request) -> None:
        """Refuse a request that would wait for ever, because pinned prefixes end by abort only."""
        pinned = self._held()
        together = [request, *request.siblings]
        need, held = self._lasting(together), self._lasting(pinned)
        over = self._exceeded(held + need)
        if len(pinned) + len(together) > self.cache.max_sequences:
            held_text = f"{len(pinned)} of the engine's {self.cache.max_sequences} sequences"
            setting = "a larger max_num_seqs"
        elif over is not None:
            unit, what, setting = self._resource(over[0])
            held_text = (
                f"{held[over] * unit} of the {self._sizes[over] * unit} {what}, where the request "
                f"needs {need[over] * unit}"
            )
        else:
            return
        raise RequestError(
            f"pinned prefixes ({', '.join(p.id for p in pinned)}) hold {held_text}; release one "
            f"that is not needed or start the engine with {setting}",
            code="pinned_prefixes_hold_cache",
        )

    def _exceeded(self, need: Ints) -> tuple[int, int] | None:
        """Row and rank of what ``need`` has most too much of, if it does not fit empty caches."""
        over = need - self._sizes
        row, rank = map(int, np.unravel_index(over.argmax(), over.shape))
        return (row, rank) if over[row, rank] > 0 else None

    def _resource(self, row: int) -> tuple[int, str, str]:
        """Tokens in a unit of a row of ``_sizes``, what they are, and what makes it larger."""
        if row == 0:
            return self.cache.page_size, "tokens of KV cache on a rank", "a larger kv_tokens"
        setting = "a larger max_num_seqs, a smaller window_max or more free memory"
        return 1, "tokens of the streaming heads' cache", setting

    def _held(self) -> list[Request]:
        """Requests that only an abort frees: pinned prefixes, and the prompts that these continue.

        Waiting ones count as well. A released prompt does not count if only requests that will end
        by themselves continue it: all of them were queued before whatever is queued next.
        """
        pinned = [r for r in [*self.running.values(), *self.waiting] if r.pinned and not r.released]
        held = {r.key: r for k in pinned for r in [k, *prefixes(k)]}
        return list(held.values())

    def _lasting(self, requests: list[Request]) -> Ints:
        """Return what requests take together until they end, like ``_sizes``."""
        return sum((self._need(r)[:-1] for r in requests), start=np.zeros_like(self._sizes))

    def admit(self) -> StepPlan | None:
        """Open the oldest waiting request if its prefix is ready and all it needs is free."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        together = [request, *request.siblings]
        if len(self.running) + len(together) > self.cache.max_sequences:
            return None
        prefix = request.prefix
        need = sum(map(self._need, together), start=np.zeros_like(self._free))
        if prefix is not None and not (prefix.key in self.running and prefix.prefilled):
            return None
        if (need > self._free).any():
            return None
        self.waiting.popleft()
        self._free -= need
        self.running |= {one.key: one for one in together}
        return self._begin(request)

    def _begin(self, request: Request) -> StepPlan:
        request.prefilled_to = request.begin
        return StepPlan(
            Op.OPEN if request.prefix is None else Op.FORK,
            request.key,
            end=request.chunks_end,
            total=request.total,
            source=0 if request.prefix is None else request.prefix.key,
            # Another may continue a pinned one; an answer's last token is sampled and never read.
            max_read=(self.cache.max_tokens if request.pinned else request.total) - 1,
        )

    def fork(self, request: Request) -> list[tuple[Request, StepPlan]]:
        """Begin the siblings of a request whose prompt is read; return them and their plans."""
        siblings, request.siblings = request.siblings, []
        return [(sibling, self._begin(sibling)) for sibling in siblings]

    @property
    def _long(self) -> list[Request]:
        """Prompts that are being read in chunks."""
        return [r for r in self.running.values() if not (r.prefilled or r.short)]

    def next(self) -> StepPlan | None:
        running = [r for r in self.running.values() if not r.unforked]
        unread = self.turns.first_class([r for r in running if not r.prefilled])
        short = [r for r in unread if r.short]
        long = [r for r in unread if not r.short]
        answering = [r for r in running if r.prefilled and not (r.pinned or r.released)]
        joins = False
        if long:
            request = self.turns.choose(long)
            # Whoever is still waiting could not be admitted, and is not served by shorter steps.
            others = [r for r in unread if r is not request]
            length = self.turns.length(request, others, answering=bool(answering))
            joins = self._one_kind and request.params.prompt_logprobs is None
            if not (short or answering) or (self._short_last and not joins):
                self._short_last = False
                return self._long_plan(request, length)
        if short or answering:
            self._short_last = True
            tokens = [(r.key, r.generated[-1:]) for r in answering]
            prompts = self.turns.together(short, self.world_size)
            tokens += [(r.key, r.prompt.tolist()) for r in prompts]
            if joins:
                unread_tokens = request.prompt[request.prefilled_to - request.begin :]
                tokens.append((request.key, unread_tokens[: max(1, int(length))].tolist()))
            tokens.sort(key=lambda item: len(item[1]) > 1)
            pairs = [number for key, ids in tokens for token in ids for number in (key, token)]
            return StepPlan(Op.SHORT, payload=torch.tensor(pairs))
        return None

    def _long_plan(self, request: Request, length: float) -> StepPlan:
        begin, end = request.prefilled_to, request.end
        if length < end - begin:
            end = min(end, begin + whole_shards(length, self.world_size))
        count = request.params.prompt_logprobs
        following = 0 if count is None else 1
        return StepPlan(
            Op.LONG,
            request.key,
            begin=begin,
            end=end,
            last=end == request.end or self._one_kind,
            prompt_logprobs=-1 if count is None else count,
            payload=torch.from_numpy(
                request.prompt[begin - request.begin :][: end - begin + following].astype(np.int64)
            ),
        )

    def long_done(self, plan: StepPlan, seconds: float) -> None:
        """Note that a prompt's next chunk has been prefilled, and in what time."""
        request = self.running[plan.sequence]
        self.turns.took(self._long, request, seconds)
        self.turns.cost.observe(plan.end - plan.begin, plan.begin, seconds)
        request.prefilled_to = plan.end
        if request.prefilled:  # the ranks give scratch pages back as soon as the prompt ends
            self._free[-1] += self._need(request)[-1]

    def short_done(self, plan: StepPlan, seconds: float) -> list[tuple[Request, int]]:
        """Note that a short step has been made, and in what time.

        Return its requests, in order, and how many tokens of each prompt it has read.
        """
        step = [(self.running[key], len(tokens)) for key, tokens in plan.by_sequence()]
        read = [(request, 0 if request.prefilled else count) for request, count in step]
        cost, long = self.turns.cost, self._long
        if any(count for _, count in read):
            # Every rank computes every token, but attends to its own part of what is before it.
            ranks, pairs = self.world_size, 0.0
            for request, count in step:
                context = request.prefilled_to + len(request.generated)
                pairs += count * (context + ranks * count / 2)
            cost.learn(ranks * (len(plan.payload) // 2), pairs, seconds)
        else:
            cost.answered(seconds)
        for request, count in read:
            if count and not request.short:
                self.turns.took(long, request, cost.work(count, request.prefilled_to))
            request.prefilled_to += count
        return read

    def remove(self, request: Request) -> list[StepPlan]:
        """Forget a request; return the plans that free its caches, if it has any.

        It stays until the requests that continue it have ended.
        """
        request.released = True
        if request.continued_by:
            return []
        if request.unforked:
            assert request.prefix is not None
            request.prefix.siblings.remove(request)
            if self.running.pop(request.key, None) is not None:
                self._free += self._need(request)
            return self._release_prefix(request)
        if request in self.waiting:
            self.waiting.remove(request)
            return self._release_prefix(request)
        del self.running[request.key]
        need = self._need(request)
        need[-1] *= not request.prefilled
        self._free += need
        plan = StepPlan(Op.CLOSE, request.key)
        return [plan, *self._release_prefix(request)]

    def _release_prefix(self, request: Request) -> list[StepPlan]:
        prefix = request.prefix
        if prefix is None:
            return []
        prefix.continued_by -= 1
        return self.remove(prefix) if prefix.released else []


def prefixes(request: Request) -> list[Request]:
    """The request that another continues, the one that this continues, and so on."""
    return [] if request.prefix is None else [request.prefix, *prefixes(request.prefix)]
