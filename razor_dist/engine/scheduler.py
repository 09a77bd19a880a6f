"""The ranks' next steps: admission, and who is served together."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from razor_dist.cache.sequence import shard_sizes
from razor_dist.config.errors import RequestError
from razor_dist.engine.capacity import CacheConfig
from razor_dist.engine.request import Request
from razor_dist.engine.step import Op, Piece, StepPlan
from razor_dist.engine.turns import Turns
from razor_dist.parallel.zigzag import whole_shards

Ints = npt.NDArray[np.int64]


class Scheduler:
    """First come, first admitted (or by priority), as soon as all that a request needs is free.

    Whatever waits is admitted some day: what runs ends by itself, except for pinned prefixes, and
    `add` refuses a request that would not fit beside those. A pinned prefix counts from the moment
    it is queued, so none that comes later can take a waiting request's place: it waits behind it.

    A step is the next token of all requests that are already answering, short prompts as a whole,
    as many as `Turns` lets into one step, and a chunk of a long one. Several long prompts are
    prefilled at once: `Turns` says which goes next, and how far, so that nobody is delayed by more
    than about ``max_step`` seconds at a time.

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
        request.short = self.turns.is_short(request)
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

    def next(self) -> StepPlan | None:
        """Plan a step: a token of every answer, prompts that join it whole, and a chunk."""
        running = [r for r in self.running.values() if not r.unforked]
        unread = self.turns.first_class([r for r in running if not r.prefilled])
        answering = [r for r in running if r.prefilled and not (r.pinned or r.released)]
        joining = self.turns.together([r for r in unread if self.turns.joins(r)])
        pieces = [Piece(r.key, torch.tensor(r.generated[-1:])) for r in answering]
        pieces += [self._piece(r, len(r.prompt)) for r in joining]
        long = [r for r in unread if not self.turns.joins(r)]
        if long:
            request = self.turns.choose(long)
            # Whoever is still waiting could not be admitted, and is not served by shorter steps.
            others = [r for r in unread if r is not request]
            length = self.turns.length(request, others, answering=bool(answering))
            pieces.append(self._piece(request, length))
        return StepPlan.step(pieces) if pieces else None

    def _piece(self, request: Request, length: float) -> Piece:
        """Return a prompt's next tokens: its rest, or ``length`` of them in whole shards."""
        left = request.prompt[request.prefilled_to - request.begin :]
        n, count = len(left), request.params.prompt_logprobs
        if length < n:
            n = min(n, whole_shards(length, self.world_size))
        return Piece(
            request.key,
            torch.from_numpy(left[:n].astype(np.int64)),
            sharded=not request.short,
            last=n == len(left),
            prompt_logprobs=-1 if count is None else count,
            following=-1 if count is None or n == len(left) else int(left[n]),
        )

    def done(self, plan: StepPlan, seconds: float) -> list[tuple[Request, int]]:
        """Note that a step has been made, and in what time.

        Return its requests, in order, and how many tokens of each prompt it has read.
        """
        cost, step = self.turns.cost, [(self.running[p.sequence], p) for p in plan.pieces]
        read = [(r, 0 if r.prefilled else len(piece.tokens)) for r, piece in step]
        if any(count for _, count in read):
            # What is not sharded is computed by every rank, but attends to the rank's own part of
            # what is before it.
            tokens = pairs = 0.0
            for request, n in read:
                times = self.world_size if request.short else 1
                tokens += times * n
                pairs += n * (request.prefilled_to + times * n / 2)
            cost.learn(tokens, pairs, seconds, answers=sum(n == 0 for _, n in read))
        else:
            cost.answered(seconds, len(read))
        in_turn = [r for r in self.running.values() if not (r.prefilled or self.turns.joins(r))]
        for request, count in read:
            if count:
                self.turns.took(in_turn, request, self.turns.work(request, count))
        for request, count in read:
            request.prefilled_to += count
            if count and request.prefilled:  # the ranks give scratch pages back
                self._free[-1] += self._need(request)[-1]
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
