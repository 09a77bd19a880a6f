"""A sample of a RULER task, and the largest of a length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from razor_dist.config.errors import ConfigError

_INTERPOLATIONS = 8


@dataclass(frozen=True)
class Sample:
    """A question about a long text."""

    text: str  # the user's message: instruction, haystack, question
    cue: str  # the answer's beginning, which the model goes on from
    answers: tuple[str, ...]  # all of them are wanted, or for a `qa` task one


@dataclass(frozen=True)
class Units:
    """A sample that can be made at any size.

    ``build`` makes that of a number of haystack units, always the same for the same number.
    """

    build: Callable[[int], Sample]
    least: int = 0  # the fewest units that make the task
    most: int = sys.maxsize


def fit(units: Units, tokens: Callable[[Sample], int], room: int) -> Sample:
    """Return the longest sample of at most ``room`` tokens, as ``tokens`` counts its prompt's.

    The search takes tokens to grow with the units. Where they do not quite, the sample is a little
    shorter than it might be; it is never longer. Raises `ConfigError` if the smallest sample has
    more, naming its tokens, or if there are no units left before the room is filled.
    """
    made: dict[int, Sample] = {}

    def used(count: int) -> int:
        made.clear()  # at a million tokens samples are large: only the last is kept
        made[count] = units.build(count)
        return tokens(made[count])

    low, below = units.least, used(units.least)
    if below > room:
        raise ConfigError(f"it takes at least {below} tokens of prompt, {room} are left")
    step, tries = 1, 0
    while (above := used(high := min(low + step, units.most))) <= room:
        if high == units.most:
            raise ConfigError(f"its data fill {above} tokens of prompt, not {room}")
        low, below, step = high, above, 2 * step
    while high - low > 1:
        guess = (low + high) // 2
        if tries < _INTERPOLATIONS:  # nearly linear, so this is nearly the answer
            guess = low + (room - below) * (high - low) // (above - below)
            guess = min(max(guess, low + 1), high - 1)
        tries += 1
        if (found := used(guess)) > room:
            high, above = guess, found
        else:
            low, below = guess, found
    return made[low] if low in made else units.build(low)
