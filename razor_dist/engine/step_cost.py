"""Estimates the seconds of a step by a model that is fitted to the steps made so far."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

# Weight that an observation keeps when the next one of its kind comes.
_FORGET = 0.97
# A step that takes this many times what was expected runs beside other programs.
_SLOWER = 2.0
# Weight of `_BELIEVED`: seconds of each term before any step was seen, a few milliseconds a step
# and a chunk, half of one a token. They also scale the terms.
_BELIEF = 1e-7
_BELIEVED = np.array([5e-3, 5e-3, 5e-3, 1e-4, 1e-9, 5e-4, 1e-9])
# Recent steps whose times bound what a part of a prompt costs whatever its length: a chunk less
# than any step with one took, another part less than any step of answers alone, which reads the
# weights besides.
_RECENT = 64
_CHUNK, _WHOLE = 1, 2  # these terms' indices
_DECODE = 0, 3, 4
# Every choice of terms that may be more than 0, and what turns equations for all of them into
# equations for those.
_CHOICES = np.array(list(itertools.product((0.0, 1.0), repeat=len(_BELIEVED))))
_CHOSEN = _CHOICES[:, :, None] * _CHOICES[:, None]
_OTHERS = (1 - _CHOICES)[:, :, None] * np.eye(len(_BELIEVED))


class StepWork(NamedTuple):
    """Counts of the work in a step, one for each term of its cost, in the order of `_BELIEVED`."""

    step: int = 1
    chunk: int = 0  # parts of prompts that are sharded among several ranks
    wholes: int = 0  # parts of prompts that are not, and have tokens
    answers: int = 0  # sequences that grow by one token
    before: int = 0  # tokens in the caches before the step, of all its sequences
    tokens: float = 0.0  # of prompts, as often as they are computed
    pairs: float = 0.0  # of a query and a key of prompts


class StepCost:
    """Estimated seconds of a step: a sum of terms, each as often as `StepWork` says.

    One is for what every step does, such as reading the weights; one for what a chunk adds whatever
    its length, transfers above all, and one for any other part of a prompt; one for reading keys
    and values that are there, one for the products with the weights, one for attention.

    They are fitted to the steps that were made, the last ones most, by least squares of the
    relative error. None is negative, and what parts cost whatever their length is bounded by
    recent steps: parts of about one length tell little of it. Steps of answers alone, of which
    there are many more, do not make those that read prompts forgotten.

    If steps that only decode are ``replayed`` from CUDA graphs or tapes, they bound nothing: a step
    with a part of a prompt launches its kernels one by one, which takes up to ten times as long.
    Bounded by them, a step's launches would count as its tokens' cost, and parts stay short for
    ever.

    Any thread may ask.
    """

    def __init__(self, ranks: int = 1, *, replayed: bool = False) -> None:
        self._replayed = replayed
        self._ranks, self._lock = ranks, threading.RLock()
        none = np.zeros((len(_BELIEVED), len(_BELIEVED)))
        self._squares = [none, none]  # of steps of answers alone, and of the others
        self._products = [none[0], none[0]]
        self._bounds = {term: deque([math.inf], maxlen=_RECENT) for term in (_CHUNK, _WHOLE)}
        self._fitted, self._changed = _BELIEVED, False

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn from a step."""
        with self._lock:
            reading, expected = work.tokens > 0, float(np.array(work) @ self._fitted)
            x = np.array(work) * _BELIEVED / seconds
            slow = seconds > _SLOWER * expected > 0
            if slow:
                # The relative error of faster steps weighs more: they count as if they had been
                # slow, but all together no less than this one.
                least, weight = x @ x, (expected / seconds) ** 2
                for kind, old in enumerate(self._squares):
                    kept = max(weight, min(1.0, least / max(least, old.trace())))
                    self._squares[kind] = kept * old
                    self._products[kind] = kept * self._products[kind]
            self._squares[reading] = _FORGET * self._squares[reading] + np.outer(x, x)
            self._products[reading] = _FORGET * self._products[reading] + x
            if work.chunk or not (reading or self._replayed):
                bound = self._bounds[_CHUNK if work.chunk else _WHOLE]
                bound.append(seconds / max(1, work.chunk))
            # Fitted when next asked for: not while all sequences decode.
            self._changed = True
            if slow:
                self._fit()

    def _fit(self) -> np.ndarray:
        with self._lock:
            if self._changed:
                squares = self._squares[0] + self._squares[1] + _BELIEF * np.eye(len(_BELIEVED))
                products = self._products[0] + self._products[1] + _BELIEF
                most = {term: min(took) / _BELIEVED[term] for term, took in self._bounds.items()}
                bound = np.zeros(len(_BELIEVED))
                found = _least_squares(squares, products)
                while exceeded := [t for t, bound_of in most.items() if found[t] > bound_of]:
                    bound[exceeded] = [most[term] for term in exceeded]
                    # They are at their bounds: what is minimised is convex.
                    rows = (_CHOICES[:, bound > 0] == 0).all(1)
                    found = _least_squares(squares, products - squares @ bound, rows) + bound
                self._fitted, self._changed = _BELIEVED * found, False
            return self._fitted

    def step(self, answers: int = 0, before: int = 0) -> float:
        """Estimate a step that decodes ``answers`` sequences, with ``before`` tokens cached."""
        return float(np.array(StepWork(answers=answers, before=before)) @ self._fit())

    def decode_terms(self) -> tuple[float, float, float]:
        """Seconds of a decode step, of each token in it, and of each token that is before one."""
        return tuple(self._fit()[list(_DECODE)].tolist())

    @property
    def chunk(self) -> float:
        """Estimate what a chunk adds to a step, whatever its length."""
        return self.part(sharded=True) if self._ranks > 1 else 0.0

    def part(self, *, sharded: bool) -> float:
        """Estimate what a part of a prompt adds to a step, whatever its length."""
        return float(self._fit()[_CHUNK if sharded and self._ranks > 1 else _CHUNK + 1])

    def work(self, tokens: float, context: int) -> float:
        """Estimate what ``tokens`` of a prompt after ``context`` others add to a step."""
        *_, a, b = self._fit().tolist()
        return float(a * tokens + b * tokens * (context + tokens / 2))

    def seconds(self, tokens: float, context: int) -> float:
        """Estimate a step that only prefills ``tokens`` of a prompt."""
        return self.step(before=context) + self.part(sharded=True) + self.work(tokens, context)

    def tokens(self, seconds: float, context: int) -> float:
        """Return how many tokens of a prompt add these ``seconds`` to a step."""
        *_, a, b = self._fit().tolist()
        linear = a + b * context
        # The positive root of b/2 n^2 + (a + b c) n = seconds.
        divisor = linear + math.sqrt(linear * linear + 2 * b * seconds)
        return float(2 * seconds / divisor) if divisor else math.inf


def _least_squares(
    squares: np.ndarray, products: np.ndarray, rows: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Return the ``x >= 0`` that minimises ``x'Sx - 2p'x``.

    It tries every choice of terms that are 0: those of `_CHOICES`, or some ``rows`` of it.
    """
    systems = squares * _CHOSEN[rows] + _OTHERS[rows]
    found = np.linalg.solve(systems, (_CHOICES[rows] * products)[..., None])[..., 0]
    found = found[(found >= 0).all(1)]
    losses = ((found @ squares - 2 * products) * found).sum(1)
    return np.array(found[losses.argmin()])
