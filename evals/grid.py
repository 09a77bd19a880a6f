"""A grid of needles: the settings to try, the documents, and how they are asked.

A document hides one needle. It is prefilled and kept; the question continues it, so with
``prefill: exact`` it is asked after the cache was compressed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.ranges import check_least
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.haystack import Document, Haystack, Needle, draw_needle
from razor_dist.frontend.prompts import PromptEncoder, load_tokenizer
from razor_dist.heads.decision import Flags, Windows

FULL = "full"
"""The name of the method that others are measured against."""
ANSWER_TOKENS = 32

Place = tuple[int, int, int]
"""Length, depth and which needle."""

_MARK = "<<document>>"


@dataclass(frozen=True)
class Method:
    """Settings to try.

    Attributes
    ----------
    name : str
    settings : mapping
        Of the engine, its own; those that all methods share are the grid's. A ``head_map`` here is
        a name for people: what decides is `retrieval`.
    retrieval : tuple, optional
        ``[layers][KV heads]`` bool: which KV heads keep the whole context. None with ``attention``
        full or streaming, which say it.
    windows : tuple, optional
        ``[layers][KV heads]``: windows of their own that streaming heads have (`HeadMap.windows`).
    """

    name: str
    settings: Mapping[str, Any]
    retrieval: Flags | None = None
    windows: Windows | None = None

    @property
    def shares_prefill(self) -> bool:
        """Whether a document's keys and values are those of full attention."""
        own = self.settings
        return own.get("attention") == "full" or own.get("prefill") == "exact"

    def fingerprint(self, model: str, prompt: Sequence[Sequence[int]]) -> str:
        """Of all that decides the answer to a prompt."""
        about: list[Any] = [model, self.settings, self.retrieval, prompt, ANSWER_TOKENS]
        if self.windows is not None:
            about.append(self.windows)
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


FULL_METHOD = Method(FULL, {"attention": "full"})

_WINDOW = ("window_min", "window_ratio", "window_max", "sink_tokens", "block", "compensation")


def streaming_settings(config: EngineConfig, prefill: str) -> dict[str, Any]:
    """What a streaming head sees, as a method's own settings."""
    return {"prefill": prefill} | {name: getattr(config, name) for name in _WINDOW}


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
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))

    @classmethod
    def of_model(cls, folder: Path, *, trust_remote_code: bool = False) -> Self:
        """For the model in a folder."""
        return cls(load_tokenizer(folder, trust_remote_code=trust_remote_code))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is put before or after them."""
        return self._encoder.text(text, special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        text: Any = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return str(text)

    def around(
        self, before: str, after: str, cue: str = "", *, chat: bool = True
    ) -> tuple[list[int], list[int]]:
        """Token ids before and after a document.

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

    def document(self, document: Document) -> list[int]:
        """Token ids up to the document's end."""
        return self.around("", "")[0] + document.ids

    def question(self, needle: Needle) -> list[int]:
        """Token ids from there to where the answer begins."""
        return self.around("", f"\n\n{needle.question}", f" Answer: The {needle.subject} is")[1]


@dataclass(frozen=True)
class GridSettings:
    """Which documents.

    Attributes
    ----------
    lengths : tuple of int
        In tokens.
    depths : tuple of int
        In percent of the text before the needle.
    needles : int
        Documents of each length and depth; each hides another number in another text.
    haystack : str
        See `open_haystack`.
    seed : int

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    lengths: tuple[int, ...] = (2500, 5000)
    depths: tuple[int, ...] = (10, 30, 50, 70, 90)
    needles: int = 2
    haystack: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"lengths must be numbers of tokens, got {list(self.lengths)}")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(f"depths must be percents from 0 to 100, got {list(self.depths)}")
        check_least(self, needles=1)

    def documents(self, haystack: Haystack) -> dict[Place, Document]:
        """The grid's documents, short ones first."""
        places = itertools.product(self.lengths, self.depths, range(self.needles))
        return {place: make_document(haystack, place, self.seed) for place in sorted(places)}


def make_document(haystack: Haystack, place: Place, seed: int) -> Document:
    """The grid's document at a place; the same for every method."""
    length, depth, needle = place
    # Two needles of a place have neighbouring seeds; those of further ones are another place's, so
    # far away that no other seed, length and depth comes to it.
    pair, which = divmod(needle, 2)
    own_seed = ((seed * 100_003 + length) * 101 + depth) * 2 + which + (pair << 64)
    return haystack.document(length, [draw_needle(depth, own_seed)], own_seed)
