"""Token messages to text: what a client sees of a request, one piece per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.frontend.detokenizer import Detokenizer, StopMatcher, token_texts
from razor_dist.frontend.outputs import AnswerSentence, Logprob, TokenLogprobs
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams


@dataclass(frozen=True)
class TextPiece:
    """One generated token and the text that it makes certain.

    ``offset`` is the number of characters of the answer before the token; tokens that are parts of
    one character, or of a run of bytes, share it.
    """

    token: int
    text: str  # often the token's, sometimes empty, sometimes several tokens'
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length" or "repetition" with the last piece
    stop_reason: str | int | None = None  # as in `CompletionOutput`
    offset: int = 0
    # With ``return_sources``: the sentences of which the token has shown that they have ended.
    sentences: Sequence[AnswerSentence] = ()
    accepted: bool = False  # as in `Token`
    rejected: int = 0


class Assembler:
    """Turns the tokens of one answer into pieces, without a tokenizer into pieces without text.

    Stop strings are matched here, since the engine knows token ids only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop)
        self._count = 0  # tokens so far

    def push(self, message: Token) -> TextPiece:
        """Return the piece of one token; the answer's last piece has a ``finish_reason``.

        If a stop string has ended the answer, the caller must close the request's stream: the
        engine does not know.
        """
        token, finish = message.token, message.finish
        offset = 0 if self._detokenizer is None else self._detokenizer.length
        self._count += 1
        may_end = self._count > self._params.min_tokens
        text, stop = self._stops.push(self._text(token, finish), may_end=may_end)
        stop_reason: str | int | None = stop
        if stop is not None:
            finish = "stop"
        elif finish is not None:
            text += self._stops.flush()
            if finish == "stop" and token in self._params.stop_token_ids:
                stop_reason = token
        elif self._detokenizer is not None and self._detokenizer.skips(token):
            # The token may begin a tool call: text before the call must not be sent behind it.
            text += self._stops.flush()
        logprobs = None
        if self._params.logprobs is not None and message.logprob is not None:
            logprobs = token_logprobs(self._tokenizer, token, message.logprob, message.top)
        drafted = (), message.accepted, message.rejected
        return TextPiece(token, text, logprobs, finish, stop_reason, offset, *drafted)

    def _text(self, token: int, finish: str | None) -> str:
        if self._detokenizer is None:
            return ""
        # The token that ended the answer does not belong to its text.
        text = "" if finish == "stop" else self._detokenizer.push(token)
        return text if finish is None else text + self._detokenizer.flush()


def token_logprobs(
    tokenizer: PreTrainedTokenizerBase | None,
    token: int,
    logprob: float,
    top: Sequence[Sequence[Any]],
    rank: int | None = None,
) -> TokenLogprobs:
    """Return the likeliest tokens ``top`` and the chosen ``token``, likeliest first.

    ``rank`` is that of the chosen token, if it is known and the token is not in ``top``.
    """
    entries = {t: Logprob(lp, n, decode_one(tokenizer, t)) for n, (t, lp) in enumerate(top, 1)}
    if token not in entries:
        entries[token] = Logprob(logprob, rank, decode_one(tokenizer, token))
    return entries


def prompt_logprobs(
    tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int], entries: Sequence[Any]
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities in ``prompt`` messages' entries, one per prompt token."""
    return [
        None if entry is None else token_logprobs(tokenizer, token, entry[0], entry[2], entry[1])
        for token, entry in zip(prompt, entries, strict=True)
    ]


def decode_one(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str | None:
    """Return the text of one token that continues a text; special tokens have theirs."""
    return None if tokenizer is None else token_texts(tokenizer).decode([token], skip_special=False)
