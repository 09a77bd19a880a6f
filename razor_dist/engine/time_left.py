"""Estimates when requests end, for the ``Retry-After`` of refused ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from razor_dist.engine.draws import Draws
from razor_dist.engine.request import Phase, Request
from razor_dist.engine.scheduler import Scheduler

# Tokens of an answer, before any has ended.
_ANSWER_TOKENS = 256


def seconds_left(
    requests: Iterable[Request], scheduler: Scheduler, draws: Draws
) -> dict[str, float]:
    """Estimate for each answer, or prefix to be pinned, the seconds until it ends.

    It assumes that prompts are prefilled one after the other, that answers are computed together,
    one in each slot, and that they get as many tokens, up to their ``max_tokens``, and as many in
    each step as the mean answer before. Pinned prefixes that are prefilled are left out: only the
    frontend ends them.
    """
    tokens_of_answer = (_ANSWER_TOKENS + draws.tokens) / (1 + draws.answers)
    tokens_of_step = (1 + draws.tokens) / (1 + draws.runs)  # more than 1 with drafts
    going = [r for r in requests if not (r.pinned and r.phase is Phase.PREFILLED)]
    prefilled, cost = 0.0, scheduler.prefill_policy.cost
    answers = sum(max(1, len(request.answers)) for request in going)
    at_once = min(answers, scheduler.cache.max_sequences)
    free_at = [0.0] * at_once  # when each slot is free
    ends: dict[str, float] = {}
    for request in going:
        seconds = _prefill_seconds(request, scheduler)
        of_each = [(a.id, len(a.generated)) for a in request.answers] or [(request.id, 0)]
        for name, generated in of_each:
            start = heapq.heappop(free_at)
            if seconds is not None:
                start = prefilled = max(prefilled, start) + seconds
                seconds = 0.0
            tokens = max(0.0, min(request.max_tokens, tokens_of_answer) - generated)
            steps = tokens / tokens_of_step
            ends[name] = start + steps * cost.step(at_once, at_once * request.end)
            heapq.heappush(free_at, ends[name])
    return ends


def _prefill_seconds(request: Request, scheduler: Scheduler) -> float | None:
    """Estimate the rest of a prompt's prefill; None if it is done."""
    if request.phase not in (Phase.WAITING, Phase.PREFILL):
        return None
    prefill = scheduler.prefills.get(request.key)
    begin = request.base if prefill is None else prefill.position
    return scheduler.prefill_policy.cost.seconds(request.end - begin, begin)
