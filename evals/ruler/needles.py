"""RULER's eight needle tasks: single, multi-key, multi-value and multi-query (section 3.1)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from razor_dist.documents.haystack import NOISE
from razor_dist.evals.ruler.sample import (
    Sample,
    Units,
    listed,
    numbers,
    uuids,
    word_pairs,
)

_DEPTHS = 40
"""Evenly spaced places from prose's beginning to its end, of which needles take some."""
_NUMBER_DIGITS = 7


@dataclass(frozen=True)
class Needles:
    """One of the eight.

    Attributes
    ----------
    haystack : {"noise", "essay", "needles"}
        What surrounds the needles: one sentence over and over, prose, or more needles whose keys
        nobody asks for.
    keys, values : {"words", "numbers", "uuids"}
    num_keys : int
        Needles of different keys, of which `num_queries` are asked for.
    num_values : int
        Needles of each key.
    num_queries : int
    """

    haystack: Literal["noise", "essay", "needles"] = "essay"
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def units(self, draw: random.Random, essay: Sequence[str]) -> Units:
        """The task's sample, a unit being a sentence (or a line of noise, or another needle).

        Parameters
        ----------
        draw : random.Random
        essay : sequence of str
            Sentences of prose, begun anew where they end.
        """
        keys = word_pairs(draw) if self.keys == "words" else uuids(draw)
        values = numbers(draw, _NUMBER_DIGITS) if self.values == "numbers" else uuids(draw)
        hidden = [
            (key, [next(values) for _ in range(self.num_values)])
            for key in itertools.islice(keys, self.num_keys)
        ]
        asked = draw.sample(hidden, self.num_queries)
        needles = [self._needle(key, value) for key, own in hidden for value in own]
        draw.shuffle(needles)
        places = self._places(draw, len(needles))
        start = draw.randrange(len(essay))
        hay: list[str] = []  # grows with the largest sample; never changes, so that builds agree
        more = self._hay(keys, values, essay, start)

        def build(count: int) -> Sample:
            hay.extend(itertools.islice(more, max(0, count - len(hay))))
            lines = hay[:count]
            # From the deepest, so that what is inserted moves no later place.
            for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
                lines.insert(int(place * count), needle)
            answers = [value for _, own in asked for value in own]
            return self._sample(lines, [key for key, _ in asked], answers)

        return Units(build)

    def _places(self, draw: random.Random, count: int) -> list[float]:
        """Where the needles stand: in prose at some of 40 depths, elsewhere before any line."""
        if self.haystack == "essay":
            return [depth / (_DEPTHS - 1) for depth in draw.sample(range(_DEPTHS), count)]
        return [draw.random() for _ in range(count)]

    def _hay(
        self, keys: Iterator[str], values: Iterator[str], essay: Sequence[str], start: int
    ) -> Iterator[str]:
        if self.haystack == "noise":
            return itertools.repeat(NOISE)
        if self.haystack == "essay":
            return itertools.islice(itertools.cycle(essay), start, None)
        return map(self._needle, keys, values)

    def _needle(self, key: str, value: str) -> str:
        return f"The special magic {self._kind} of {key} is {value}."

    @property
    def _kind(self) -> str:
        return self.values.removesuffix("s")

    def _sample(self, lines: Sequence[str], keys: Sequence[str], answers: list[str]) -> Sample:
        kind, subject = self._kind, listed(keys)
        separator = " " if self.haystack == "essay" else "\n"
        one = len(answers) == 1
        what = f"the special magic {kind}" if one else f"all the special magic {kind}s"
        text = (
            f"The text below states special magic {kind}s. Keep them in mind: there will be a "
            f"question about them.\n{separator.join(lines)}\n"
            f"Question: According to the text above, what {'is' if one else 'are'} {what} of "
            f"{subject}?"
        )
        cue = f"Answer: According to the text, {what} of {subject} {'is' if one else 'are'}"
        return Sample(text, cue, tuple(answers))
