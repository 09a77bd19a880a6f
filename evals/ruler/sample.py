"""A sample of a RULER task, and the largest of a length."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from razor_dist.config.errors import ConfigError

_INTERPOLATIONS = 8


@dataclass(frozen=True)
class Sample:
    """A question about a long text.

    Attributes
    ----------
    text : str
        The user's message: instruction, haystack, question.
    cue : str
        The answer's beginning, which the model goes on from.
    answers : tuple of str
        All of them are wanted, or for a `qa` task one.
    """

    text: str
    cue: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Units:
    """A sample that can be made at any size.

    Attributes
    ----------
    build : callable
        Makes the sample of a number of haystack units; always the same for the same number.
    least : int
        The fewest units that make the task.
    most : int, optional
        None: as many as wanted.
    """

    build: Callable[[int], Sample]
    least: int = 0
    most: int | None = None


def fit(units: Units, tokens: Callable[[Sample], int], room: int) -> Sample:
    """The longest sample of at most ``room`` tokens, as ``tokens`` counts them in its prompt.

    The search takes tokens to grow with the units. Where they do not quite, the sample is a little
    shorter than it might be; it is never longer.

    Raises
    ------
    ConfigError
        If the smallest sample has more; the message names its tokens. If there are no units left
        before the room is filled.
    """
    made: dict[int, Sample] = {}

    def used(count: int) -> int:
        made.clear()  # at a million tokens samples are large: only the last is kept
        made[count] = units.build(count)
        return tokens(made[count])

    low, below = units.least, used(units.least)
    if below > room:
        raise ConfigError(f"it takes at least {below} tokens of prompt, {room} are left")
    high, step = low, 1
    while True:
        high = low + step if units.most is None else min(low + step, units.most)
        above = used(high)
        if above > room:
            break
        low, below, step = high, above, 2 * step
        if high == units.most:
            raise ConfigError(f"its data fill {below} tokens of prompt, not {room}")
    for attempt in itertools.count():
        if high - low <= 1:
            return made[low] if low in made else units.build(low)
        guess = (low + high) // 2
        if attempt < _INTERPOLATIONS:  # nearly linear, so this is nearly the answer
            guess = low + (room - below) * (high - low) // (above - below)
            guess = min(max(guess, low + 1), high - 1)
        if (found := used(guess)) > room:
            high, above = guess, found
        else:
            low, below = guess, found
    raise AssertionError  # the loop has no other end
