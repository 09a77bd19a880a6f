"""Tokens of a prompt's beginning, kept so that only the text behind it is tokenised.

The result must equal the tokens of the whole text, whatever follows. So the kept tokens end at a
*cut* across which no tokenizer joins characters: at a space between two letters, or between a line
feed and a letter or digit. The text behind the cut is tokenised with some characters before it,
whose tokens must equal the kept ones.
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

_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\n)(?=[^\W_])")
# Characters before the kept text's end in which a cut is looked for; prose has one in each line.
_SEARCHED_CHARACTERS = 1 << 16
# Characters before the cut that are tokenised again, and how many of their tokens must be equal.
_AGAIN_CHARACTERS, _SAME_TOKENS = 256, 4


class KeptText(msgspec.Struct, frozen=True):
    """The first ``length`` characters of a text, and the tokens of its first ``cut`` characters."""

    length: int
    digest: bytes  # SHA-256 of the ``length`` characters
    cut: int
    end: str  # from `_AGAIN_CHARACTERS` before the cut to ``length``
    token_bytes: bytes  # of `tokens`
    end_bytes: bytes  # of `ends`

    @property
    def tokens(self) -> Ints:
        return np.frombuffer(self.token_bytes, np.int32)

    @property
    def ends(self) -> Ints:
        """End of each token, in characters from the beginning of the text; int32 ``[n]``."""
        return np.frombuffer(self.end_bytes, np.int32)


def keep(text: str, length: int, ids: Ints, ends: Ints) -> KeptText | None:
    """Keep the first ``length`` characters of a text; ``ids`` and ``ends`` are the whole text's.

    None without a cut.
    """
    length = len(text[:length].rstrip())  # a template may strip white space at the end
    first = max(0, length - _SEARCHED_CHARACTERS)
    borders = set(ends[ends > first].tolist())
    places = [first + found.start() for found in _CUT.finditer(text[first:length])]
    cut = next((place for place in reversed(places) if place in borders), None)
    if cut is None:
        return None
    count = int(np.flatnonzero(ends == cut)[-1]) + 1
    end = text[max(0, cut - _AGAIN_CHARACTERS) : length]
    own, where = (np.ascontiguousarray(x[:count], np.int32).tobytes() for x in (ids, ends))
    return KeptText(length, _digest(text[:length]), cut, end, own, where)


def continued(encoder: PromptEncoder, kept: KeptText, text: str) -> tuple[Ints, Ints]:
    """Return the tokens of a text that begins with a kept one, and where each ends in the text.

    Raises `RequestError` if the text begins otherwise, or if the tokenizer now makes other tokens
    of the kept text.
    """
    if len(text) < kept.length or _digest(text[: kept.length]) != kept.digest:
        raise RequestError(
            "the conversation does not begin with its context: tools, chat_template_kwargs, "
            "reasoning_effort and all that the chat template writes before the context, such as "
            "the date, must be the same as when the context was made",
            param="context",
        )
    if found := behind(encoder, kept, text[kept.length :]):
        return found
    tokens, ends = encoder.with_ends(text)  # the same, but slower
    if not np.array_equal(tokens[: len(kept.tokens)], kept.tokens):
        # Stored contexts outlive releases of this package and changes of the model's folder.
        raise RequestError(
            "the tokenizer makes other tokens of this context than when it was made: send the "
            "whole text again",
            param="context",
        )
    return tokens, ends


def behind(encoder: PromptEncoder, kept: KeptText, rest: str) -> tuple[Ints, Ints] | None:
    """As `continued`, from the ``rest`` of the text; None if the tokens before the cut differ."""
    tokens, ends = kept.tokens, kept.ends
    first = max(0, kept.cut - _AGAIN_CHARACTERS)
    new, where = encoder.with_ends(kept.end + rest)
    at = np.flatnonzero(where == kept.cut - first)
    if len(at):
        count = int(at[-1]) + 1
        same = min(_SAME_TOKENS, len(tokens), count)
        if new[count - same : count].tolist() == tokens[len(tokens) - same :].tolist():
            return (
                np.concatenate([tokens, new[count:]]),
                np.concatenate([ends, where[count:] + np.int32(first)]),
            )
    return None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
