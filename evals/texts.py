"""Prose to hide sentences in, and prompts as token ids, split where their document ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import fingerprint, haystack_paragraphs
from razor_dist.frontend.passages import PromptText
from razor_dist.frontend.prompts import JOB_TEMPLATE, PromptEncoder
from razor_dist.identify.prose import Prose
from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer

Encode = Callable[[str], list[int]]  # text to token ids, without special tokens
_MARK = "<<document>>"


def same_paragraphs(name: str, text: str | None) -> tuple[str, list[str]]:
    """Return `haystack_paragraphs`; refuse an empty text or a fingerprint other than ``text``."""
    name, paragraphs = haystack_paragraphs(name)
    if not paragraphs:
        raise ConfigError(
            f"the haystack {name} has no prose: give texts with paragraphs of at least 200 "
            "characters"
        )
    if text not in (None, fingerprint(paragraphs)):
        raise ConfigError(
            f"the text of the haystack {name} differs from that which the job was begun with; give "
            "a folder that all nodes share"
        )
    return name, paragraphs


class Corpus(NamedTuple):
    """Name and fingerprint of the text that a job hides needles in."""

    haystack: str  # of `haystack_paragraphs`, settled
    haystack_fingerprint: str

    @classmethod
    def of(cls, name: str) -> Corpus:
        """Settle a name by what is installed; refuse a text without prose."""
        name, paragraphs = same_paragraphs(name, None)
        return cls(name, fingerprint(paragraphs))


class Haystack(Prose):
    """The sentences of a corpus, over and over, to hide others among."""

    def __init__(self, name: str, encode: Encode, text: str | None = None) -> None:
        super().__init__(encode, same_paragraphs(name, text)[1])

    def hide(self, length: int, sentences: Sequence[tuple[str, float]], seed: int) -> list[int]:
        """Hide sentences at the sentence ends nearest their depths, in percent.

        ``length``, in tokens, includes them; raises `ConfigError` if they do not fit. The seed
        chooses the sentence that the document begins with.
        """
        hidden = [self.encode(" " + sentence) for sentence, _ in sentences]
        room = length - sum(map(len, hidden))
        if room < 1:
            raise ConfigError("the document is too short for its needles")
        filler = self.take(room, random.Random(seed), self.encode("."))
        ends = [0, *itertools.accumulate(map(len, filler))]
        wanted = [depth * ends[-1] / 100 for _, depth in sentences]
        slots = [min((abs(end - at), slot) for slot, end in enumerate(ends))[1] for at in wanted]
        ids: list[int] = []
        for slot, sentence in enumerate([*filler, []]):
            for own, place in zip(hidden, slots, strict=True):
                ids += own if place == slot else []
            ids += sentence
        return ids


def repeat_passages(
    ids: Sequence[int], ends: Sequence[int], count: int, first: int, away: int
) -> tuple[list[int], list[range]]:
    """Insert copies of passages that end at ``ends``; return all ids and the copies' ranges.

    Passages have ``count`` tokens and follow each other from the token ``first`` on, without
    overlapping a copy. Raises `ConfigError` if a passage begins fewer than ``away`` tokens before
    its copy, or if the text is too short.
    """
    made: list[int] = []
    copies: list[range] = []
    rest, source = iter(ids), first
    for end in ends:
        begin = end - count
        for copy in copies:
            if source < copy.stop and copy.start < source + count:
                source = copy.stop
        if begin < max(len(made), source + away):
            raise ConfigError(
                f"repeat_at: {end} tokens are too few for a passage of {count} that is repeated: "
                f"give {max(len(made), source + away) + count} or more"
            )
        made += itertools.islice(rest, begin - len(made))
        if len(made) < begin:
            raise ConfigError(f"the text has too few tokens to repeat passages up to {ends[-1]}")
        made += made[source : source + count]
        copies.append(range(begin, end))
        source += count
    return made, copies


class Prompter:
    """Splits a prompt where its document ends.

    A model with a chat template is asked in a user's message, and to answer without thinking, where
    the template knows that. One without is a base model: it gets document and question as they are,
    and the answer's beginning, as RULER does.
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
    def of(cls, config: EngineConfig) -> Self:
        """Load the tokenizer of the settings' model; it is downloaded if need be."""
        trust = config.trust_remote_code
        folder = resolve_model(config.model, trust_remote_code=trust)
        return cls(load_tokenizer(folder, trust_remote_code=trust))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is put before or after them."""
        return self._encoder.text(text, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def whole(self, text: str, cue: str, earlier: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Return the ids of a prompt; the ``cue`` begins the answer, as in RULER's own code.

        ``earlier`` are the questions and answers of the conversation before it.
        """
        prompt = self._prompt(text, cue, earlier)
        return self._encoder.text(prompt, special_tokens=not self.is_chat)

    def with_ends(
        self, text: str, cue: str, earlier: Sequence[tuple[str, str]] = ()
    ) -> tuple[list[int], str, npt.NDArray[np.int32]]:
        """Return the ids of `whole`, the prompt's text, and the text offset of each token's end."""
        prompt = self._prompt(text, cue, earlier)
        ids, found = self._encoder.text_with_ends(prompt, special_tokens=not self.is_chat)
        return ids, prompt, found.ends

    def place(self, text: str) -> PromptText:
        """Return each token's place in a message; tokens after the message begin the answer."""
        if self.is_chat:
            messages = [{"role": "user", "content": text}]
            return self._encoder.chat_with_ends(messages, **JOB_TEMPLATE)[1]
        return self._encoder.text_with_ends(text)[1]

    def _prompt(self, text: str, cue: str, earlier: Sequence[tuple[str, str]]) -> str:
        if not self.is_chat:
            return "".join(f"{asked} {answer}\n\n" for asked, answer in earlier) + f"{text} {cue}"
        turns = [*(part for turn in earlier for part in turn), text]
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": part} for role, part in zip(roles, turns)]  # noqa: B905
        return self._encoder.chat_text(messages, **JOB_TEMPLATE) + cue

    def around(
        self, before: str, after: str, cue: str = "", *, chat: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the ids before and after a document; the ``cue`` begins a base model's answer."""
        if not (self.is_chat and chat):
            # The text before the document carries the tokenizer's special tokens.
            return self._encoder.text(before), self.encode(after + cue)
        message = {"role": "user", "content": before + _MARK + after}
        text = self._encoder.chat_text([message], **JOB_TEMPLATE)
        head, _, tail = text.partition(_MARK)
        return self.encode(head), self.encode(tail)


# Tokenising takes seconds, which the next item saves. Each engine of a process has a tokenizer.
@lru_cache(maxsize=8)
def same_haystack(name: str, text: str, tokenizer: PreTrainedTokenizerBase) -> Haystack:
    """Open a haystack; refuse it if its text differs from the one that the job began with."""
    return Haystack(name, Prompter(tokenizer).encode, text)
