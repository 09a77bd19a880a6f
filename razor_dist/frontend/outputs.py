"""The results of a finished request, with the names vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of one token's probability before temperature and top-p."""

    logprob: float
    rank: int | None = None  # 1 for the likeliest; None if it is not among those asked for
    decoded_token: str | None = None  # None for a model without a tokenizer


# The chosen token and the likeliest ones, by token id, likeliest first.
TokenLogprobs = dict[int, Logprob]


@dataclass
class RequestMetrics:
    """Times of one request: prefill without its waiting, the others since submission.

    Prefill lasts from the beginning of the first chunk to the end of the last, including steps of
    other requests in between.
    """

    prefill_seconds: float | None = None
    time_to_first_token: float | None = None
    total_seconds: float | None = None


@dataclass(frozen=True)
class Source:
    """A passage of a prompt that an answer came from.

    ``start`` and ``end`` count characters of the message ``message``, or of a prompt that is text;
    tokens, of one that is token ids.
    """

    start: int
    end: int
    weight: float  # in [0, 1]: the share of what the answer's tokens looked up that is here
    text: str | None = None  # None for a model without a tokenizer
    message: int | None = None  # its index in a conversation


@dataclass(frozen=True)
class AnswerSentence:
    """A sentence of an answer, in characters of its text, and where it came from.

    ``sources`` and ``grounded`` are those of `CompletionOutput`, of the sentence's tokens alone.
    """

    start: int
    end: int
    sources: list[Source]
    grounded: float | None


@dataclass
class CompletionOutput:
    """One generated answer, or as much of it as there is; what was not asked for is ``None``."""

    index: int = 0  # among the answers to its prompt
    # Without the stop string, end-of-sequence or stop token that ended it; empty for a model
    # without a tokenizer.
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # with the one that ended the answer
    cumulative_logprob: float | None = None  # sum over token_ids
    logprobs: list[TokenLogprobs] | None = None  # one entry per token of token_ids
    finish_reason: str | None = None  # "stop", "length" or "repetition"; None before the end
    # The stop string or stop token that ended the answer; None at an end-of-sequence token.
    stop_reason: str | int | None = None
    # With ``return_sources``, once the answer has ended: passages, the heaviest first, none if
    # little was found; and the share of what was looked up, in [0, 1], that each token found in one
    # of them. None for an answer of one token.
    sources: list[Source] | None = None
    grounded: float | None = None
    # How well the heaviest source has the question's words, of 1 for the passage that has them
    # best; None without sources, or if no passage has any.
    question_match: float | None = None
    sentences: list[AnswerSentence] | None = None  # those that have ended


@dataclass
class RequestOutput:
    """A prompt and what was generated for it."""

    request_id: str  # unique in the process
    prompt: str | None  # the text, if the prompt was text
    prompt_token_ids: list[int]  # as the engine got them, without those of a prefix
    # One entry per token of the prompt, the first None; None unless asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)  # `SamplingParams.n` answers
    finished: bool = False  # False while `LLM.stream` yields it
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    # Not read for it, for they were in the caches; those of a prefix included.
    num_cached_tokens: int = 0
