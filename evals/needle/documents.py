"""The needle test's prompts as token ids: what is read once, and what is asked of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from razor_dist.config.errors import ConfigError
from razor_dist.documents.haystack import Haystack
from razor_dist.evals.grid import Prompter
from razor_dist.evals.hidden_words import hide_words
from razor_dist.evals.needle.presets import Fact, Layout, Preset


class Spot(NamedTuple):
    """Where a needle is hidden: percent of the document before it, and which of those there."""

    depth: float
    needle: int


class Question(NamedTuple):
    """What continues a prefix, up to where the answer begins."""

    spot: Spot
    expected: str
    ids: list[int]


class Reading(NamedTuple):
    """A prefix to read once, and the questions to ask of it."""

    prefix: list[int]
    questions: list[Question]


def share_out(depths: Sequence[float], needles: int, *, together: bool) -> list[list[Spot]]:
    """The spots of each document, so that every depth has each of its needles in one of them.

    Parameters
    ----------
    depths : sequence of float
    needles : int
        Needles in a document, at depths as far from each other as there are.
    together : bool
        One document instead, with the needles of all depths.
    """
    if together:
        return [[Spot(depth, needle) for depth in depths for needle in range(needles)]]
    step = max(1, len(depths) // needles)
    return [
        [Spot(depths[(first + needle * step) % len(depths)], needle) for needle in range(needles)]
        for first in range(len(depths))
    ]


def readings(
    preset: Preset,
    query: str,
    prompter: Prompter,
    haystack: Haystack | None,
    length: int,
    spots: Sequence[Spot],
    seed: str,
) -> list[Reading]:
    """One document with its questions.

    Asked after the document, all questions continue one prefix. Where a question stands before or
    in the document, each has a prefix of its own.

    Parameters
    ----------
    preset : Preset
    query : str
        ``after``, ``before`` or ``middle``.
    prompter : Prompter
    haystack : Haystack or None
        None for the preset that makes its own text.
    length : int
        Tokens of the longest prompt with its answer: the document fills what the rest leaves.
    spots : sequence of Spot
    seed : str
        Equal seeds give equal documents.

    Raises
    ------
    ConfigError
        If the length does not hold the needles, or the haystack is too short.
    """
    layout = preset.layouts[query]
    depths = [spot.depth for spot in spots]
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6])
    if haystack is None:
        return [_of_words(preset, layout, prompter, length, spots, number)]
    facts = preset.draw(depths, number)
    frames = [
        prompter.around(
            layout.fill("before", fact),
            layout.fill("after", fact),
            layout.fill("cue", fact),
            chat=preset.chat,
        )
        for fact in facts
    ]
    room = length - preset.answer_tokens - max(len(head) + len(tail) for head, tail in frames)
    questions = [
        Question(spot, fact.answer, tail)
        for spot, fact, (_, tail) in zip(spots, facts, frames, strict=True)
    ]

    def document(asked: Fact | None) -> list[int]:
        hidden = [layout.fill("hidden", f) if f is asked else f.sentence for f in facts]
        return haystack.hide(room, list(zip(hidden, depths, strict=True)), number)[0]

    if query == "after":
        return [Reading(frames[0][0] + document(None), questions)]
    return [
        Reading(head + document(fact), [question])
        for fact, (head, _), question in zip(facts, frames, questions, strict=True)
    ]


def with_questions(made: Sequence[Reading]) -> list[Reading]:
    """The same, each question read together with its document up to the question's last token.

    For methods that are shown the question before they drop anything: each is a reading of its own.
    """
    return [
        Reading(reading.prefix + question.ids[:-1], [question._replace(ids=question.ids[-1:])])
        for reading in made
        for question in reading.questions
    ]


def _of_words(
    preset: Preset,
    layout: Layout,
    prompter: Prompter,
    length: int,
    spots: Sequence[Spot],
    seed: int,
) -> Reading:
    """A document of the needle model."""
    # Every question is the same two words long: "remember" and the key.
    tail = len(prompter.encode(layout.after.format(question="remember me")))
    try:
        made = hide_words(length - preset.answer_tokens - tail, [s.depth for s in spots], seed)
    except ValueError as error:
        raise ConfigError(f"a prompt of {length} tokens is too short: {error}") from None
    questions = [
        Question(
            spot, hidden.answer, prompter.encode(layout.after.format(question=hidden.question))
        )
        for spot, hidden in zip(spots, made.hidden, strict=True)
    ]
    return Reading(prompter.around(made.text, "", chat=False)[0], questions)
