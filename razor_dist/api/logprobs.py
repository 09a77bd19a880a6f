"""Log-probabilities in the shapes of OpenAI's chats and completions, and prompts as pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from razor_dist.frontend.answers import Choice
from razor_dist.frontend.assembler import TextPiece, decode_one, token_logprobs
from razor_dist.frontend.detokenizer import REPLACEMENT, Detokenizer
from razor_dist.frontend.outputs import Logprob, TokenLogprobs

Json = dict[str, Any]
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
# Bytes by the characters that stand for them in byte-level BPE (GPT-2's).
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, pieces: Sequence[TextPiece]
) -> Json | None:
    """``choices[].logprobs`` of a chat completion; ``None`` unless they were asked for."""
    content = []
    for piece in pieces:
        if piece.logprobs is None:
            return None
        # An entry without a rank is the chosen token, if it is not among the likeliest.
        top = [(t, lp) for t, lp in piece.logprobs.items() if lp.rank is not None]
        entry = _chat_entry(tokenizer, piece.token, piece.logprobs[piece.token])
        content.append({**entry, "top_logprobs": [_chat_entry(tokenizer, *item) for item in top]})
    return {"content": content, "refusal": None}


def prompt_pieces(
    tokenizer: PreTrainedTokenizerBase | None, choice: Choice, *, free: bool
) -> Iterator[TextPiece]:
    """Yield a prompt's tokens as pieces, with log-probabilities if the engine has sent them.

    The first token has an empty mapping, since nothing comes before it. Log-probabilities take
    kilobytes a token, so pieces are made one by one, and with ``free`` the engine's entry for a
    token is dropped once its piece is made.
    """
    entries, last = choice.prompt_entries, len(choice.prompt) - 1
    detokenizer = None if tokenizer is None else Detokenizer(tokenizer, begins=True)
    for at, token in enumerate(choice.prompt.tolist()):
        own: TokenLogprobs | None = {} if entries else None
        if entries and at:
            logprob, rank, top = entries[at]
            own = token_logprobs(tokenizer, token, logprob, top, rank)
            entries[at] = None if free else entries[at]
        text, offset = "", 0
        if detokenizer is not None:
            offset = detokenizer.length
            text = detokenizer.push(token) + (detokenizer.flush() if at == last else "")
        yield TextPiece(token, text, own, offset=offset)


def legacy_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, pieces: Iterable[TextPiece]
) -> Json | None:
    """``choices[].logprobs`` of a completion; tokens are ``token_id:17`` without a tokenizer."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[Json | None] = []
    offsets: list[int] = []
    known = True
    for piece in pieces:  # no early end: the caller notes them all
        known = known and piece.logprobs is not None
        if not known or piece.logprobs is None:
            continue
        offsets.append(piece.offset)
        own = piece.logprobs.get(piece.token)
        first = own is None  # a prompt's first token has none
        own = own or Logprob(0.0, None, decode_one(tokenizer, piece.token))
        tokens.append(_legacy_spell(tokenizer, piece.token, own))
        chosen.append(None if first else _finite(own))
        found: Json = {}
        for token, logprob in piece.logprobs.items():  # the likeliest first
            found.setdefault(_legacy_spell(tokenizer, token, logprob), _finite(logprob))
        top.append(None if first else found)
    if not known:
        return None
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _chat_entry(tokenizer: PreTrainedTokenizerBase | None, token: int, logprob: Logprob) -> Json:
    text = _spell(token, logprob)
    spelt = token_bytes(tokenizer, token, text)
    return {"token": text, "logprob": _finite(logprob), "bytes": spelt}


def _finite(logprob: Logprob) -> float:
    # JSON has no infinity; in OpenAI's API this value stands for a probability of 0.
    return max(logprob.logprob, -9999.0)


def _spell(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _legacy_spell(tokenizer: PreTrainedTokenizerBase | None, token: int, logprob: Logprob) -> str:
    r"""Return a token's text; for a part of a character its bytes: ``bytes:\xe4\xb8``."""
    text = _spell(token, logprob)
    if REPLACEMENT not in text or (spelt := token_bytes(tokenizer, token, text)) is None:
        return text
    return "bytes:" + "".join(chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in spelt)


def token_bytes(
    tokenizer: PreTrainedTokenizerBase | None, token: int, text: str
) -> list[int] | None:
    """Return the bytes of a token, decoded as ``text``; ``None`` if they are unknown."""
    if tokenizer is None:
        return None
    if REPLACEMENT not in text:
        return list(text.encode("utf-8"))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback:
        return [int(fallback[1], 16)]
    return [_BYTES[c] for c in piece] if all(c in _BYTES for c in piece) else None
