"""Tokens to text, piece by piece, without split characters and leaked stop strings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character has at most three bytes, each shown as a replacement character.
_MAX_PENDING = 3
# From `_TRIM_TOKENS` on, all but the last `_LAST_TOKENS` are dropped before the next decoding.
_TRIM_TOKENS, _LAST_TOKENS = 16, 6
# A byte of a character that is not in the vocabulary, as SentencePiece's byte fallback spells it.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class TokenTexts:
    """A tokenizer's decoder, for tokens that continue a text.

    SentencePiece's decoders drop the space before the first token, which is right for a whole text
    and wrong for an answer. So tokens are decoded behind an *anchor*, a token of one letter, which
    is then removed.
    """

    tokenizer: PreTrainedTokenizerBase
    special: Mapping[int, str]  # special tokens, which texts leave out, and how they are written
    bytes: frozenset[int]  # tokens of byte fallback
    anchor: tuple[int, ...]  # empty if the decoder puts spaces between tokens by itself

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, begins: bool = False) -> str:
        """Return the text of tokens that continue a text, or with which a text ``begins``."""
        anchor = () if begins else self.anchor
        # Cleaning up spaces changes earlier tokens' text, which was sent already.
        text = self.tokenizer.decode(
            [*anchor, *ids],
            skip_special_tokens=skip_special,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text[len(anchor) :]


@lru_cache(maxsize=4)
def token_texts(tokenizer: PreTrainedTokenizerBase) -> TokenTexts:
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    vocabulary = tokenizer.get_vocab()
    in_bytes = frozenset(i for t, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(t))
    plain = TokenTexts(tokenizer, special, in_bytes, ())
    for letter in "aeion":
        anchor = vocabulary.get(letter)
        if anchor is not None and plain.decode([anchor, anchor]) == 2 * letter:
            return replace(plain, anchor=(anchor,))
    return plain


class Detokenizer:
    """Decodes one growing token sequence at a constant cost per token.

    The pieces from `push` and `flush` together are ``decode(prompt + ids)`` without
    ``decode(prompt)``, or ``decode(ids)`` if a text ``begins`` with the tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special: bool = True,
        begins: bool = False,
    ) -> None:
        self._skip_special, self._begins = skip_special, begins
        self._texts = token_texts(tokenizer)
        self._ids: list[int] = []  # the last tokens; the text of earlier ones has been returned
        self._text = ""  # of ``_ids``, without a run of byte tokens at the end
        self._sent = 0  # characters of ``_text`` already returned
        self.length = 0  # characters returned since the beginning

    def push(self, token: int) -> str:
        """Append one token and return the text that is now certain."""
        if self.skips(token):
            return self._end_of_bytes()
        self._ids.append(token)
        if token in self._texts.bytes:
            # A run of byte tokens is decoded as a whole: until it has ended, no character is
            # certain, since one invalid byte makes replacement characters of all.
            return ""
        self._text = self._decode(self._ids)
        certain = len(self._text)
        least = max(0, certain - _MAX_PENDING)
        while certain > least and self._text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = self._text[self._sent : certain]
        self._sent = max(self._sent, certain)
        self.length += len(piece)
        if len(self._ids) >= _TRIM_TOKENS:
            self._trim()
        return piece

    def _end_of_bytes(self) -> str:
        """Return the text of a run of byte tokens that ends here; empty if it is invalid."""
        if not self._ids or self._ids[-1] not in self._texts.bytes:
            return ""
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[self._sent :]
        self._ids, self._text, self._sent, self._begins = [], "", 0, False
        self.length += len(piece)
        return piece

    def skips(self, token: int) -> bool:
        """True for a special token if the text leaves these out."""
        return self._skip_special and token in self._texts.special

    def flush(self) -> str:
        self._text = self._decode(self._ids)
        piece = self._text[self._sent :]
        self._sent = len(self._text)
        self.length += len(piece)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._texts.decode(ids, skip_special=self._skip_special, begins=self._begins)

    def _trim(self) -> None:
        """Drop the oldest tokens, if the others decode to the same text without them."""
        ids = self._ids[-_LAST_TOKENS:]
        text = self._texts.decode(ids, skip_special=self._skip_special)
        unsent = len(self._text) - self._sent
        # More characters than an incomplete one has bytes must lie between the cut and the unsent
        # text, so that later tokens cannot change the text at the cut.
        if self._text.endswith(text) and len(text) > unsent + _MAX_PENDING:
            self._ids, self._text, self._sent = ids, text, len(text) - unsent
            self._begins = False


class StopMatcher:
    """Ends a text at the first stop string, however the text is cut into pieces.

    The match that ends first wins; of two that end together, the longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.rest = ""  # what followed the stop string in its piece

    def push(self, piece: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Add a piece; return the text that is safe to show, and the stop string if one was found.

        Without ``may_end`` a stop string that ends in the piece is text; the beginning of a stop
        string is held back all the same, since it may end in a later piece.
        """
        if not self._stops:
            return piece, None
        text, old = self._held + piece, len(self._held)
        # A stop string that ends in the held text is text: it ended without ``may_end``.
        found = ((text.find(s, max(0, old + 1 - len(s))), s) for s in self._stops)
        matches = [(begin + len(s), -len(s), s) for begin, s in found if begin >= 0]
        if matches and may_end:
            end, _, stop = min(matches)
            self._held, self.rest = "", text[end:]
            return text[: end - len(stop)], stop
        # Hold back the longest end of the text that may begin a stop string.
        longest = min(max(map(len, self._stops)) - 1, len(text))
        ends = (text[-length:] for length in range(longest, 0, -1))
        self._held = next((end for end in ends if any(s.startswith(end) for s in self._stops)), "")
        return text.removesuffix(self._held), None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
