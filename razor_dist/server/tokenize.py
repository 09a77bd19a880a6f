"""vLLM's ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from razor_dist.config.errors import RequestError
from razor_dist.engine.messages import as_tokens
from razor_dist.frontend.detokenizer import token_texts
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.server.fields import ChatMessage, Strict, TemplateArguments
from razor_dist.server.schema import Int


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # of a prompt; a chat template writes its own
    add_generation_prompt: bool | None = None  # of messages
    chat_template_kwargs: TemplateArguments | None = None  # of messages
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("either prompt or messages must be given", param="prompt")
        for name, other in (
            ("add_special_tokens", "prompt"),
            ("add_generation_prompt", "messages"),
            ("chat_template_kwargs", "messages"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise RequestError(f"{name} is only allowed with {other}", param=name)

    def answer(self, encoder: PromptEncoder, max_model_len: int) -> dict[str, Any]:
        if self.messages is not None:
            generation = self.add_generation_prompt is not False
            messages = [message.for_template() for message in self.messages]
            arguments = self.chat_template_kwargs or {}
            tokens = encoder.chat(messages, **arguments, add_generation_prompt=generation)
        else:
            special = self.add_special_tokens is not False
            tokens = encoder.text(self.prompt or "", special_tokens=special)
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
    tokens: list[Int]

    def answer(self, encoder: PromptEncoder, vocab_size: int) -> dict[str, Any]:
        if encoder.tokenizer is None:
            raise RequestError("the model has no tokenizer", param="tokens")
        tokens = as_tokens(self.tokens, vocab_size, "tokens").tolist()
        text = token_texts(encoder.tokenizer).decode(tokens, skip_special=False)
        return {"prompt": text}
