"""Documents with sentences hidden in them, and questions that continue them, as token ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.validation import check_percent
from razor_dist.documents.corpus import fingerprint, haystack_paragraphs, sentences_of
from razor_dist.evals.needle.model import needle_words
from razor_dist.evals.needle.presets import Fact, Preset, word_fact
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.models.tokenizer import load_tokenizer

Encode = Callable[[str], list[int]]  # text to token ids, without special tokens
_ANSWER_WORDS = 5
_SENTENCE = range(7, 15)
# [gMASK] <sop>, which the needle model's tokenizer puts before every text.
_START_TOKENS = 2
_MARK = "<<document>>"


def same_paragraphs(name: str, text: str | None) -> tuple[str, list[str]]:
    """Return `haystack_paragraphs`; refuse others than those with the fingerprint ``text``."""
    name, paragraphs = haystack_paragraphs(name)
    if text not in (None, fingerprint(paragraphs)):
        raise ConfigError(
            f"the text of the haystack {name} differs from that which the job was begun with; give "
            "a folder that all nodes share"
        )
    return name, paragraphs


class Haystack:
    """The sentences of a corpus, over and over, to hide others among."""

    def __init__(self, name: str, encode: Encode, text: str | None = None) -> None:
        name, paragraphs = same_paragraphs(name, text)
        self._encode = encode
        # Sentences are tokenised one by one, so that a needle between two changes neither.
        self._sentences = [
            encode((" " if index else "\n\n") + sentence)
            for paragraph in paragraphs
            for index, sentence in enumerate(sentences_of(paragraph))
        ]
        if not self._sentences:
            raise ConfigError(
                f"the haystack {name} has no prose: give texts with paragraphs of at least "
                "200 characters"
            )

    def hide(self, length: int, sentences: Sequence[tuple[str, float]], seed: int) -> list[int]:
        """Hide sentences at the sentence ends nearest their depths, in percent.

        ``length``, in tokens, includes them; raises `ConfigError` if they do not fit. The seed
        chooses the sentence that the document begins with.
        """
        hidden = [self._encode(" " + sentence) for sentence, _ in sentences]
        filler = self._filler(length - sum(map(len, hidden)), seed)
        ends = [0, *itertools.accumulate(map(len, filler))]
        wanted = [depth * ends[-1] / 100 for _, depth in sentences]
        slots = [min((abs(end - at), slot) for slot, end in enumerate(ends))[1] for at in wanted]
        ids: list[int] = []
        for slot, sentence in enumerate([*filler, []]):
            for own, place in zip(hidden, slots, strict=True):
                ids += own if place == slot else []
            ids += sentence
        return ids

    def _filler(self, length: int, seed: int) -> list[list[int]]:
        """Return consecutive sentences of ``length`` tokens, the last cut short by a full stop."""
        if length < 1:
            raise ConfigError("the document is too short for its needles")
        index = random.Random(seed).randrange(len(self._sentences))
        filler: list[list[int]] = []
        while length > 0:
            sentence = self._sentences[index % len(self._sentences)]
            if len(sentence) > length:
                sentence = (sentence[: length - 1] + self._encode("."))[-length:]
            filler.append(sentence)
            length -= len(sentence)
            index += 1
        return filler


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


class Prompter:
    """Splits a prompt where its document ends.

    A model with a chat template is asked in a user's message. One without is a base model: it gets
    document and question as they are, and the answer's beginning, as RULER does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise ModelError(
                "the model has no tokenizer, so it can be asked nothing in words: put its "
                "tokenizer.json and tokenizer_config.json into its folder"
            )
        self.tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))

    @classmethod
    def of_model(cls, folder: Path, *, trust_remote_code: bool = False) -> Self:
        return cls(load_tokenizer(folder, trust_remote_code=trust_remote_code))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is put before or after them."""
        return self._encoder.text(text, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def whole(self, text: str, cue: str) -> list[int]:
        """Return the ids of a prompt; the ``cue`` begins the answer, as in RULER's own code."""
        if not self.is_chat:
            return self._encoder.text(f"{text} {cue}")
        return self.encode(self._encoder.chat_text([{"role": "user", "content": text}]) + cue)

    def around(
        self, before: str, after: str, cue: str = "", *, chat: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the ids before and after a document; the ``cue`` begins a base model's answer."""
        if not (self.is_chat and chat):
            # As one text, the special tokens that begin it included.
            return self._encoder.text(before), self.encode(after + cue)
        text = self._encoder.chat_text([{"role": "user", "content": before + _MARK + after}])
        head, _, tail = text.partition(_MARK)
        return self.encode(head), self.encode(tail)


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
    """Share needles out to documents, so that every depth has each of its needles in one of them.

    A document has ``needles`` of them, at depths as far from each other as there are; or
    ``together``, one document has the needles of all depths.
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
    seed: int,
    *,
    document_alone: bool = False,
) -> list[Reading]:
    """Make one document with its questions.

    Asked after the document, all questions continue one prefix; else each has its own. There is no
    haystack for the preset that makes its own text. ``length`` is of the document if
    ``document_alone``, else of the longest prompt with its answer; raises `ConfigError` if the
    document does not hold the needles.
    """
    if haystack is None:
        return [_of_words(preset, prompter, length, spots, seed)]
    layout, depths = preset.layouts[query], [spot.depth for spot in spots]
    facts, parts = preset.draw(depths, seed), ("before", "after", "cue")
    frames = [
        prompter.around(*(layout.fill(part, fact) for part in parts), chat=preset.chat)
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


def with_questions(made: Sequence[Reading]) -> list[Reading]:
    """Read each question with its document, for methods shown it before they drop anything."""
    return [
        Reading(reading.prefix + question.ids[:-1], [question._replace(ids=question.ids[-1:])])
        for reading in made
        for question in reading.questions
    ]


def _of_words(
    preset: Preset, prompter: Prompter, length: int, spots: Sequence[Spot], seed: int
) -> Reading:
    layout = preset.layouts["after"]
    # Every question is the same two words long: "remember" and the key.
    tail = len(prompter.encode(layout.after.format(question="remember me")))
    room = length - preset.answer_tokens - tail
    try:
        text, facts = hide_words(room, [spot.depth for spot in spots], seed)
    except ConfigError as error:
        raise ConfigError(f"a prompt of {length} tokens is too short: {error}") from None
    questions = [
        Question(spot, fact.answer, prompter.encode(layout.fill("after", fact)))
        for spot, fact in zip(spots, facts, strict=True)
    ]
    return Reading(prompter.around(text, "", chat=False)[0], questions)
