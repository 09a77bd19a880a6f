"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.detokenizer import REPLACEMENT
from razor_dist.frontend.outputs import Logprob

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, pieces: Sequence[TextPiece]
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat completion; ``None`` unless they were asked for."""
    content = []
    for piece in pieces:
        if piece.logprobs is None:
            return None
        # An entry without a rank is the chosen token itself, unlikelier than those asked for.
        top = [(t, lp) for t, lp in piece.logprobs.items() if lp.rank is not None]
        entry = _chat_entry(tokenizer, piece.token, piece.logprobs[piece.token])
        content.append({**entry, "top_logprobs": [_chat_entry(tokenizer, *item) for item in top]})
    return {"content": content, "refusal": None}


def legacy_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, pieces: Sequence[TextPiece]
) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a completion; ``None`` unless they were asked for.

    Without a tokenizer a token is spelt ``token_id:17``.
    """
    tokens, chosen, top = [], [], []
    for piece in pieces:
        if piece.logprobs is None:
            return None
        tokens.append(_spell(piece.token, piece.logprobs[piece.token]))
        chosen.append(_finite(piece.logprobs[piece.token]))
        top.append({_spell(t, lp): _finite(lp) for t, lp in piece.logprobs.items()})
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": [piece.offset for piece in pieces],
    }


def _chat_entry(
    tokenizer: PreTrainedTokenizerBase | None, token: int, logprob: Logprob
) -> dict[str, Any]:
    text = _spell(token, logprob)
    spelt = token_bytes(tokenizer, token, text)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelt}


def _finite(logprob: Logprob) -> float:
    # JSON has no infinity; OpenAI writes this value for a vanishing probability.
    return max(logprob.logprob, -9999.0)


def _spell(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def token_bytes(
    tokenizer: PreTrainedTokenizerBase | None, token: int, text: str
) -> list[int] | None:
    """Return the bytes of a token, which may be part of a character only; ``None`` if unknown.

    ``text`` is the token decoded by itself.
    """
    if tokenizer is None:
        return None
    if REPLACEMENT not in text:
        return list(text.encode("utf-8"))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback:
        return [int(fallback[1], 16)]
    table = _byte_level_alphabet()
    return [table[c] for c in piece] if all(c in table for c in piece) else None


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character that byte-level BPE (GPT-2's) writes.

    Printable Latin-1 characters stand for themselves, the other bytes for the characters from
    U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}
