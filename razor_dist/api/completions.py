"""Requests of OpenAI's ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, TypeGuard

from pydantic import PlainValidator, WithJsonSchema

from razor_dist.api.contexts import KeptContext
from razor_dist.api.field_types import Int, in_range
from razor_dist.api.fields import renamed
from razor_dist.api.schema import UNLIMITED, GenerateBody
from razor_dist.config.errors import RequestError
from razor_dist.frontend.kept import Ints, behind
from razor_dist.frontend.passages import PromptText
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.protocol.sampling_params import SamplingDefaults, SamplingParams

_COMPLETION_TOKENS = 16  # OpenAI's default


def _prompts(value: object) -> list[str | list[int]]:
    # Not by pydantic, which would report each of a million token ids as "not a string".
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and value:
        are_texts = all(isinstance(p, str) for p in value)
        if are_texts or all(_is_tokens(p) for p in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of such lists, "
        "none of them empty"
    )


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    # type(), because True is an instance of int.
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


class CompletionBody(GenerateBody):
    asks_in = "prompt"
    # As a list: one prompt or several, each answered by a choice of its own.
    # Its schema depends on the model (`razor_dist.api.openapi`).
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema({})]
    max_tokens: Annotated[Int, in_range("max_tokens", low=0)] | None = None
    logprobs: Annotated[Int, in_range("logprobs")] | None = None
    echo: bool | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)

    def tool_use(self, encoder: PromptEncoder) -> None:
        """None: only a chat has tools."""

    def encoded(
        self, encoder: PromptEncoder, max_model_len: int, *, ends: bool, keeps: bool = False
    ) -> Iterator[tuple[Sequence[int] | Ints, PromptText | None]]:
        """As `ChatBody.encoded`; a prompt of token ids has no text."""
        for prompt in self.prompt:
            if isinstance(prompt, str):
                encoder.check_length(prompt, max_model_len, "prompt")
            if self._kept is not None:
                yield self._behind(encoder, self._kept, prompt), None
            elif not isinstance(prompt, str):
                yield prompt, None
            elif ends:
                yield encoder.text_with_ends(prompt)
            else:
                yield encoder.text(prompt), None

    def _behind(self, encoder: PromptEncoder, kept: KeptContext, prompt: str | list[int]) -> Ints:
        if not isinstance(prompt, str) or self.return_sources:
            what = "return_sources" if isinstance(prompt, str) else "a prompt of token ids"
            raise RequestError(f"{what} is not allowed with context", param="context")
        found = behind(encoder, kept.text, prompt)
        if found is None:
            raise RequestError(
                "the prompt cannot be tokenised behind its context; send the whole text instead",
                param="context",
            )
        return found[0]

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling settings; without a limit for 16 tokens, OpenAI's default here.

        With ``echo`` and a limit of 0, one token is generated and not shown.
        """
        field, limit = self.limit
        if limit is None:
            limit = _COMPLETION_TOKENS
        elif (field, limit) == UNLIMITED:
            limit = None
        elif limit == 0:
            limit = int(bool(self.echo))
        with renamed({"max_tokens": field}):
            params = self._sampling(limit, self.logprobs, defaults)
        return replace(params, prompt_logprobs=self.logprobs) if self.echo else params
