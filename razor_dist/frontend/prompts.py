"""Prompts to tokens: text, chat messages or ready token ids; and whether they fit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.frontend.detokenizer import token_texts
from razor_dist.frontend.passages import Part, PromptText, conversation_parts, question_begin
from razor_dist.frontend.tool_template import ToolTemplate, tool_template
from razor_dist.protocol.messages import EngineInfo, Tokens, as_tokens, check_text
from razor_dist.protocol.sampling_params import SamplingParams

# A continuation's tokens are right if the last tokens before it come out again.
_SAME_TOKENS = 4
CONTEXT_EXCEEDED = "context_length_exceeded"
# Most tokens of a text that is tokenised at once, as a multiple of the maximum context length.
MOST_CONTEXTS = 4
# Up to this many tokens any prompt is tokenised: ``truncate_prompt_tokens`` may shorten it.
_ALWAYS_TOKENS = 1 << 20
# A long text's tokens are counted in pieces: the tokenizer takes some hundred bytes per token.
_PIECE_CHARACTERS = 1 << 16
# The rule for a message's content, in errors.
CONTENT = (
    'must be a string or a list of {"type": "text", "text": ...} parts; '
    "other kinds of content are not supported"
)


# Arguments of chat templates in jobs and evaluations. Without thinking, Qwen3 and others do not
# spend the answer's tokens on thoughts. With a fixed date instead of today's, Llama 3.2 and 3.3 get
# the same prompts in a run that goes on tomorrow.
JOB_TEMPLATE: Mapping[str, Any] = {"enable_thinking": False, "date_string": "26 Jul 2024"}


class PromptEncoder:
    """Makes token ids of texts and conversations; `RequestError` without a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def tools(self) -> ToolTemplate:
        """The form in which the chat template takes tools."""
        if not getattr(self.tokenizer, "chat_template", None):
            return ToolTemplate()
        return tool_template(partial(self._render, tokenize=False))

    def text_with_ends(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[list[int], PromptText]:
        """Return a text's tokens as `text` does, and where each ends."""
        ids, ends = self._encode(text, "prompt", special_tokens=special_tokens)
        return ids, PromptText([Part(text, 0, question_begin(text))], ends)

    def chat_with_ends(
        self, messages: Sequence[Mapping[str, Any]], /, **template: Any
    ) -> tuple[list[int], PromptText]:
        """Return a conversation's tokens as `chat` does, and where each ends in its messages."""
        text = self.chat_text(messages, **template)
        ids, ends = self._encode(text, "messages", special_tokens=False)
        return ids, PromptText(self.chat_parts(text, messages, **template), ends)

    def chat_parts(
        self, text: str, messages: Sequence[Mapping[str, Any]], /, **template: Any
    ) -> list[Part]:
        """Return where the messages' contents are in a conversation's ``text``."""
        contents = {
            index: message["content"]
            for index, message in enumerate(messages)
            if isinstance(message.get("content"), str) and message["content"].strip()
        }
        marks = {index: f"<content-{index}-{uuid.uuid4().hex}>" for index in contents}
        marked = [dict(message) for message in messages]
        for index, mark in marks.items():
            marked[index]["content"] = mark
        users = [index for index in contents if messages[index].get("role") == "user"]
        return conversation_parts(
            text, self.chat_text(marked, **template), marks, contents, users[-1] if users else -1
        )

    def _encode(
        self, text: str, param: str, *, special_tokens: bool
    ) -> tuple[list[int], npt.NDArray[np.int32]]:
        tokenizer = self._need("text prompts", param)
        check_text(text, param)
        encoded = tokenizer(text, add_special_tokens=special_tokens)
        if not encoded.encodings:
            raise RequestError(
                "return_sources and contexts need a tokenizer that knows where tokens are in a "
                "text; a model without a tokenizer.json has none",
                param=param if param == "messages" else "return_sources",
            )
        encoding = encoded.encodings[0]
        count = len(encoding)
        # One after the other: a list of a million pairs would take 120 MB.
        spans = map(encoding.token_to_chars, range(count))
        ends = np.fromiter((0 if span is None else span[1] for span in spans), np.int32, count)
        return encoded["input_ids"], ends

    @cached_property
    def knows_ends(self) -> bool:
        """False for a tokenizer in Python, which cannot tell where tokens are in a text."""
        return self.tokenizer is not None and bool(self.tokenizer("").encodings)

    def with_ends(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the tokens of a chat template's text, and where each ends: int32 ``[n]``."""
        ids, ends = self._encode(text, "messages", special_tokens=False)
        return np.array(ids, np.int32), ends

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; without ``special_tokens`` for a text that continues another."""
        tokenizer = self._need("text prompts", "prompt")
        check_text(text, "prompt")
        ids: list[int] = tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def check_length(self, text: str, max_model_len: int, param: str) -> None:
        """Raise `RequestError` for a prompt that is too long to be tokenised at once or no text."""
        check_text(text, param)
        most = max(_ALWAYS_TOKENS, MOST_CONTEXTS * max_model_len)
        if found := self.too_long(text, most):
            raise RequestError(
                f"this model's maximum context length is {max_model_len} tokens, and {param} is "
                f"longer: {found}; at most {most} are tokenised at once",
                param=param,
                code=CONTEXT_EXCEEDED,
            )

    def too_long(self, text: str, most: int) -> str | None:
        """Describe the beginning of a text that has more than ``most`` tokens; else return None.

        Tokenises pieces until the rest cannot have too many tokens, since a token has at least one
        byte of UTF-8. A token across two pieces may count twice, which is nothing beside ``most``.
        """
        if len(text) <= most // 4:  # a character has at most four bytes
            return None
        count, rest = 0, len(text.encode())
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            if count + rest <= most:
                return None
            piece = text[begin : begin + _PIECE_CHARACTERS]
            count += len(self.text(piece, special_tokens=False))
            rest -= len(piece.encode())
            if count > most:
                return f"its first {begin + len(piece)} characters alone are {count} tokens"
        return None

    def continuation(self, before: Sequence[int], text: str) -> list[int]:
        """Return the tokens of a text that continues another, which ends in the tokens ``before``.

        Some tokenizers, such as SentencePiece's, put a space before a text. So the text is
        tokenised behind the end of the other, or behind a line feed if a token would span both.
        """
        tokenizer = self._need("text prompts", "prompt")
        end = token_texts(tokenizer).decode(before, skip_special=False)
        for context in (end, "\n"):
            alone = self.text(context, special_tokens=False)
            both = self.text(context + text, special_tokens=False)
            same = len(alone) and both[: len(alone)] == alone
            # The end's first tokens may differ, since it is cut off there; its last must be equal.
            last = alone[-_SAME_TOKENS:]
            if same and (context is not end or last == list(before[-_SAME_TOKENS:])):
                return both[len(alone) :]
        return self.text(text, special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **template: Any) -> list[int]:
        """Return a conversation's tokens; `RequestError` if the template refuses it."""
        return self.text(self.chat_text(messages, **template), special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], /, **template: Any) -> str:
        """Return the text that `chat` tokenises, which has the special tokens."""
        text: str = self._apply_template(messages, tokenize=False, **template)
        return text

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], /, **arguments: Any) -> Any:
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        tokenizer = self._need("chat messages", "messages")
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError(
                "the model has no chat template; send a prompt to /v1/completions instead",
                param="messages",
            )
        if arguments.get("tools") or any(_is_of_tools(message) for message in messages):
            tools, own = self.tools, arguments.get("chat_template")
            if own is not None:  # the caller's
                tools = tool_template(partial(self._render, tokenize=False, chat_template=own))
            try:
                messages, arguments = tools.adapted(messages, arguments)
            except (KeyError, TypeError, AttributeError) as error:
                raise _refused(error) from error
        return self._render(messages, **arguments)

    def _render(self, messages: Sequence[Mapping[str, Any]], /, **arguments: Any) -> Any:
        tokenizer = self._need("chat messages", "messages")
        try:
            arguments = {"add_generation_prompt": True, **arguments}
            return tokenizer.apply_chat_template([dict(m) for m in messages], **arguments)
        except Exception as error:  # templates are programs: they may raise anything
            raise _refused(error) from error

    def _need(self, what: str, param: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError(
                f"the model has no tokenizer, so it takes no {what}; send token ids", param=param
            )
        return self.tokenizer


def _refused(error: Exception) -> RequestError:
    # Cut off: transformers may put the whole conversation into the error's message.
    why = f"the model's chat template refuses these messages: {error!s:.500}"
    return RequestError(why, param="messages")


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def for_template(message: Mapping[str, Any], where: str = "messages") -> dict[str, Any]:
    """Return a message as templates take it: content as a text, calls' arguments as objects.

    Raises `RequestError`, which says ``where`` the message is, if its content is no text.
    """
    read = dict(message)
    if read.get("role") == "developer":
        read["role"] = "system"  # OpenAI's new name, which templates do not know
    if "content" in read:
        read["content"] = _content(read["content"], where)
    if read.get("tool_calls"):
        read["tool_calls"] = [_with_arguments(call) for call in read["tool_calls"]]
    return read


def _content(content: object, where: str) -> str:
    """Return a content's text: a template would write a list of parts as Python's repr."""
    if isinstance(content, str | None):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content {CONTENT}", param="messages")
    return "".join(part["text"] for part in parts)


def _with_arguments(call: Any) -> Any:
    """Return a call with its arguments as an object; as they are if they are not valid JSON.

    For a tool without parameters clients send an empty string or null.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


class Checked(NamedTuple):
    tokens: Tokens
    params: SamplingParams
    text: PromptText | None = None  # for ``return_sources``, unless the prompt was token ids


class PromptLimits(NamedTuple):
    """Bounds of a prompt and its answer: the engine's sizes and the settings' default."""

    max_model_len: int
    vocab_size: int
    # For requests without ``max_tokens``: the default, and `SamplingParams.fit_max_tokens`.
    default_max_tokens: int | None = None
    fit_max_tokens: bool = False

    @classmethod
    def of(cls, info: EngineInfo, config: EngineConfig, *, fit_max_tokens: bool) -> PromptLimits:
        length, vocab = info.max_model_len, info.vocab_size
        return cls(length, vocab, config.default_max_tokens, fit_max_tokens)

    def checked(
        self,
        prompt: Sequence[int] | Tokens,
        params: SamplingParams,
        *,
        param: str = "prompt",
        before: int = 0,
        text: PromptText | None = None,
        has_tokenizer: bool = True,
    ) -> Checked:
        """Check that a request can be served, and settle ``max_tokens``.

        If it is None, the answer may fill the context up to ``default_max_tokens``, or up to
        ``min_tokens`` if that is more. The prompt came from the field ``param`` and continues a
        pinned prefix of ``before`` tokens. Raises `RequestError`, with the code
        ``context_length_exceeded`` and its ``tokens`` if the prompt is too long.
        """
        if not len(prompt):
            raise RequestError("the prompt is empty; it must hold at least one token", param=param)
        tokens = as_tokens(prompt, self.vocab_size, param)
        as_tokens(params.stop_token_ids, self.vocab_size, "stop_token_ids")
        as_tokens(list(params.logit_bias or ()), self.vocab_size, "logit_bias")
        for name in ("structured_outputs", "stop"):
            if getattr(params, name) and not has_tokenizer:
                raise RequestError(f"{name} needs a tokenizer, which the model lacks", param=name)
        answer = 1 if params.max_tokens is None else params.max_tokens
        length = before + len(prompt)
        if length + answer > self.max_model_len:
            where = f"{before} in the prefix, {len(prompt)}" if before else f"{length}"
            error = RequestError(
                f"this model's maximum context length is {self.max_model_len} tokens, but "
                f"{length + answer} were asked for: {where} in the prompt and "
                f"{answer} for the answer",
                param=param,
                code=CONTEXT_EXCEEDED,
            )
            error.tokens = length, answer, self.max_model_len
            raise error
        if params.max_tokens is None:
            room = self.max_model_len - length
            most = self.default_max_tokens or room
            most = min(room, max(1, most, params.min_tokens))
            params = replace(params, max_tokens=most, fit_max_tokens=self.fit_max_tokens)
        return Checked(tokens, params, text)
