"""The n-th of several alike requests: the idea of MRCR (Vodrahalli et al., arXiv 2409.12640).

A conversation has several requests in the same words, each with another answer, among requests of
other kinds and about other things. One of the alike is to be repeated word for word.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from razor_dist.evals.suites.sample import QUESTIONS, HiddenText, SuiteQuestion, Units
from razor_dist.evals.suites.tasks import Making, Suite, Task, words_from_start

_ABOUT = "Below is a conversation. One of its texts is to be repeated afterwards."
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_KINDS = ("lullaby", "motto", "proverb", "rhyme", "riddle", "slogan", "toast", "weather report")
_TOPICS = (
    *("bakers", "bridges", "candles", "goats", "harbours", "lighthouses", "mountains"),
    *("orchards", "railways", "rivers", "shepherds", "windmills"),
)
_ADJECTIVES = (
    *("ancient", "brave", "bright", "calm", "clever", "crooked", "distant", "eager", "faded"),
    *("gentle", "golden", "hollow", "honest", "idle", "lonely", "merry", "narrow", "patient"),
    *("quiet", "restless", "silver", "sleepy", "solemn", "stubborn", "tender", "wandering"),
)
_NOUNS = (
    *("anchors", "bells", "children", "clouds", "doors", "farmers", "feathers", "gardens"),
    *("horses", "islands", "letters", "meadows", "merchants", "owls", "pilgrims", "ropes"),
    *("sailors", "shadows", "stones", "strangers", "swallows", "towers", "travellers", "wells"),
)
_VERBS = (
    *("admire", "answer", "carry", "count", "envy", "follow", "forget", "guard", "imitate"),
    *("measure", "mend", "paint", "praise", "remember", "trust", "visit"),
)


def _clause(draw: random.Random) -> str:
    first, second = draw.sample(_NOUNS, 2)
    bright, dark = draw.sample(_ADJECTIVES, 2)
    return f"{bright} {first} {draw.choice(_VERBS)} {dark} {second}"


def _texts(draw: random.Random) -> Iterator[str]:
    while True:
        yield f"{_clause(draw)}, and {_clause(draw)}".capitalize() + "."


def _turn(kind: str, topic: str, text: str) -> str:
    return f"User: Write a {kind} about {topic}.\nAssistant: {text}"


def _others(draw: random.Random, texts: Iterator[str], kind: str, topic: str) -> Iterator[str]:
    while True:
        other = draw.choice(_KINDS), draw.choice(_TOPICS)
        if other != (kind, topic):
            yield _turn(*other, next(texts))


def _alike(draw: random.Random, count: int) -> list[str]:
    """Draw texts of which no two begin with the same word, so that the first tells them apart."""
    by_word = {text.split()[0]: text for text in (next(_texts(draw)) for _ in range(40 * count))}
    return draw.sample(sorted(by_word.values()), count)


def _task(alike: int) -> Task:
    def units(making: Making) -> Units:
        draw = making.draw
        kind, topic = draw.choice(_KINDS), draw.choice(_TOPICS)
        texts = _alike(draw, alike)
        places = sorted(draw.random() for _ in texts)
        hidden = [(p, _turn(kind, topic, text)) for p, text in zip(places, texts, strict=True)]
        asked = []
        for number in draw.sample(range(alike), min(alike, QUESTIONS)):
            which, own = f"{_ORDINALS[number]} {kind} about {topic}", texts[number]
            question = f"What, word for word, was the {which} in the conversation above?"
            asked.append(SuiteQuestion(question, f"The {which} was:", [own], {own: own}))
        others = _others(draw, _texts(draw), kind, topic)
        return HiddenText(_ABOUT, hidden, others, asked).units

    return Task(units, 40, words_from_start)


NTH = Suite(
    "nth",
    "The n-th of alike requests",
    {"of_2": _task(2), "of_4": _task(4), "of_8": _task(8)},
    several_questions=True,
    version=2,  # 2: several questions
)
