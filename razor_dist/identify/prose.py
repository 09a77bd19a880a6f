"""Tokens of ordinary text, and the special tokens around a model's prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import ConfigError
from razor_dist.documents.corpus import folder_paragraphs, reference_paragraphs, sentences_of
from razor_dist.files import digest_of


class Prose:
    """Sentences of a text, as tokens; `ConfigError` if there are none.

    ``encode`` gives the tokens of a text, without special ones. Sentences are encoded one by one,
    so that text inserted between two of them changes neither.
    """

    def __init__(self, encode: Callable[[str], list[int]], paragraphs: Sequence[str]) -> None:
        self.encode = encode
        self._sentences = [
            encode(("\n\n" if index == 0 else " ") + sentence)
            for paragraph in paragraphs
            for index, sentence in enumerate(sentences_of(paragraph))
        ]
        if not any(self._sentences):
            raise ConfigError("there is no text to make samples of")

    @property
    def fingerprint(self) -> str:
        """Digest of the sentences' tokens."""
        return digest_of(json.dumps(self._sentences).encode())

    def take(self, tokens: int, draw: random.Random, end: Sequence[int] = ()) -> list[list[int]]:
        """Take consecutive sentences of ``tokens`` tokens in all, the last one cut.

        The first one is random; after the last sentence of the text comes its first. A sentence
        that is cut ends with the tokens ``end``.
        """
        first = draw.randrange(len(self._sentences))
        text: list[list[int]] = []
        while tokens > 0:
            sentence = self._sentences[(first + len(text)) % len(self._sentences)]
            if len(sentence) > tokens:
                sentence = [*sentence[: tokens - bool(end)], *end][-tokens:]
            text.append(sentence)
            tokens -= len(sentence)
        return text


def open_prose(tokenizer: PreTrainedTokenizerBase, haystack: Path | None = None) -> Prose:
    """Encode a folder of ``.txt`` files or, by default, the prose of Python's language reference.

    The reference has some 20,000 tokens. Raise `ConfigError` if the folder has no text.
    """
    try:
        paragraphs = reference_paragraphs() if haystack is None else folder_paragraphs(haystack)
    except ValueError as error:
        raise ConfigError(f"haystack: {error}") from error
    return Prose(partial(tokenizer.encode, add_special_tokens=False), paragraphs)


def start_tokens(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the special tokens that every prompt of a model begins with."""
    if tokenizer is None:
        return []
    empty: list[int] = tokenizer.encode("")
    # Some tokenizers end the text as well.
    return empty[:-1] if len(empty) > 1 and empty[-1] == tokenizer.eos_token_id else empty


def user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a user's message, by the chat template.

    Without a template they are `start_tokens` and a newline.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    if tokenizer.chat_template is None:
        return start_tokens(tokenizer), encode("\n")
    mark = "the text of the message"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = str(text).partition(mark)
    return encode(before), encode(after)
