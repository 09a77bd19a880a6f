"""Several questions on one document: SCBench's idea (Li et al., arXiv 2412.10319), made anew.

Five questions on each: values of keys, strings by prefix and suffix, variables over three hops,
counts, and a mixture. The last turn is read, and the others find document and turns in the prefix
cache.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

from razor_dist.documents.corpus import NOISE
from razor_dist.evals.suites.sample import (
    QUESTIONS,
    HiddenText,
    Question,
    Sample,
    SuiteQuestion,
    Units,
    never_twice,
    numbers,
    single_words,
    uuids,
)
from razor_dist.evals.suites.tasks import Making, Suite, Task, first_word, words_from_start

_HOPS = 3
_LEAST_WORDS = 100  # tokens of a document for the needle model
_DECOYS = 2  # strings that share a wanted one's prefix, and as many that share its suffix
_COUNTS = range(2, 10)
_COLOURS = ("amber", "black", "blue", "green", "grey", "purple", "red", "white", "yellow")
_THINGS = (
    *("barrel", "basket", "bottle", "bucket", "carpet", "chair", "drum"),
    *("ladder", "lantern", "mirror", "pillow", "saddle", "shovel", "wagon"),
)


class Part(NamedTuple):
    """Questions of one kind, lines that mislead, and filler that answers none of them."""

    # Each with the lines that hold its answer, in their order in the text.
    asked: list[tuple[SuiteQuestion, list[str]]]
    filler: Iterator[str]
    decoys: tuple[str, ...] = ()


def _keys(draw: random.Random, count: int) -> Part:
    names = uuids(draw)

    def pair() -> str:
        return f'"{next(names)}": "{next(names)}",'

    asked = []
    for _ in range(count):
        key, value = next(names), next(names)
        line = f'"{key}": "{value}",'
        what = f'the value of the key "{key}"'
        own = SuiteQuestion(f"What is {what}?", f'T{what[1:]} is "', [value], {value: line})
        asked.append((own, [line]))
    return Part(asked, iter(pair, None))


def _strings(draw: random.Random, count: int) -> Part:
    words = single_words()
    ends = draw.sample(words, 2 * count)
    free = [word for word in words if word not in ends]
    middles = never_twice(lambda: "-".join(draw.choices(words, k=2)))

    def line(first: str, last: str) -> str:
        return f"{first}-{next(middles)}-{last}"

    asked, decoys = [], []
    for first, last in zip(ends[:count], ends[count:], strict=True):
        own = line(first, last)
        which = f'begins with "{first}-" and ends with "-{last}"'
        about = SuiteQuestion(
            f"Which line {which}?", f"The line that {which} is", [own], {own: own}
        )
        asked.append((about, [own]))
        for _ in range(_DECOYS):
            decoys += [line(first, draw.choice(free)), line(draw.choice(free), last)]
    filler = iter(lambda: line(draw.choice(free), draw.choice(free)), None)
    return Part(asked, filler, tuple(decoys))


def _variables(draw: random.Random, count: int) -> Part:
    names = never_twice(lambda: "".join(draw.choices(string.ascii_uppercase, k=5)))
    values = numbers(draw, 5)
    asked = []
    for _ in range(count):
        chain, value = list(itertools.islice(names, _HOPS)), next(values)
        lines = [f"VAR {chain[0]} = {value}"]
        lines += [f"VAR {name} = VAR {source}" for source, name in itertools.pairwise(chain)]
        cue = f"By these assignments, VAR {chain[-1]} holds the number"
        question = f"Which number does VAR {chain[-1]} hold?"
        asked.append((SuiteQuestion(question, cue, [value], {value: lines[0]}), lines))
    return Part(asked, itertools.repeat(NOISE))


def _things(draw: random.Random, count: int) -> Part:
    kinds = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
    draw.shuffle(kinds)
    wanted, others = kinds[:count], kinds[count:]

    def line(kind: str) -> str:
        return f"{'An' if kind[0] == 'a' else 'A'} {kind} is brought in."

    asked = []
    for kind in wanted:
        times = draw.choice(_COUNTS)
        question = f"How many {kind}s are brought in? Answer with a number."
        cue = f"The number of {kind}s that are brought in is"
        asked.append((SuiteQuestion(question, cue, [str(times)]), [line(kind)] * times))
    return Part(asked, iter(lambda: line(draw.choice(others)), None))


def _mixed(draw: random.Random, count: int) -> Part:
    parts = [_keys(draw, 2), _variables(draw, 2), _things(draw, count - 4)]
    asked = [own for part in parts for own in part.asked]
    draw.shuffle(asked)
    return Part(asked, iter(lambda: next(draw.choice(parts).filler), None))


def _task(part: Callable[[random.Random, int], Part], about: str, answer_tokens: int) -> Task:
    def units(making: Making) -> Units:
        draw = making.draw
        own = part(draw, QUESTIONS)
        hidden = [(draw.random(), line) for line in own.decoys]
        for _, lines in own.asked:
            hidden += zip(sorted(draw.random() for _ in lines), lines, strict=True)
        questions = [asked for asked, _ in own.asked]
        begin = f"{about} There will be {QUESTIONS} questions about it."
        return HiddenText(begin, hidden, own.filler, questions).units

    return Task(units, answer_tokens, first_word)


def _words(making: Making) -> Units:
    """Return sentences to remember in the needle model's own words; a unit is a token."""
    seed = making.draw.getrandbits(63)
    depths = sorted(making.draw.uniform(0, 100) for _ in range(QUESTIONS))

    def build(count: int) -> Sample:
        from razor_dist.evals.needle.documents import hide_words  # imports transformers

        text, facts = hide_words(count, depths, seed)
        questions = []
        for fact in random.Random(seed).sample(facts, len(facts)):
            begin = text.index(fact.sentence) + fact.sentence.index(fact.answer)
            place = (begin, begin + len(fact.answer))
            questions.append(Question(fact.question, "", (fact.answer,), (place,)))
        return Sample(text, tuple(questions))

    return Units(build, least=_LEAST_WORDS)


WORDS = "words"  # the task for the needle model alone
SHARED = Suite(
    "shared",
    "Shared contexts",
    {
        "keys": _task(_keys, "Below is a list of keys and their values.", 48),
        "strings": _task(_strings, "Below is a list of strings, one on each line.", 24),
        "variables": _task(_variables, "The text below assigns values to variables.", 12),
        "counts": _task(_things, "The text below says what is brought into a hall.", 8),
        "mixed": _task(
            _mixed,
            "The text below has keys and values, assignments to variables, and things brought in.",
            48,
        ),
        WORDS: Task(_words, 8, words_from_start),
    },
    several_questions=True,
    version=3,  # 2: a count may be a word; 3: earlier answers close their quotation
)
