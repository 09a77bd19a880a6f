"""RULER's samples, and the eleven tasks that need no data: needles, variables, aggregation."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from razor_dist.documents.corpus import NOISE
from razor_dist.evals.suites.qa import QA
from razor_dist.evals.suites.sample import (
    Filler,
    HiddenText,
    Question,
    Sample,
    SuiteQuestion,
    Units,
    never_twice,
    numbers,
    prose,
    single_words,
    uuids,
    word_pairs,
)
from razor_dist.evals.suites.tasks import Making, Suite, Task

# Evenly spaced places from prose's beginning to its end, of which needles take some.
_DEPTHS = 40
_NUMBER_DIGITS = 7
# One chain of four hops: the first variable is set to a number, each other to the one before.
_VARIABLES = 5
_VALUE_DIGITS = 5
_NAME_LETTERS, _EXAMPLE_LETTERS = 5, 3
# Lines of noise: what the reference implementation fits into its example's 500 tokens.
_EXAMPLE_LINES = 10
_COMMON_WORDS = 10
_COMMON_ABOUT = (
    "Some words of the numbered list below occur more often than the others. Remember which."
)
_COMMON_QUESTION = f"Question: Which {_COMMON_WORDS} words are the most common in this list?"
_COMMON_CUE = f"Answer: The {_COMMON_WORDS} most common words of the list are:"
# Below this length, common words are rarer: the reference implementation's exception.
_SHORT = 4096
_FREQUENT_WORDS = 3
_FREQUENT_QUESTION = (
    f"Question: Which {_FREQUENT_WORDS} words occur most often in the coded text above, the dots "
    "left out?"
)
_FREQUENT_CUE = f"Answer: The {_FREQUENT_WORDS} words that occur most often in the coded text are:"
_CODED_LETTERS = 6
_MARK = "..."


@dataclass(frozen=True)
class RulerNeedles:
    """One of the eight needle tasks (section 3.1): single, multi-key, -value or -query."""

    # Around the needles: one sentence over and over, prose, or needles that no question asks for.
    haystack: Literal["noise", "essay", "needles"] = "essay"
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1  # of the keys

    def units(self, making: Making) -> Units:
        """Return the task, a unit being a sentence of prose, a line of noise or another needle."""
        draw, essay = making.draw, making.material.essay
        keys = word_pairs(draw) if self.keys == "words" else uuids(draw)
        values = numbers(draw, _NUMBER_DIGITS) if self.values == "numbers" else uuids(draw)
        hidden = [
            (key, [next(values) for _ in range(self.num_values)])
            for key in itertools.islice(keys, self.num_keys)
        ]
        asked = draw.sample(hidden, self.num_queries)
        needles = [self._needle(key, value) for key, own in hidden for value in own]
        draw.shuffle(needles)
        # In prose at some of 40 depths, elsewhere before any line.
        if self.haystack == "essay":
            places = [depth / (_DEPTHS - 1) for depth in draw.sample(range(_DEPTHS), len(needles))]
        else:
            places = [draw.random() for _ in needles]
        others = {
            "essay": prose(draw, essay),  # drawn for each, as samples of version 2 are
            "noise": itertools.repeat(NOISE),
            "needles": map(self._needle, keys, values),
        }[self.haystack]
        kind = self.values[:-1]
        about = (
            f"The text below states special magic {kind}s. Keep them in mind: there will be a "
            "question about them."
        )
        separator = " " if self.haystack == "essay" else "\n"
        hay = zip(places, needles, strict=True)
        return HiddenText(about, list(hay), others, [self._asked(asked)], separator, slots=0).units

    def _needle(self, key: str, value: str) -> str:
        return f"The special magic {self.values[:-1]} of {key} is {value}."

    def _asked(self, asked: Sequence[tuple[str, list[str]]]) -> SuiteQuestion:
        *first, last = (key for key, _ in asked)
        subject = f"{', '.join(first)}, and {last}" if first else last
        answers = {value: self._needle(key, value) for key, own in asked for value in own}
        what, verb = f"the special magic {self.values[:-1]}", "is"
        if len(answers) > 1:
            what, verb = f"all {what}s", "are"
        question = f"According to the text above, what {verb} {what} of {subject}?"
        cue = f"According to the text, {what} of {subject} {verb}"
        return SuiteQuestion(question, cue, list(answers), answers)


def variable_tracking(making: Making) -> Units:
    """Return a chain of variables (section 3.2), after an example; a unit is a line of noise."""
    draw = making.draw
    example = _names(draw, _EXAMPLE_LETTERS)
    names = _names(draw, _NAME_LETTERS)
    values = numbers(draw, _VALUE_DIGITS)
    example_value, value = next(values), next(values)
    places = sorted(draw.random() for _ in range(_VARIABLES))
    worked = _chain(example, example_value, places).units.build(_EXAMPLE_LINES)
    [asked] = worked.questions
    before = f"{worked.message(asked)}\n{asked.cue} {' '.join(example)}\n\n"
    return _chain(names, value, places, before).units


def _names(draw: random.Random, letters: int) -> list[str]:
    names = never_twice(lambda: "".join(draw.choices(string.ascii_uppercase, k=letters)))
    return list(itertools.islice(names, _VARIABLES))


def _chain(
    names: Sequence[str], value: str, places: Sequence[float], before: str = ""
) -> HiddenText:
    """Return a text of noise with a chain; ``places``, ascending, are its statements'."""
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    statements = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)]
    asked = SuiteQuestion(
        f"Which variables hold the value {value} in the text above?",
        f"By the assignments in the text above, {_VARIABLES} variables hold the value {value}. "
        "They are:",
        names,
        dict(zip(names, statements, strict=True)),
    )
    about = "The text below assigns values to variables, one from another. Follow the assignments."
    hidden = list(zip(places, statements, strict=True))
    return HiddenText(before + about, hidden, itertools.repeat(NOISE), [asked])


