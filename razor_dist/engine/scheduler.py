"""What the ranks do next: admission, then prefill waves and decode steps in turn."""

from __future__ import annotations

from collections import deque

from razor_dist.cache.sequence import shard_sizes
from razor_dist.engine.plan import Op, StepPlan
from razor_dist.engine.request import Request
from razor_dist.engine.runner import CacheConfig
from razor_dist.errors import RequestError
from razor_dist.parallel.zigzag import waves


class Scheduler:
    """First come, first served; a request is admitted when all it may ever need is free.

    A prompt's waves alternate with decode steps of the requests that are already answering, so
    that a long prompt delays them by one wave at a time.

    Parameters
    ----------
    cache : CacheConfig
        Every rank's pools have these sizes; how much of them is free differs by rank, and is
        known here by the same arithmetic that the ranks allocate with.
    world_size : int
    """

    def __init__(self, cache: CacheConfig, world_size: int) -> None:
        self.cache, self.world_size = cache, world_size
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._free_pages = [cache.num_pages] * world_size
        self._free_scratch = [cache.scratch_pages] * world_size
        self._decoded_last = True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)

    def _need(self, request: Request) -> tuple[list[int], list[int]]:
        """Pages and scratch pages that a request takes on every rank."""
        n, wave, size = len(request.prompt), request.wave_tokens, self.world_size
        pages = [self._pages(t) for t in shard_sizes(0, n, request.total, wave, size)]
        if not self.cache.scratch_pages:
            return pages, [0] * size
        return pages, [self._pages(t) for t in shard_sizes(0, n, n, wave, size)]

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        RequestError
            If it could not be admitted even with every cache empty.
        """
        pages, scratch = self._need(request)
        for need, have in (
            (max(pages), self.cache.num_pages),
            (max(scratch), self.cache.scratch_pages),
        ):
            if need > have:
                size = self.cache.page_size
                raise RequestError(
                    f"the request needs {need * size} tokens of KV cache on a rank "
                    f"({request.total} in all), which has {have * size}; shorten it or start the "
                    "server with a larger kv_tokens",
                    code="kv_capacity_exceeded",
                )
        self.waiting.append(request)

    def remove(self, request: Request) -> StepPlan | None:
        """Forget a request; the plan that frees its caches, if it has any."""
        if request.key not in self.running:
            self.waiting.remove(request)
            return None
        del self.running[request.key]
        for free, need in zip(
            (self._free_pages, self._free_scratch), self._held(request), strict=True
        ):
            for rank in range(self.world_size):
                free[rank] += need[rank]
        return StepPlan(Op.CLOSE, request.key)

    def _held(self, request: Request) -> tuple[list[int], list[int]]:
        pages, scratch = self._need(request)
        # The ranks give scratch pages back as soon as the prompt ends.
        return pages, [0] * self.world_size if request.prefilled else scratch

    def admit(self) -> StepPlan | None:
        """Open the oldest waiting request if it fits now."""
        if not self.waiting or len(self.running) >= self.cache.max_sequences:
            return None
        request = self.waiting[0]
        pages, scratch = self._need(request)
        ranks = range(self.world_size)
        if any(pages[r] > self._free_pages[r] for r in ranks):
            return None
        if any(scratch[r] > self._free_scratch[r] for r in ranks):
            return None
        self.waiting.popleft()
        for rank in ranks:
            self._free_pages[rank] -= pages[rank]
            self._free_scratch[rank] -= scratch[rank]
        self.running[request.key] = request
        n = len(request.prompt)
        request.waves.extend(waves(0, n, request.wave_tokens, self.world_size))
        return StepPlan(
            Op.OPEN, request.key, end=n, total=request.total, wave_tokens=request.wave_tokens
        )

    def next(self) -> StepPlan | None:
        """The next prefill wave or decode step, or None when there is nothing to do."""
        prefilling = [r for r in self.running.values() if not r.prefilled]
        decoding = [r for r in self.running.values() if r.prefilled]
        if prefilling and (self._decoded_last or not decoding):
            self._decoded_last = False
            return self._prefill_plan(prefilling[0])
        if decoding:
            self._decoded_last = True
            payload = [number for r in decoding for number in (r.key, r.generated[-1])]
            return StepPlan(Op.DECODE, payload=tuple(payload))
        return None

    def _prefill_plan(self, request: Request) -> StepPlan:
        wave = request.waves[0]
        count = request.params.prompt_logprobs
        following = 0 if count is None else 1
        return StepPlan(
            Op.PREFILL,
            request.key,
            begin=wave.begin,
            end=wave.end,
            last=wave.end == len(request.prompt),
            prompt_logprobs=-1 if count is None else count,
            payload=tuple(request.prompt[wave.begin : wave.end + following]),
        )

    def wave_done(self, request: Request) -> None:
        """Note that a request's next wave has been prefilled."""
        before = self._held(request)[1]
        request.waves.popleft()
        after = self._held(request)[1]
        for rank in range(self.world_size):
            self._free_scratch[rank] += before[rank] - after[rank]
