"""vLLM's ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast

from razor_dist.api.field_types import Int, TemplateArguments
from razor_dist.api.fields import Ending, Messages, Strict, Tool, check_contents
from razor_dist.api.request import Limits
from razor_dist.config.errors import RequestError
from razor_dist.frontend.detokenizer import token_texts
from razor_dist.frontend.prompts import MOST_CONTEXTS, PromptEncoder
from razor_dist.protocol.messages import as_tokens


class TokenizeBody(Ending):
    tool_types = ("function",)
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    # Of ``prompt``: a chat template writes its own.
    add_special_tokens: bool | None = None
    # Of ``messages``.
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("either prompt or messages must be given", param="prompt")
        if self.add_special_tokens is False and self.messages is not None:
            self.add_special_tokens = None  # no effect with messages
        for name, other in (
            ("add_special_tokens", "prompt"),
            ("tools", "messages"),
            ("add_generation_prompt", "messages"),
            ("continue_final_message", "messages"),
            ("chat_template_kwargs", "messages"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise RequestError(f"{name} is only allowed with {other}", param=name)
        check_contents(self.messages or [])
        self.check_ending()

    def answer(self, encoder: PromptEncoder, limits: Limits) -> dict[str, Any]:
        max_model_len = limits.prompt.max_model_len
        if self.messages is not None:
            messages = [message.for_template() for message in self.messages]
            arguments = {**(self.chat_template_kwargs or {}), **self.ending}
            if self.tools:
                arguments["tools"] = [one.model_dump(exclude_none=True) for one in self.tools]
            text = encoder.chat_text(messages, **arguments)
            _check_text(encoder, text, max_model_len, "messages")
            special = False  # the template has written them
        else:
            text, special = self.prompt or "", self.add_special_tokens is not False
            _check_text(encoder, text, max_model_len, "prompt")
        tokens = encoder.text(text, special_tokens=special)
        tokenizer = encoder.tokenizer
        strings = None
        if self.return_token_strs and tokenizer is not None:
            strings = tokenizer.convert_ids_to_tokens(tokens)
        return {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: Annotated[list[Int], FailFast()]

    @classmethod
    def check_length(cls, value: object, max_model_len: int) -> None:
        """Raise `RequestError` for a body with too many tokens, before each is checked."""
        tokens = value.get("tokens") if isinstance(value, dict) else None
        if isinstance(tokens, list) and len(tokens) > MOST_CONTEXTS * max_model_len:
            raise _too_many(f"{len(tokens)} token ids", max_model_len, "tokens")

    def answer(self, encoder: PromptEncoder, limits: Limits) -> dict[str, Any]:
        if encoder.tokenizer is None:
            raise RequestError("the model has no tokenizer", param="tokens")
        tokens = as_tokens(self.tokens, limits.prompt.vocab_size, "tokens").tolist()
        texts = token_texts(encoder.tokenizer)
        return {"prompt": texts.decode(tokens, skip_special=False, begins=True)}


def _check_text(encoder: PromptEncoder, text: str, max_model_len: int, param: str) -> None:
    if found := encoder.too_long(text, MOST_CONTEXTS * max_model_len):
        raise _too_many(found, max_model_len, param)


def _too_many(found: str, max_model_len: int, param: str) -> RequestError:
    return RequestError(
        f"{param}: {found}; at most {MOST_CONTEXTS * max_model_len} can be asked for at once, "
        f"{MOST_CONTEXTS} times this model's maximum context length",
        param=param,
        code="too_many_tokens",
    )