def common_words(making: Making) -> Units:
    """Return a numbered list with ten words more frequent than all others (section 3.3).

    A unit is an uncommon word; one worked example goes before the list. Where the ordinary words
    do not suffice, all words, the common ones too, are pairs of them.
    """
    draw, short = making.draw, making.length < _SHORT
    often, seldom = (6, 1) if short else (30, 3)
    example_words, example_often, example_seldom = (20, 3, 1) if short else (40, 10, 3)
    singles = draw.sample(single_words(), len(single_words()))
    shown, rest = singles[:example_words], singles[example_words:]
    seed = draw.getrandbits(64)
    pairs = Filler(word_pairs(draw))
    example = _word_list(shown, example_often, example_seldom, random.Random(seed))
    answer = _numbered(shown[:_COMMON_WORDS])
    worked = f"{_COMMON_ABOUT}\n{example}\n{_COMMON_QUESTION}\n{_COMMON_CUE} {answer}"

    def build(count: int) -> Sample:
        wanted = _COMMON_WORDS + count
        words = rest[:wanted] if wanted <= len(rest) else pairs.first(wanted)
        listing = _word_list(words, often, seldom, random.Random(seed))
        document = f"{worked}\n\n{_COMMON_ABOUT}\n{listing}"
        answers = tuple(words[:_COMMON_WORDS])
        return Sample(document, (Question(_COMMON_QUESTION, _COMMON_CUE, answers),))

    return Units(build, least=1)


def _word_list(words: Sequence[str], often: int, seldom: int, draw: random.Random) -> str:
    listing = [*words[:_COMMON_WORDS]] * often + [*words[_COMMON_WORDS:]] * seldom
    draw.shuffle(listing)
    return _numbered(listing)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(making: Making) -> Units:
    """Return a text of invented words whose frequencies fall as a zeta distribution's with alpha 2.

    The word of rank k occurs ``floor(n / (zeta(2) k^2))`` times. That of rank 1 is noise, three
    dots; ranks 2 to 4 are asked for. A unit is a word of n.
    """
    draw = making.draw
    coded = never_twice(lambda: "".join(draw.choices(string.ascii_lowercase, k=_CODED_LETTERS)))
    vocabulary = Filler(itertools.chain([_MARK], coded))
    seed = draw.getrandbits(64)

    def build(count: int) -> Sample:
        times = rank_counts(count)
        ranked = vocabulary.first(len(times))
        words = [word for word, n in zip(ranked, times, strict=True) for _ in range(n)]
        random.Random(seed).shuffle(words)
        document = (
            "The coded text below is made of invented words. Count how often each occurs, and "
            f"leave out the dots '{_MARK}'.\n{' '.join(words)}"
        )
        answers = tuple(ranked[1 : 1 + _FREQUENT_WORDS])
        return Sample(document, (Question(_FREQUENT_QUESTION, _FREQUENT_CUE, answers),))

    return Units(build, least=_least_frequent())


def rank_counts(count: int) -> list[int]:
    """Count the occurrences of each rank's word, until one does not occur at all."""
    share = count * 6 / math.pi**2  # zeta(2) is pi^2 / 6
    return [int(share / rank**2) for rank in range(1, math.isqrt(int(share)) + 1)]


def _least_frequent() -> int:
    """Return the fewest words with which the last asked for is more frequent than the next."""
    last = 1 + _FREQUENT_WORDS
    every = ((count, rank_counts(count)) for count in itertools.count(1))
    return next(n for n, times in every if len(times) > last and times[last - 1] > times[last])


NEEDLES = {
    "niah_single_1": RulerNeedles(haystack="noise"),
    "niah_single_2": RulerNeedles(),
    "niah_single_3": RulerNeedles(values="uuids"),
    "niah_multikey_1": RulerNeedles(num_keys=4),
    "niah_multikey_2": RulerNeedles(haystack="needles"),
    "niah_multikey_3": RulerNeedles(haystack="needles", keys="uuids", values="uuids"),
    "niah_multivalue": RulerNeedles(num_values=4),
    "niah_multiquery": RulerNeedles(num_keys=4, num_queries=4),
}
RULER = Suite(
    "ruler",
    "RULER",
    {name: Task(needles.units, 128) for name, needles in NEEDLES.items()}
    | {
        "vt": Task(variable_tracking, 30),
        "cwe": Task(common_words, 120),
        "fwe": Task(frequent_words, 50),
    }
    | QA,
    version=2,
)
