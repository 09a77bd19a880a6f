"""The needle test's prompts as token ids: what is read once, and what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.evals.needle.facts import Fact
from razor_dist.evals.needle.haystack import Haystack, hide_words
from razor_dist.evals.needle.presets import Layout, Preset
from razor_dist.frontend.prompts import PromptEncoder, load_tokenizer

_MARK = "<<document>>"


class Prompter:
    """Splits a prompt where its document ends.

    A model with a chat template is asked in a user's message. One without is a base model: it gets
    document and question as they are, and the answer's beginning, as RULER does.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase or None

    Raises
    ------
    ModelError
        If there is no tokenizer: documents are texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise ModelError(
                "the model has no tokenizer, so it can be asked for no needles: put its "
                "tokenizer.json and tokenizer_config.json into its folder"
            )
        self.tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))

    @classmethod
    def of_model(cls, folder: Path, *, trust_remote_code: bool = False) -> Self:
        """Return the prompter of the model in a folder."""
        return cls(load_tokenizer(folder, trust_remote_code=trust_remote_code))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is put before or after them."""
        return self._encoder.text(text, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer."""
        text: Any = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return str(text)

    def around(
        self, before: str, after: str, cue: str = "", *, chat: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the token ids before and after a document.

        Parameters
        ----------
        before, after : str
            What stands there in the user's message.
        cue : str
            The answer's beginning, for a base model.
        chat : bool
            False asks a model with a chat template as if it had none.
        """
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
    seed: int,
    *,
    document_alone: bool = False,
) -> list[Reading]:
    """Make one document with its questions.

    Asked after the document, all questions continue one prefix. Where a question stands before or
    in the document, each has a prefix of its own.

    Parameters
    ----------
    preset, query
        Settings of `NeedleConfig`.
    prompter : Prompter
    haystack : Haystack or None
        None for the preset that makes its own text.
    length : int
        Tokens of the longest prompt with its answer: the document fills what the rest leaves. Of
        the ``document_alone`` in a grid.
    spots : sequence of Spot
    seed : int

    Raises
    ------
    ConfigError
        If the length does not hold the needles, or the haystack is too short.
    """
    layout = preset.layouts[query]
    depths = [spot.depth for spot in spots]
    if haystack is None:
        return [_of_words(preset, layout, prompter, length, spots, seed)]
    facts = preset.draw(depths, seed)
    frames = [
        prompter.around(
            layout.fill("before", fact),
            layout.fill("after", fact),
            layout.fill("cue", fact),
            chat=preset.chat,
        )
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
        return haystack.hide(room, list(zip(hidden, depths, strict=True)), seed)[0]

    if query == "after":
        return [Reading(frames[0][0] + document(None), questions)]
    return [
        Reading(head + document(fact), [question])
        for fact, (head, _), question in zip(facts, frames, questions, strict=True)
    ]


def with_questions(made: Sequence[Reading]) -> list[Reading]:
    """Read each question together with its document, up to the question's last token.

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
    """Make a document for the needle model."""
    # Every question is the same two words long: "remember" and the key.
    tail = len(prompter.encode(layout.after.format(question="remember me")))
    try:
        text, facts = hide_words(
            length - preset.answer_tokens - tail, [s.depth for s in spots], seed
        )
    except ConfigError as error:
        raise ConfigError(f"a prompt of {length} tokens is too short: {error}") from None
    questions = [
        Question(spot, fact.answer, prompter.encode(layout.fill("after", fact)))
        for spot, fact in zip(spots, facts, strict=True)
    ]
    return Reading(prompter.around(text, "", chat=False)[0], questions)
