"""The results of a finished request, with the names vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of one token's probability before temperature and top-p."""

    logprob: float
    rank: int | None = None  # 1 for the likeliest; None if it is not among those asked for
    decoded_token: str | None = None  # None for a model without a tokenizer


# The chosen token and the likeliest ones, by token id, likeliest first.
TokenLogprobs = dict[int, Logprob]


@dataclass
class RequestMetrics:
    """Seconds of one request, from its submission on.

    Only prefill is counted from the beginning of the first chunk to the end of the last; it
    includes other requests' steps in between.
    """

    prefill_seconds: float | None = None
    time_to_first_token: float | None = None
    total_seconds: float | None = None


@dataclass(frozen=True)
class Source:
    """A passage of a prompt that an answer came from.

    ``start`` and ``end`` count characters of a message or of a text, or tokens if the prompt was
    token ids.
    """

    start: int
    end: int
    weight: float  # in [0, 1]: share of the attention to text that may be a source
    text: str | None = None  # None for a model without a tokenizer
    message: int | None = None  # the message's index in a conversation


@dataclass(frozen=True)
class AnswerSentence:
    """A sentence of an answer, in characters of its text, and where it came from.

    ``sources`` and ``grounded`` are as in `CompletionOutput`, for the sentence's tokens alone.
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
    token_ids: list[int] = field(default_factory=list)  # with the token that ended the answer
    cumulative_logprob: float | None = None  # sum over token_ids
    logprobs: list[TokenLogprobs] | None = None  # one entry per token of token_ids
    finish_reason: str | None = None  # "stop", "length" or "repetition"; None before the end
    # The stop string or stop token that ended the answer; None at an end-of-sequence token.
    stop_reason: str | int | None = None
    # With ``return_sources``, at the answer's end: passages, the heaviest first, empty if
    # ``grounded`` is low; and, in [0, 1], the share of the attention to text that may be a source
    # which each token gave to a single passage. None for an answer of one token.
    sources: list[Source] | None = None
    grounded: float | None = None
    # In [0, 1]: how well the heaviest source has the question's words, beside the passage that has
    # them best. None without sources, or if no passage has any of the words.
    question_match: float | None = None
    sentences: list[AnswerSentence] | None = None  # the sentences that have ended


@dataclass
class RequestOutput:
    """A prompt and what was generated for it."""

    request_id: str  # unique in the process
    prompt: str | None  # the text, if the prompt was text
    prompt_token_ids: list[int]  # as the engine got them, without a prefix's
    # One entry per token of the prompt, the first None; None unless asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)  # `SamplingParams.n` answers
    finished: bool = False  # False while `LLM.stream` yields it
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0  # found in the caches, a prefix's included
