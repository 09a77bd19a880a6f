"""Facts to hide in a document and to ask for, and how an answer is scored."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from razor_dist.config.errors import ConfigError

_CITIES = (  # noqa: SIM905
    "Athens Berlin Cairo Dublin Geneva Havana Lisbon London Madrid Moscow Nairobi Oslo Paris "
    "Prague Rome Sydney Tokyo Vienna Warsaw Zurich"
).split()


@dataclass(frozen=True)
class Fact:
    """A sentence to hide and to ask for.

    Attributes
    ----------
    sentence, question, answer : str
    subject : str
        What the question is about, for layouts that word it in their own way.
    depth : float
        Percent of the document before it.
    """

    sentence: str
    question: str
    answer: str
    subject: str
    depth: float


def number_facts(depths: Sequence[float], seed: int) -> list[Fact]:
    """Draw six-digit numbers to hide in one document, each of another city.

    RULER's wording: of those tried it is the one that a model of 135M parameters answers most
    reliably with its whole cache, and the test is to measure the cache (docs/LOG.md).

    Raises
    ------
    ConfigError
        If there are more depths than cities.
    """
    if len(depths) > len(_CITIES):
        raise ConfigError(f"a document holds at most {len(_CITIES)} needles, not {len(depths)}")
    draw = random.Random(seed)
    facts = []
    for city, depth in zip(draw.sample(_CITIES, len(depths)), depths, strict=True):
        number, subject = draw.randrange(100_000, 1_000_000), f"special magic number of {city}"
        question = f"What is the {subject} mentioned in the text above?"
        facts.append(Fact(f"The {subject} is {number}.", question, str(number), subject, depth))
    return facts


def word_fact(key: str, words: Sequence[str], depth: float) -> Fact:
    """Return words that the needle model says after a question that ends with their key."""
    answer = " ".join(words)
    return Fact(f"remember {key} {answer} .", f"remember {key}", answer, key, depth)


def exact_number(answer: str, expected: str) -> float:
    """Score 1 if the answer gives the number, and not within a longer one; 0 otherwise.

    Commas and spaces that group digits do not count against it.
    """
    plain = re.sub(r"(?<=\d)[ ,](?=\d{3}\b)", "", answer)
    return float(expected in re.findall(r"\d+", plain))


def word_overlap(answer: str, expected: str) -> float:
    """Score as DuoAttention does (appendix A.11): distinct words in both, of the words expected.

    Expected words count as often as they occur, so that an answer to the letter scores less than 1
    where a word repeats: 11/12 for the paper's needle, which says "a" twice.
    """
    wanted = expected.split()
    return len(set(answer.split()) & set(wanted)) / len(wanted)


def same_words(answer: str, expected: str) -> float:
    """Score 1 if the answer is what was expected, word for word; 0 otherwise."""
    return float(answer.split() == expected.split())
