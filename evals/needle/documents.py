"""Documents with sentences hidden in them, and questions that continue them, as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from razor_dist.config.errors import ConfigError
from razor_dist.config.validation import check_percent
from razor_dist.evals.needle.model import needle_words
from razor_dist.evals.needle.presets import Fact, Preset, word_fact
from razor_dist.evals.texts import Haystack, Prompter

_ANSWER_WORDS = 5
_SENTENCE = range(7, 15)
# [gMASK] <sop>, which the needle model's tokenizer puts before every text.
_START_TOKENS = 2


def hide_words(tokens: int, depths: Sequence[float], seed: int = 0) -> tuple[str, list[Fact]]:
    """Write a document for the needle model: random words, with sentences to remember.

    Returns the text, of exactly ``tokens`` tokens, and a fact for each depth, in percent of the
    document's sentences. Keys and answers are drawn too, and occur nowhere else. Raises
    `ConfigError` if the sentences do not fit, or a depth is not a percentage.
    """
    for depth in depths:
        check_percent("depths", depth)
    draw = random.Random(f"{seed}:{tokens}")
    words = [word for word in needle_words() if word != "remember"]
    draw.shuffle(words)
    facts = []
    for depth in depths:
        key, *answer = (words.pop() for _ in range(1 + _ANSWER_WORDS))
        facts.append(word_fact(key, answer, depth))
    room = tokens - _START_TOKENS - sum(len(fact.sentence.split()) for fact in facts)
    if room < 1:
        raise ConfigError(f"{tokens} tokens do not hold {len(facts)} sentences to remember")
    sentences: list[str] = []
    while room > 0:
        length = min(draw.choice(_SENTENCE), room)
        sentences.append(" ".join([*draw.choices(words, k=length - 1), "."]))
        room -= length
    places = [round(fact.depth * len(sentences) / 100) for fact in facts]
    # From the back, so that what is inserted moves no later place.
    for place, fact in sorted(zip(places, facts, strict=True), key=lambda p: -p[0]):
        sentences.insert(place, fact.sentence)
    return " ".join(sentences), facts


class Spot(NamedTuple):
    """A needle's place: percent of the document before it, and its number there."""

    depth: float
    needle: int


class Question(NamedTuple):
    """A continuation of a prefix, up to where the answer begins."""

    spot: Spot
    expected: str
    ids: list[int]


class Reading(NamedTuple):
    """A prefix to read once, and the questions to ask of it."""

    prefix: list[int]
    questions: list[Question]


def share_out(depths: Sequence[float], needles: int, *, together: bool) -> list[list[Spot]]:
    """Distribute needles over documents, so that every depth gets each needle number once.

    A document has ``needles`` needles, as far apart in depth as possible. With ``together``, one
    document has the needles of all depths.
    """
    if together:
        return [[Spot(depth, needle) for depth in depths for needle in range(needles)]]
    step = max(1, len(depths) // needles)
    return [
        [Spot(depths[(first + needle * step) % len(depths)], needle) for needle in range(needles)]
        for first in range(len(depths))
    ]


@dataclass(frozen=True)
class Documents:
    """Documents of a preset, as token ids; without a haystack the preset makes its own text."""

    preset: Preset
    prompter: Prompter
    haystack: Haystack | None

    def readings(
        self,
        query: str,
        length: int,
        spots: Sequence[Spot],
        seed: int,
        *,
        document_alone: bool = False,
    ) -> list[Reading]:
        """Make one document with its questions.

        Asked after the document, all questions continue one prefix; else each has its own.
        ``length`` is of the document if ``document_alone``, else of the longest prompt with its
        answer; raises `ConfigError` if the document does not hold the needles.
        """
        haystack, preset = self.haystack, self.preset
        if haystack is None:
            return [self._of_words(length, spots, seed)]
        layout, depths = preset.layouts[query], [spot.depth for spot in spots]
        facts, parts = preset.draw(depths, seed), ("before", "after", "cue")
        frames = [
            self.prompter.around(*(layout.fill(part, fact) for part in parts), chat=preset.chat)
            for fact in facts
        ]
        room = length
        if not document_alone:
            room -= preset.answer_tokens + max(len(head) + len(tail) for head, tail in frames)
        questions = [
            Question(spot, fact.answer, tail)
            for spot, fact, (_, tail) in zip(spots, facts, frames, strict=True)
        ]

        def document(asked: Fact | None) -> list[int]:
            hidden = [layout.fill("hidden", f) if f is asked else f.sentence for f in facts]
            return haystack.hide(room, list(zip(hidden, depths, strict=True)), seed)

        if query == "after":
            return [Reading(frames[0][0] + document(None), questions)]
        return [
            Reading(head + document(fact), [question])
            for fact, (head, _), question in zip(facts, frames, questions, strict=True)
        ]

    def _of_words(self, length: int, spots: Sequence[Spot], seed: int) -> Reading:
        layout = self.preset.layouts["after"]
        # Every question is the same two words long: "remember" and the key.
        tail = len(self.prompter.encode(layout.after.format(question="remember me")))
        room = length - self.preset.answer_tokens - tail
        try:
            text, facts = hide_words(room, [spot.depth for spot in spots], seed)
        except ConfigError as error:
            raise ConfigError(f"a prompt of {length} tokens is too short: {error}") from None
        questions = [
            Question(spot, fact.answer, self.prompter.encode(layout.fill("after", fact)))
            for spot, fact in zip(spots, facts, strict=True)
        ]
        return Reading(self.prompter.around(text, "", chat=False)[0], questions)


def with_questions(made: Sequence[Reading]) -> list[Reading]:
    """Read each question with its document, for methods shown it before they drop anything."""
    return [
        Reading(reading.prefix + question.ids[:-1], [question._replace(ids=question.ids[-1:])])
        for reading in made
        for question in reading.questions
    ]
