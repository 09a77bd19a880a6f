"""The choice of the prompt that is read next, and for how long: prefill is shared by time.

A long prompt is hundreds of chunks, so that whoever comes after it would wait for all of them. Here
those with little to do go first, and the oldest gets at least half of the time: a short question
overtakes a million tokens, and costs their reader no more time than it takes itself.

Prompts that are read in one step take no turns: they join the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from razor_dist.engine.request import Request

# Weight that an observation keeps when the next comes, and that of what is believed before any.
_FORGET, _BELIEF = 0.97, 1e-7
# Steps whose times bound what every step costs. Earlier ones may have been faster: other programs
# take processors, and ranks whose threads wait for each other are many times slower then.
_RECENT = 64
# Where none that reads so few tokens took less than so many of answers alone, these are of better
# days.
_FEW, _STALE = 128, 10
# Weight of a new observation of what an answer costs.
_NEWS = 0.1
# Where nothing else tells: a step with a chunk costs at most so many times one of answers, whatever
# the chunk's length.
_CHUNK = 3.0
# Tokens that a rank reads of prompts that join a step, at most: their activations are in nobody's
# plan.
_JOINING = 512
# A chunk takes the time of so many steps where nobody waits for less than that: somebody may come
# meanwhile. It takes longer where what each step costs would be more than a part of it: than the
# first part always, and than the second if it takes no more than the third part of the time between
# two that come, so that who comes often waits less.
_LONGER, _MOST_IDLE, _IDLE, _ALONE = 4, 0.15, 0.05, 0.25
# Every other such chunk is shorter by this, and so is one that takes its length from what a step
# costs whatever its length: that cannot be told from chunks of one length.
_VARIED = 0.7
# A prompt whose rest would take little more than a step is read to its end.
_LAST_PIECE = 1.25


class StepCost:
    """Estimated seconds of a chunk of n tokens after c others: ``s + a n + b n (c + n / 2)``.

    ``s`` is for what every step does, such as reading the weights, ``a`` for the products with them
    and ``b`` for attention. They are fitted to the steps that were made, the last ones most, by
    least squares of the relative error. None is negative, and ``s`` is at most what the fastest
    recent step took that read a prompt, and `_CHUNK` times what the fastest one of answers alone
    took, unless that was long ago: chunks of about one length tell little of it. Each answer in a
    step adds ``c``, which is known from steps of answers alone.
    """

    def __init__(self) -> None:
        # Before any step: a few milliseconds and half of one for each token.
        self._sab = np.array([5e-3, 5e-4, 1e-9])
        self._scale = self._sab.copy()
        self._squares = _BELIEF * np.eye(3)
        self._products = _BELIEF * np.ones(3)
        # Seconds and tokens of the last steps that read prompts; seconds of the last of answers.
        self._reading: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._answering: deque[float] = deque(maxlen=_RECENT)
        self._answer = 0.0  # c

    def answered(self, seconds: float, answers: int) -> None:
        """Learn from a step of answers alone, whose tokens cost less than those of prompts."""
        self._answering.append(seconds)
        if answers > 1:
            each = (seconds - min(self._answering)) / (answers - 1)
            self._answer += _NEWS * (each - self._answer)

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """Learn from a chunk."""
        self.learn(tokens, tokens * (context + tokens / 2), seconds)

    def learn(self, tokens: float, pairs: float, seconds: float, answers: int = 0) -> None:
        """Learn from a step with so many tokens of prompts, pairs of a query and a key, answers."""
        seconds = max(seconds / 2, seconds - answers * self._answer)
        self._reading.append((seconds, tokens))
        x = np.array([1.0, tokens, pairs]) * self._scale / seconds
        self._squares = _FORGET * self._squares + np.outer(x, x)
        self._products = _FORGET * self._products + x
        self._sab = self._scale * self._fit()

    def _most(self) -> float:
        """Return the upper bound of ``s``."""
        most, _ = min(self._reading)
        answers = min(self._answering, default=math.inf)
        few = min((seconds for seconds, tokens in self._reading if tokens <= _FEW), default=0.0)
        return most if few > _STALE * answers else min(most, _CHUNK * answers)

    def _fit(self) -> np.ndarray:
        """Least squares in bounds: the best of all choices of terms that are at none of theirs."""
        best, least = np.zeros(3), math.inf
        most = self._most() / self._scale[0]
        for free in [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)]:
            for s in (0.0,) if 0 in free else (0.0, most):
                found = np.array([s, 0.0, 0.0])
                rest = self._products - self._squares @ found
                square = self._squares[np.ix_(free, free)]
                found[list(free)] = np.linalg.lstsq(square, rest[list(free)], rcond=None)[0]
                loss = float(found @ self._squares @ found - 2 * found @ self._products)
                if (found >= 0).all() and found[0] <= most and loss < least - 1e-12:
                    best, least = found, loss
        return best

    def seconds(self, tokens: int, context: int) -> float:
        """Estimate a chunk of ``tokens`` after ``context`` others."""
        return float(self._terms(tokens, context) @ self._sab)

    @property
    def chunk(self) -> float:
        """Estimate what a chunk costs beyond a step of answers, whatever its length."""
        s = self.seconds(0, 0)
        return max(0.0, s - min(self._answering)) if self._answering else s

    def work(self, tokens: int, context: int) -> float:
        """Estimate what such a chunk takes beyond what every step costs."""
        return self.seconds(tokens, context) - self.seconds(0, 0)

    def tokens(self, seconds: float, context: int) -> float:
        """Return the length of a chunk that takes so long.

        But at least a length at which half of the time is for tokens: shorter chunks would spend
        most of it on what each step costs anyway.
        """
        s, a, b = self._sab
        linear = a + b * context
        if linear == 0:
            return math.inf
        # The positive root of b/2 n^2 + (a + b c) n = seconds - s.
        rest = max(0.0, seconds - s)
        root = 2 * rest / (linear + math.sqrt(linear * linear + 2 * b * rest))
        return float(max(root, s / linear))

    @staticmethod
    def _terms(tokens: int, context: int) -> np.ndarray:
        return np.array([1.0, tokens, tokens * (context + tokens / 2)])


class Turns:
    """Chooses among the prompts that are being prefilled by ``world_size`` ranks.

    ``max_step`` is in seconds. With ``by_priority``, requests of a lower ``priority`` number go
    before all others. The ranks have ``shared`` out what is not a chunk, or each computes all.
    """

    def __init__(
        self,
        max_step: float,
        world_size: int = 1,
        *,
        by_priority: bool = False,
        shared: bool = False,
    ) -> None:
        self.cost, self._ranks = StepCost(), world_size
        # How often the work of a short prompt is done, among all ranks.
        self.repeats = 1 if shared else world_size
        self._max_step, self.by_priority = max_step, by_priority
        # Seconds that others were served since the oldest prompt was; of which prompt that is true.
        self._debt, self._oldest = 0.0, -1
        # Seconds of chunks since somebody else was served, and between those that were.
        self._alone = self._between = 0.0
        self._varied = False

    def is_short(self, prompt: Request) -> bool:
        """Tell if all ranks may as well take all of a prompt as a part of its tokens.

        That repeats its work on all ranks but one, unless they share it. It must save more: what a
        chunk adds to a step whatever its length, transfers above all.
        """
        most, n = min(_JOINING, prompt.chunked_prefill_size), prompt.end - prompt.begin
        if n > most or prompt.params.prompt_logprobs is not None:
            return False
        repeated = (self.repeats - 1) * self.cost.work(n, 0)
        fits = repeated + self.cost.work(n, prompt.begin) <= self._max_step
        return fits and repeated <= self.cost.chunk

    def joins(self, prompt: Request) -> bool:
        """Tell if a prompt is read whole in the next step that has room for it."""
        n = prompt.end - prompt.begin
        if prompt.short or prompt.prefilled_to > prompt.begin:
            return prompt.short
        most = min(_JOINING * self._ranks, prompt.chunked_prefill_size)
        return n <= most and self.work(prompt, n) <= self._max_step

    def work(self, prompt: Request, tokens: int) -> float:
        """Estimate the seconds that a prompt's next ``tokens`` add to a step."""
        work = self.cost.work(tokens, prompt.prefilled_to)
        # What is before a short prompt stays sharded.
        return work + prompt.short * (self.repeats - 1) * self.cost.work(tokens, 0)

    def together(
        self, prompts: Sequence[Request], *, part: float = 1.0
    ) -> tuple[list[Request], float]:
        """Choose from those that may join a step; return them and the seconds that they add to it.

        They are the oldest that fit this ``part`` of ``max_step``, one at least. ``prompts`` come
        in the order in which they were admitted.
        """
        chosen: list[Request] = []
        seconds = tokens = 0.0
        for prompt in self.first_class(prompts):
            n = prompt.end - prompt.begin
            work = self.work(prompt, n)
            tokens += n if prompt.short else n / self._ranks
            if chosen and (seconds + work > part * self._max_step or tokens > _JOINING):
                break
            chosen.append(prompt)
            seconds += work
        return chosen, seconds

    def choose(self, prompts: Sequence[Request]) -> Request:
        """Return the prompt to read from next.

        That is the oldest one while it has least to do, or has had less time than the others since
        it became the oldest; or else of the others the one with least to do, less the time that it
        has waited.
        """
        prompts = self.first_class(prompts)
        oldest = self._oldest_of(prompts)
        if self._debt > 0 or self._left(oldest) <= min(map(self._left, prompts)):
            return oldest
        others = [prompt for prompt in prompts if prompt is not oldest]
        # All of them wait until now, so that the later one arrived, the less it has waited.
        return min(others, key=lambda prompt: (self._left(prompt) + prompt.arrived, prompt.key))

    def length(
        self, prompt: Request, others: Sequence[Request], *, answering: bool, joined: float = 0.0
    ) -> float:
        """Tokens of its next chunk, at most.

        They are those of one step's time if anybody is ``answering``, or if of the ``others`` that
        are being read one has little left: for the rest that would be overhead. Prompts that join
        the step have taken ``joined`` seconds of it, but at least half is left.
        """
        most = min(prompt.end - prompt.prefilled_to, prompt.chunked_prefill_size)
        step, longer = self._max_step, _LONGER * self._max_step
        if answering or any(self._left(other) <= longer for other in others):
            self._somebody_came()
        else:
            between, s = max(self._alone, self._between), self.cost.seconds(0, 0)
            step = max(longer, s / _MOST_IDLE, min(s / _IDLE, _ALONE * between))
            step *= 1 if others else self._vary()
        step -= min(joined, step / 2)
        if self._left(prompt) <= _LAST_PIECE * step:
            return most
        tokens = self.cost.tokens(step, prompt.prefilled_to)
        if step < 2 * self.cost.seconds(0, 0):
            tokens *= self._vary()
        return min(most, tokens)

    def _vary(self) -> float:
        self._varied = not self._varied
        return _VARIED if self._varied else 1.0

    def took(self, prompts: Sequence[Request], served: Request, seconds: float) -> None:
        """Note that ``served`` was read from for so long, while ``prompts`` take turns."""
        if not prompts:
            return
        if self._oldest_of(self.first_class(prompts)) is served:
            # What it gets alone or in its turn does not count against it later.
            self._debt = max(0.0, self._debt - seconds)
            self._alone += seconds
        else:
            self._debt += seconds
            self._somebody_came()

    def _somebody_came(self) -> None:
        """Note the time since somebody else came, which grows to twice what it was at most."""
        if self._alone:
            most = 2 * self._between or math.inf
            self._alone, self._between = 0.0, min(self._alone, most)

    def first_class(self, prompts: Sequence[Request]) -> Sequence[Request]:
        """Return those of the first priority, if that is heard."""
        if not self.by_priority or not prompts:
            return prompts
        first = min(prompt.params.priority for prompt in prompts)
        return [prompt for prompt in prompts if prompt.params.priority == first]

    def _left(self, prompt: Request) -> float:
        return self.cost.seconds(prompt.end - prompt.prefilled_to, prompt.prefilled_to)

    def _oldest_of(self, prompts: Sequence[Request]) -> Request:
        oldest = min(prompts, key=lambda prompt: (prompt.arrived, prompt.key))
        if oldest.key != self._oldest:
            self._oldest, self._debt = oldest.key, 0.0
        return oldest
