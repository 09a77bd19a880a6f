"""Presets of the needle test: facts to hide, how to ask for them, how to score an answer.

A *layout* says what stands around the document and in it, for each place that the question may
have: after the document, before it, or in its middle, at the needle (DuoAttention, appendix A.12).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

_CITIES = (  # noqa: SIM905
    "Athens Berlin Cairo Dublin Geneva Havana Lisbon London Madrid Moscow Nairobi Oslo Paris "
    "Prague Rome Sydney Tokyo Vienna Warsaw Zurich"
).split()


@dataclass(frozen=True)
class Fact:
    """A sentence to hide and to ask for; `subject` is for layouts that word their own question."""

    sentence: str
    question: str
    answer: str
    subject: str
    depth: float  # percent of the document before it


@dataclass(frozen=True)
class Layout:
    """Words around a document and in it; ``{question}``, ``{subject}``, ``{sentence}``: a fact's.

    `cue` begins the answer where the model continues a text instead of a chat.
    """

    before: str
    after: str
    hidden: str = "{sentence}"
    cue: str = ""

    def fill(self, part: str, fact: Fact) -> str:
        return str(getattr(self, part)).format(**vars(fact))


Draw = Callable[[Sequence[float], int], list[Fact]]  # from their depths and a seed


@dataclass(frozen=True)
class Preset:
    """A needle test as published."""

    source: str
    draw: Draw
    layouts: Mapping[str, Layout]  # by the question's place; one that is missing is not offered
    score: Callable[[str, str], float]  # from 0 to 1, of an answer and the right one
    score_name: str
    answer_tokens: int
    chat: bool  # asked in a user's message, where the model has a chat template
    most_needles: int = 1  # facts that differ enough for one document
    lengths: int = 5  # how many, if the user does not say
    depths: int = 5
    haystack: str = "auto"  # of `haystack_paragraphs`; empty where the preset makes its own text
    version: int = 1  # raised when the same settings would give other documents


def number_facts(depths: Sequence[float], seed: int) -> list[Fact]:
    """Draw six-digit numbers, each of another city, in RULER's wording.

    Of those tried a model of 135M parameters answers it best with its whole cache (docs/LOG.md).
    """
    # The haystack's beginning is drawn by the seed alone: a city is to say nothing of it.
    draw = random.Random(f"{seed}:facts")
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


_SANDWICH = "eat a sandwich and sit in Dolores Park on a sunny day."
_BEST_THING = "the best thing to do in San Francisco"


def _sandwich(beginning: str, question: str) -> Draw:
    """Return a draw of the same fact for every seed."""
    sentence = f"{beginning} is {_SANDWICH}"
    return lambda depths, seed: [
        Fact(sentence, question, _SANDWICH, _BEST_THING, depth) for depth in depths
    ]


_sandwich_preset = partial(
    Preset,
    score=word_overlap,
    score_name="words in common, of the words expected",
    answer_tokens=50,
    depths=10,
    haystack="essays",
)
_NUMBER_CUE = " Answer: The {subject} is"
_DUO_EMBEDDED = (
    "This is a very long storybook with a question embedded. Please answer the embedded question "
    "at the end of the book.\n\n"
)
_DUO_QA = "Q: What is the best thing to do in San Francisco? A: "
_KAMRADT_RULE = "Don't give information outside the document or repeat your findings"

PRESETS: Mapping[str, Preset] = {
    "number": Preset(
        source="a six-digit number, worded as RULER words it",
        draw=number_facts,
        layouts={
            "after": Layout("", "\n\n{question}", cue=_NUMBER_CUE),
            "before": Layout(
                "What is the {subject} mentioned in the text below?\n\n",
                "\n\nAnswer the question that stands before the text.",
                cue=_NUMBER_CUE,
            ),
            "middle": Layout(
                "There is a question in the text below. Answer it at the end.\n\n",
                "\n\nAnswer the question that stands in the text.",
                hidden="Q: What is the {subject}? A: {sentence}",
                cue=_NUMBER_CUE,
            ),
        },
        score=exact_number,
        score_name="the number is in the answer",
        answer_tokens=32,
        chat=True,
        most_needles=len(_CITIES),
        version=2,
    ),
    "duoattention": _sandwich_preset(
        source="DuoAttention, appendices A.11 and A.12",
        draw=_sandwich(
            f"Remember, {_BEST_THING}",
            "What is the best thing to do in San Francisco? "
            "Answer: The best thing to do in San Francisco is",
        ),
        layouts={
            "after": Layout(
                "<|im_start|> This is a very long story book: <book> ",
                " </book>.\n\nBased on the content of the book, Question: {question} Answer:",
            ),
            # The paper has no such test; the words are those of its two.
            "before": Layout(
                "<|im_start|> This is a very long story book. Based on the content of the "
                "book, Question: {question}\n\n<book> ",
                " </book>.\n\nAnswer: The best",
            ),
            "middle": Layout(
                _DUO_EMBEDDED,
                "\n\nAnswer: The best",
                hidden=f"{_DUO_QA}T{_BEST_THING[1:]} is {_SANDWICH}",
            ),
        },
        chat=False,
        lengths=13,
    ),
    "razorattention": _sandwich_preset(
        source="RazorAttention, section 4.1.2: gkamradt's test, with his question",
        draw=_sandwich(f"T{_BEST_THING[1:]}", "What is the best thing to do in San Francisco?"),
        layouts={
            "after": Layout("", "\n\n{question} " + _KAMRADT_RULE),
            "before": Layout("{question} " + _KAMRADT_RULE + "\n\n", "\n\nAnswer:"),
            "middle": Layout(_DUO_EMBEDDED, "\n\nAnswer:", hidden=_DUO_QA + "{sentence}"),
        },
        chat=True,
        lengths=10,
    ),
    "words": Preset(
        source="the needle model, which copies words that it is to remember",
        draw=lambda depths, seed: [],  # the needle model's documents come with their facts
        layouts={"after": Layout("", " {question}")},
        score=same_words,
        score_name="the answer is right to the letter",
        answer_tokens=8,
        chat=False,
        most_needles=100,
        haystack="",
    ),
}
