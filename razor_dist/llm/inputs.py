"""Arguments of the offline API: prompts, conversations, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from razor_dist.config.errors import RequestError
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.llm.prefix import Prefix

Prompt = str | Sequence[int] | Mapping[str, str | Sequence[int]]
Conversation = Sequence[Mapping[str, Any]]


class Encoded(NamedTuple):
    text: str | None
    ids: list[int]


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Conversation", messages)]
    return list(cast("Sequence[Conversation]", messages))


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts; `RequestError` unless one or as many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params must be one or as many as the prompts: {len(params)} for {count}",
            param="sampling_params",
        )
    return list(params)


def encode(encoder: PromptEncoder, prompt: Prompt, prefix: Prefix | None = None) -> Encoded:
    """Return a prompt as token ids; what continues a prefix gets no special tokens.

    Raises `RequestError` if it is not a prompt, or a text for a model without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(
                "a prompt given as a mapping has one key, prompt (a text) or "
                f"prompt_token_ids, not {set(prompt)}",
                param="prompt",
            )
        [(key, prompt)] = prompt.items()
        if isinstance(prompt, str) != (key == "prompt"):
            raise RequestError(f"{key} cannot hold {prompt!r:.80}", param=key)
    if isinstance(prompt, str):
        if prefix is None:
            return Encoded(prompt, encoder.text(prompt))
        return Encoded(prompt, encoder.continuation(prefix.border, prompt))
    if not isinstance(prompt, Sequence) or not all(isinstance(t, int) for t in prompt):
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {prompt!r:.80}", param="prompt"
        )
    return Encoded(None, [int(token) for token in prompt])


def encode_chat(
    encoder: PromptEncoder, messages: Conversation, prefix: Prefix | None, /, **template: Any
) -> Encoded:
    """Return a conversation as token ids; with a prefix, of what is beyond it.

    Raises `RequestError` if the chat template refuses it, or it does not begin as the prefix does.
    """
    if prefix is None:
        return Encoded(None, encoder.chat(messages, **template))
    rest = prefix.rest_of(encoder.chat_text(messages, **template))
    return Encoded(None, encoder.continuation(prefix.border, rest))
