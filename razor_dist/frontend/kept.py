"""The beginning of a prompt whose tokens are kept, and what follows it, tokenised without it.

The tokens are those of the whole text, whatever follows. Therefore the kept ones end where no
tokenizer joins what is before with what is behind: at a space between two letters, or behind a line
feed before a letter or digit. What is between there and the end of the kept text is tokenised
again, with some characters before it, whose tokens must come out as they were kept.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
import numpy as np
import numpy.typing as npt

from razor_dist.config.errors import RequestError
from razor_dist.frontend.prompts import PromptEncoder

Ints = npt.NDArray[np.int32]

_APART = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\n)(?=[^\W_])")
# Characters before the end in which such a place is looked for.
_SEARCHED = 1 << 16
# Characters before it that are tokenised again, and how many of their tokens must be the same.
_AGAIN, _SAME = 256, 4


class KeptText(msgspec.Struct, frozen=True):
    """The first ``length`` characters of a text; the tokens are those of its first ``cut``."""

    length: int
    digest: bytes  # SHA-256 of these characters
    cut: int
    end: str  # its last characters, from some before the cut on
    token_bytes: bytes  # int32, as in `Encoded`
    end_bytes: bytes

    @property
    def tokens(self) -> Ints:
        return np.frombuffer(self.token_bytes, np.int32)

    @property
    def ends(self) -> Ints:
        """The end of each token, in characters of the text."""
        return np.frombuffer(self.end_bytes, np.int32)


def keep(text: str, length: int, ids: Ints, ends: Ints) -> KeptText | None:
    """Keep the first ``length`` characters of a text; ``ids`` and ``ends`` are the whole text's.

    None if there is no place to cut it.
    """
    length = len(text[:length].rstrip())  # what a template may strip is no part of it
    first = max(0, length - _SEARCHED)
    borders = set(ends[ends > first].tolist())
    places = [first + found.start() for found in _APART.finditer(text[first:length])]
    cut = next((place for place in reversed(places) if place in borders), None)
    if cut is None:
        return None
    count = int(np.flatnonzero(ends == cut)[-1]) + 1
    end = text[max(0, cut - _AGAIN) : length]
    own, where = (np.ascontiguousarray(x[:count], np.int32).tobytes() for x in (ids, ends))
    return KeptText(length, _digest(text[:length]), cut, end, own, where)


def continued(encoder: PromptEncoder, kept: KeptText, text: str) -> tuple[Ints, Ints]:
    """Return the tokens of a text that begins as a kept one, and where they end in it.

    Raises `RequestError` if it begins otherwise, or if the tokenizer makes other tokens of the
    characters before the place where it goes on.
    """
    if len(text) < kept.length or _digest(text[: kept.length]) != kept.digest:
        raise RequestError(
            "the conversation does not begin as its context does: tools, chat_template_kwargs, "
            "reasoning_effort and all else that the chat template writes before the context, such "
            "as the date, must be as they were when it was kept",
            param="context",
        )
    if found := behind(encoder, kept, text[kept.length :]):
        return found
    tokens, ends = encoder.with_ends(text)  # slower, and the same
    if not np.array_equal(tokens[: len(kept.tokens)], kept.tokens):
        # Stored contexts outlive a release, and a change of the model's folder.
        raise RequestError(
            "the tokenizer makes other tokens of this context than when it was kept: send the "
            "whole text again",
            param="context",
        )
    return tokens, ends


def behind(encoder: PromptEncoder, kept: KeptText, rest: str) -> tuple[Ints, Ints] | None:
    """As `continued`, from the text that follows alone; None if the tokens come out otherwise."""
    tokens, ends = kept.tokens, kept.ends
    first = max(0, kept.cut - _AGAIN)
    new, where = encoder.with_ends(kept.end + rest)
    at = np.flatnonzero(where == kept.cut - first)
    if len(at):
        count = int(at[-1]) + 1
        same = min(_SAME, len(tokens), count)
        if new[count - same : count].tolist() == tokens[len(tokens) - same :].tolist():
            return (
                np.concatenate([tokens, new[count:]]),
                np.concatenate([ends, where[count:] + np.int32(first)]),
            )
    return None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
