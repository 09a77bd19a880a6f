"""Tokens to text, piece by piece: no character is ever split, no stop string leaks."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
# A UTF-8 character misses at most three of its bytes, each shown as one replacement character.
_MAX_PENDING = 3
# Tokens kept as context (some decoders treat the first token of a sequence differently), and the
# number of tokens at which older ones are let go.
_KEEP, _TRIM_AT = 6, 16


class Detokenizer:
    """Decodes one growing token sequence at a constant cost per token.

    The pieces returned by `push` and `flush`, joined, equal
    ``tokenizer.decode(all_ids, skip_special_tokens=True)`` for byte-level tokenizers.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._ids: list[int] = []  # the tail of the sequence; what came before is settled
        self._text = ""  # its text
        self._sent = 0  # characters of it already returned

    def push(self, token: int) -> str:
        """Append one token; returns the text that is now certain, often one token's worth."""
        if token in self._special:
            return ""
        self._ids.append(token)
        self._text = self._decode(self._ids)
        certain = len(self._text)
        least = max(0, certain - _MAX_PENDING)
        while certain > least and self._text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = self._text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if len(self._ids) >= _TRIM_AT:
            self._trim()
        return piece

    def flush(self) -> str:
        """The text still held back, at the end of the sequence."""
        piece = self._text[self._sent :]
        self._sent = len(self._text)
        return piece

    def _trim(self) -> None:
        """Forget the oldest tokens, if the rest decodes to the same text without them."""
        ids = self._ids[-_KEEP:]
        text = self._decode(ids)
        unsent = len(self._text) - self._sent
        # Once more characters than a partial one can have bytes stand between the cut and what is
        # unsent, later tokens cannot change how the cut falls.
        if self._text.endswith(text) and len(text) > unsent + _MAX_PENDING:
            self._ids, self._text, self._sent = ids, text, len(text) - unsent

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces looks back across tokens, which no incremental decoder can honour.
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopMatcher:
    """Ends a text at the first stop string, however the text is cut into pieces.

    The match that is complete first wins; of two that end together, the longer one.

    Parameters
    ----------
    stops : sequence of str
        Non-empty strings; none matches nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece; returns the text that is safe to show and the stop string if one came."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        matches = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if matches:
            end, _, stop = min(matches)
            self._held = ""
            return text[: end - len(stop)], stop
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string may begin with."""
        longest = max(len(s) for s in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stops):
                return length
        return 0
