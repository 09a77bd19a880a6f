"""Tokens to text, piece by piece: no character is ever split, no stop string leaks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# A UTF-8 character misses at most three of its bytes, each shown as one replacement character.
_MAX_PENDING = 3
# Tokens kept for the next decoding, and the number of tokens at which older ones are let go.
_KEEP, _TRIM_AT = 6, 16
# A byte of a character that is not in the vocabulary, as SentencePiece's byte fallback spells it.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class TokenTexts:
    """A tokenizer's decoder, for tokens that continue a text.

    Decoders of SentencePiece's kind drop the space before the first token, which is right for a
    whole text and wrong for an answer or for one token of it. So tokens are decoded behind an
    anchor, a token of one letter, whose letter is then taken away.
    """

    tokenizer: PreTrainedTokenizerBase
    special: Mapping[int, str]  # left out of texts, each with how it is written
    bytes: frozenset[int]  # of byte fallback
    anchor: tuple[int, ...]  # none if the decoder puts spaces between tokens by itself

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, begins: bool = False) -> str:
        """Return the text of tokens, with which a text ``begins`` or which continue one."""
        anchor = () if begins else self.anchor
        # Cleaning up spaces looks back across tokens, which no incremental decoder can honour.
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

    The pieces returned by `push` and `flush`, joined, are what the tokens add to a text that they
    continue: ``decode(prompt + ids)`` less ``decode(prompt)``. If a text ``begins`` with them, they
    are ``decode(ids)``.
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
        self._ids: list[int] = []  # the tail of the sequence; what came before is settled
        self._text = ""  # its text, but for a run of byte tokens at its end
        self._sent = 0  # characters of it already returned
        self.length = 0  # characters returned since the beginning

    def push(self, token: int) -> str:
        """Append one token and return the text that is now certain."""
        if self.skips(token):
            return self._end_of_bytes()
        self._ids.append(token)
        if token in self._texts.bytes:
            # Nothing of a run of byte tokens is certain until it has ended: it is decoded as a
            # whole, and one byte that does not fit makes replacement characters of all of them.
            return ""
        self._text = self._decode(self._ids)
        certain = len(self._text)
        least = max(0, certain - _MAX_PENDING)
        while certain > least and self._text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = self._text[self._sent : certain]
        self._sent = max(self._sent, certain)
        self.length += len(piece)
        if len(self._ids) >= _TRIM_AT:
            self._trim()
        return piece

    def _end_of_bytes(self) -> str:
        """Return the characters of a run of byte tokens that ends here, if they are whole."""
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
        """True for a special token that the text leaves out."""
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
        """Forget the oldest tokens, if the rest decodes to the same text without them."""
        ids = self._ids[-_KEEP:]
        text = self._texts.decode(ids, skip_special=self._skip_special)
        unsent = len(self._text) - self._sent
        # More characters than a partial one has bytes must stand between the cut and what is
        # unsent, so that later tokens cannot change how the cut falls.
        if self._text.endswith(text) and len(text) > unsent + _MAX_PENDING:
            self._ids, self._text, self._sent = ids, text, len(text) - unsent
            self._begins = False


class StopMatcher:
    """Ends a text at the first stop string, however the text is cut into pieces.

    The match that is complete first wins; of two that end together, the longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.rest = ""  # what followed the stop string in its piece

    def push(self, piece: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Add a piece; return the text that is safe to show and the stop string, if one came.

        A stop string that ends in a piece without ``may_end`` is text; one that only begins there
        is matched with what follows, so its beginning is held back all the same.
        """
        if not self._stops:
            return piece, None
        text, old = self._held + piece, len(self._held)
        # A stop string that ends in what was held came without ``may_end``.
        found = ((text.find(s, max(0, old + 1 - len(s))), s) for s in self._stops)
        matches = [(begin + len(s), -len(s), s) for begin, s in found if begin >= 0]
        if matches and may_end:
            end, _, stop = min(matches)
            self._held, self.rest = "", text[end:]
            return text[: end - len(stop)], stop
        # The longest end of the text that may begin a stop string.
        longest = min(max(map(len, self._stops)) - 1, len(text))
        ends = (text[-length:] for length in range(longest, 0, -1))
        self._held = next((end for end in ends if any(s.startswith(end) for s in self._stops)), "")
        return text.removesuffix(self._held), None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
