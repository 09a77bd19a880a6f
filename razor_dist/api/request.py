"""A request between its body and the engine: its limits, and its parsed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from razor_dist.api.annotations import Title
from razor_dist.api.contexts import KeptContext
from razor_dist.api.tools import ToolUse
from razor_dist.config.errors import RequestError
from razor_dist.frontend.prompts import Checked, PromptLimits
from razor_dist.protocol.sampling_params import SamplingDefaults

Endpoint = Literal[
    "chat", "completions", "responses", "messages", "count_tokens", "tokenize", "detokenize"
]


class Limits(NamedTuple):
    """Limits of requests, from the model's sizes and the server's settings."""

    model: str
    max_prompts: int
    prompt: PromptLimits
    defaults: SamplingDefaults
    room: int | None = None  # answers for which the queue has room now; None is no limit
    pins: bool = False  # True if contexts are kept
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    # Log-probabilities of a request's prompt tokens, those of likelier tokens included.
    most_logprobs: int | None = None

    def check_model(self, name: str) -> None:
        """Raise `RequestError` (``model_not_found``) unless ``name`` is the served model."""
        if name != self.model:
            raise no_such_model(name, self.model)

    def check_count(self, prompts: int, n: int | None) -> None:
        """Raise `RequestError` if ``prompts`` prompts with ``n`` answers each exceed the limit."""
        count, param, what = prompts * (n or 1), "n", "answers"
        if prompts > 1:
            param, what = "prompt", "prompts" if n in (None, 1) else "prompts times n"
        if count > self.max_prompts:
            raise RequestError(
                f"{param} must ask for at most {self.max_prompts} {what}, got {count}", param=param
            )
        if self.room is not None and count > self.room:
            raise RequestError(
                f"the queue has room for {self.room} {what} now, got {count}; try again later",
                param=param,
                code="queue_full",
            )

    def check_logprobs(self, prompts: Sequence[Checked]) -> None:
        """Raise `RequestError` (``answer_too_large``) for too many ``prompt_logprobs``."""
        count = sum(
            params.n * len(tokens) * (1 + params.prompt_logprobs)
            for tokens, params, _ in prompts
            if params.prompt_logprobs is not None
        )
        if self.most_logprobs is not None and count > self.most_logprobs:
            raise RequestError(
                f"echo with logprobs would answer {count} log-probabilities of prompt tokens, and "
                f"one request may ask for {self.most_logprobs} (--max-total-body-mb); lower "
                "logprobs, or send less in one request",
                param="logprobs",
                code="answer_too_large",
            )


@dataclass(frozen=True)
class ParsedRequest:
    """A request as the engine gets it, with all that shapes its answers."""

    prompts: list[Checked]  # each has its own answers
    stream: bool = False
    include_usage: bool = False
    return_progress: bool = False
    timeout: float | None = None  # seconds from its arrival
    echo: bool = False  # the answers begin with their prompts
    prompt_only: bool = False  # and end there, since ``max_tokens`` is 0
    tools: ToolUse | None = None  # that the answers may call
    # Fields that an answer of /v1/responses repeats, or documents that /v1/messages may cite.
    described: dict[str, Any] | None = None
    answer: bytes | None = None  # as JSON, if nothing is to be generated
    cache_salt: str | None = None  # requests with different salts share no caches
    cache_prompt: bool = True  # as in `Add`
    continuous_usage: bool = False  # every chunk of a stream has the counts so far
    ignored: Sequence[str] = ()  # fields that are not supported, with ``unknown_fields: warn``
    # The request's names of fields by the engine's, for errors.
    names: Mapping[str, str] = field(default_factory=dict)
    return_sources: bool = True  # False if sources are only for annotations or citations
    titles: Sequence[Title] | None = None  # for annotations; None if these are not wanted
    # PDF files that must be read before the request is, each behind the field that holds it.
    unread: Sequence[tuple[str, bytes]] = ()
    context: str | None = None  # a name that must be found before the request is read
    ends_in_repetition: bool = False  # asked for, so that the client knows this reason
    # Returns the contexts that it uses, as they stand in answers.
    kept_as: Callable[[], list[dict[str, Any]]] | None = None
    contexts: Sequence[KeptContext] = ()  # to keep of the prompt, the shortest first
    # Fields of a call's item in /v1/responses, by the name that the model calls the tool by.
    called: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def no_such_model(name: str, served: str) -> RequestError:
    return RequestError(
        f"the model {name!r} does not exist; this server serves {served!r}",
        param="model",
        code="model_not_found",
    )
