"""RULER's variable tracking: which variables hold a value, through a chain (section 3.2)."""

from __future__ import annotations

import random
import string
from collections.abc import Collection, Sequence

from razor_dist.documents.haystack import NOISE
from razor_dist.evals.ruler.sample import Sample, Units, numbers

VARIABLES = 5
"""One chain of four hops: the first is set to a number, each other to the one before."""
_VALUE_DIGITS = 5
_NAME_LETTERS, _EXAMPLE_LETTERS = 5, 3
_EXAMPLE_LINES = 10
"""Of noise: what the reference implementation fits into its example's 500 tokens."""


def variable_tracking(draw: random.Random) -> Units:
    """The task's sample, a unit being a line of noise; one worked example goes before it."""
    example = _names(draw, _EXAMPLE_LETTERS)
    names = _names(draw, _NAME_LETTERS)
    values = numbers(draw, _VALUE_DIGITS)
    example_value, value = next(values), next(values)
    places = sorted(draw.random() for _ in range(VARIABLES))
    worked = (
        f"{_text(example, example_value, _EXAMPLE_LINES, places)}\n"
        f"{_cue(example_value)} {' '.join(example)}"
    )

    def build(count: int) -> Sample:
        text = f"{worked}\n\n{_text(names, value, count, places)}"
        return Sample(text, _cue(value), tuple(names))

    return Units(build)


def _names(draw: random.Random, letters: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < VARIABLES:
        names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _text(names: Sequence[str], value: str, count: int, places: Collection[float]) -> str:
    """The question about a chain; ``places``, ascending in [0, 1), are its statements'."""
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    statements = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)]
    lines = [NOISE] * count
    # From the back, so that what is inserted moves no earlier place and the order stays.
    for place, statement in reversed(list(zip(places, statements, strict=True))):
        lines.insert(int(place * (count + 1)), statement)
    hidden = "\n".join(lines)
    return (
        "The text below assigns values to variables, one from another. Follow the assignments."
        f"\n{hidden}\nQuestion: Which variables hold the value {value} in the text above?"
    )


def _cue(value: str) -> str:
    return (
        f"Answer: By the assignments in the text above, {VARIABLES} variables hold the value "
        f"{value}. They are:"
    )
