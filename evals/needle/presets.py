"""Presets of the needle test: what it hides, how it asks, and how it scores an answer.

A *layout* says what stands around the document and in it, for each place that the question may
have: after the document, before it, or in its middle, at the needle (DuoAttention, appendix A.12).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from razor_dist.evals.needle.facts import (
    Fact,
    exact_number,
    number_facts,
    same_words,
    word_overlap,
)


@dataclass(frozen=True)
class Layout:
    """Words around a document and in it; ``{question}`` and ``{subject}`` are the fact's.

    Attributes
    ----------
    before, after : str
    hidden : str
        What stands in the document; ``{sentence}`` is the fact's.
    cue : str
        How the answer begins where the model continues a text instead of a chat.
    """

    before: str
    after: str
    hidden: str = "{sentence}"
    cue: str = ""

    def fill(self, part: str, fact: Fact) -> str:
        """Return a part of the layout for a fact."""
        text: str = getattr(self, part)
        return text.format(question=fact.question, subject=fact.subject, sentence=fact.sentence)


@dataclass(frozen=True)
class Preset:
    """A needle test as somebody has described it.

    Attributes
    ----------
    source : str
        Who, for the report.
    draw : callable
        Facts from their depths and a seed.
    layouts : mapping
        By the question's place; one that is missing cannot be asked for.
    score : callable
        From 0 to 1, of an answer and the right one.
    score_name : str
        For the report.
    answer_tokens : int
        Tokens of an answer at most.
    chat : bool
        Whether the question is a user's message, where the model has a chat template.
    most_needles : int
        Facts that can be told apart in one document.
    lengths, depths : int
        How many of each, if the user does not say.
    haystack : str
        See `razor_dist.documents.corpus.haystack_paragraphs`; empty for documents of the preset's
        own.
    """

    source: str
    draw: Callable[[Sequence[float], int], list[Fact]]
    layouts: Mapping[str, Layout]
    score: Callable[[str, str], float]
    score_name: str
    answer_tokens: int
    chat: bool
    most_needles: int
    lengths: int = 5
    depths: int = 5
    haystack: str = "auto"


_SANDWICH = "eat a sandwich and sit in Dolores Park on a sunny day."
_BEST_THING = "the best thing to do in San Francisco"


def _sandwich(beginning: str, question: str) -> Callable[[Sequence[float], int], list[Fact]]:
    def draw(depths: Sequence[float], seed: int) -> list[Fact]:
        """Return the same fact for every seed."""
        sentence = f"{beginning} is {_SANDWICH}"
        return [Fact(sentence, question, _SANDWICH, _BEST_THING, depth) for depth in depths]

    return draw


def _words(depths: Sequence[float], seed: int) -> list[Fact]:
    raise AssertionError("the needle model's documents come with their facts")


_NUMBER_CUE = " Answer: The {subject} is"
_DUO_EMBEDDED = (
    "This is a very long storybook with a question embedded. Please answer the embedded question "
    "at the end of the book.\n\n"
)
_DUO_QA = "Q: What is the best thing to do in San Francisco? A: "
_KAMRADT_RULE = "Don't give information outside the document or repeat your findings"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
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
            most_needles=20,
        ),
        "duoattention": Preset(
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
            score=word_overlap,
            score_name="words in common, of the words expected",
            answer_tokens=50,
            chat=False,
            most_needles=1,
            lengths=13,
            depths=10,
            haystack="essays",
        ),
        "razorattention": Preset(
            source="RazorAttention, section 4.1.2: gkamradt's test, with his question",
            draw=_sandwich(f"T{_BEST_THING[1:]}", "What is the best thing to do in San Francisco?"),
            layouts={
                "after": Layout("", "\n\n{question} " + _KAMRADT_RULE),
                "before": Layout("{question} " + _KAMRADT_RULE + "\n\n", "\n\nAnswer:"),
                "middle": Layout(_DUO_EMBEDDED, "\n\nAnswer:", hidden=_DUO_QA + "{sentence}"),
            },
            score=word_overlap,
            score_name="words in common, of the words expected",
            answer_tokens=50,
            chat=True,
            most_needles=1,
            lengths=10,
            depths=10,
            haystack="essays",
        ),
        "words": Preset(
            source="the needle model, which copies words that it is to remember",
            draw=_words,
            layouts={"after": Layout("", " {question}")},
            score=same_words,
            score_name="the answer is right to the letter",
            answer_tokens=8,
            chat=False,
            most_needles=100,
            haystack="",
        ),
    }
)
