"""Request bodies of OpenAI's endpoints that generate: their fields, and checks between fields.

Unsupported fields are refused by name, unless their value is what happens anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, WithJsonSchema

from razor_dist.api.call_grammars import forced
from razor_dist.api.contexts import KeptContext, contexts
from razor_dist.api.conversation import BlockText, CitedDocument, Mark
from razor_dist.api.field_types import (
    CountOrAll,
    Int,
    Int64,
    LogitBias,
    RepetitionDetection,
    StopStrings,
    StructuredOutputs,
    TemplateArguments,
    ToolChoice,
    in_range,
)
from razor_dist.api.fields import (
    ChosenTool,
    Ending,
    Hints,
    Messages,
    ReasoningEffort,
    ResponseFormat,
    StreamOptions,
    Strict,
    Tool,
    Verbosity,
    check_contents,
    renamed,
)
from razor_dist.api.tools import ToolUse, tool_use
from razor_dist.config.errors import RequestError
from razor_dist.frontend.kept import Ints, continued
from razor_dist.frontend.passages import MOST_CITED, PromptText
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.protocol.sampling_params import SamplingDefaults, SamplingParams
from razor_dist.protocol.structured_outputs import StructuredOutputsParams
from razor_dist.protocol.vocabulary import FIELD as STRUCTURED

# Fields of a body that are fields of `SamplingParams` by the same name; null is the default.
_SAMPLING = {
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "return_sources"),
    "skip_special_tokens",
}

UNLIMITED = "n_predict", -1  # the field and value that ask for no limit


class CommonFields(Strict):
    """Fields of every endpoint that generates, Anthropic's included."""

    temperature: Annotated[float, in_range("temperature")] | None = None
    top_p: Annotated[float, in_range("top_p")] | None = None
    top_k: Annotated[Int64, in_range("top_k")] | None = None
    seed: Int64 | None = None
    # Bounded: each of a request's prompts has a copy on its way to the engine.
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    stream: bool | None = None


class SharedFields(CommonFields, Hints):
    """Fields that have the same names on all of OpenAI's endpoints that generate."""

    model: str
    min_tokens: Annotated[Int, in_range("min_tokens")] | None = None
    min_p: Annotated[float, in_range("min_p")] | None = None
    presence_penalty: Annotated[float, in_range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, in_range("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, in_range("repetition_penalty")] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # llama.cpp's name
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: StopStrings = ()
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    # Other numbers need a server with ``scheduling_policy: priority``.
    priority: Annotated[Int64, WithJsonSchema({"const": 0})] | None = None
    cache_prompt: bool | None = None  # llama.cpp's; false: no use of the prefix cache
    context: Annotated[str, Field(min_length=1)] | None = None  # the name of one to continue


class GenerateBody(SharedFields):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "best_of": (1,),  # or as many as ``n``
        "functions": ([],),
        "function_call": ("none",),
        **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
        "suffix": ("",),
        "modalities": (["text"],),
        **dict.fromkeys(("include_stop_str_in_output", "use_beam_search"), (False,)),
    }
    _kept: KeptContext | None = PrivateAttr(default=None)
    _encoded: tuple[str, Ints, Ints] | None = PrivateAttr(default=None)
    max_tokens: Annotated[Int, in_range("max_tokens")] | None = None
    n_predict: CountOrAll | None = None  # llama.cpp's name
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    stop_token_ids: list[Int] | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    return_sources: Annotated[Int, in_range("return_sources")] | None = None
    n: Int | None = None
    asks_in: ClassVar[str]  # the field that holds the prompt
    limited_by: ClassVar[Sequence[str]] = ("max_tokens",)  # beside `n_predict`

    def go_on_with(self, kept: KeptContext) -> None:
        """Continue a context; `RequestError` for fields that a context excludes."""
        for name in ("cache_salt", "truncate_prompt_tokens", "echo"):
            if getattr(self, name, None):
                raise RequestError(f"{name} is not allowed with context", param=name)
        if self.cache_prompt is False:
            raise RequestError("cache_prompt: false is not allowed with context", "cache_prompt")
        self._kept = kept

    def contexts(self, encoder: PromptEncoder) -> tuple[list[KeptContext], list[str]]:
        """Return the contexts to keep of the prompt after `encoded`: see `contexts`."""
        return [], []

    @property
    def annotates(self) -> bool:
        """True if answers cite passages of their prompt in OpenAI's annotations."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True for counts in every chunk, which need ``include_usage`` as in vLLM."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def check(self) -> None:
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise RequestError(f"{name} is only allowed with stream: true", param=name)
        telling = "return_annotations" if self.annotates else "return_sources"
        if self.truncate_prompt_tokens is not None and (self.return_sources or self.annotates):
            raise RequestError(
                f"truncate_prompt_tokens excludes {telling}, which tells places in the whole "
                "prompt",
                param="truncate_prompt_tokens",
            )

    def one_of(self, *names: str) -> Any:
        """Return the value of fields with the same meaning; `RequestError` if they differ."""
        given = {name: getattr(self, name) for name in names}
        found = {name: value for name, value in given.items() if value is not None}
        if len(set(found.values())) > 1:
            raise RequestError(
                " and ".join(f"{name} ({value})" for name, value in found.items())
                + " contradict each other; give one of them",
                param=next(iter(found)),
            )
        return next(iter(found.values()), None)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer's tokens, and its value or None; or `UNLIMITED`."""
        value = self.one_of("n_predict", *self.limited_by)
        names = *self.limited_by, "n_predict"
        given = (name for name in names if getattr(self, name) is not None)
        return next(given, "max_tokens"), value

    @property
    def constrained_by(self) -> str:
        """The field with the constraint on the answers, if there is one."""
        given = self.response_format is not None and self.response_format.type != "text"
        return "response_format" if given else STRUCTURED

    @property
    def engine_names(self) -> dict[str, str]:
        """The request's fields that the engine may refuse, by the engine's names."""
        annotates = self.annotates and not self.return_sources
        sources = "return_annotations" if annotates else "return_sources"
        own = {STRUCTURED: self.constrained_by, "return_sources": sources}
        return own | {"max_tokens": self.limit[0]}

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        if self.response_format is None or self.response_format.type == "text":
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise RequestError(
                "response_format and structured_outputs exclude each other",
                param="structured_outputs",
            )
        with renamed({STRUCTURED: self.constrained_by}):
            return self.response_format.structured_outputs()

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
    ) -> SamplingParams:
        given = self.model_dump(include=_SAMPLING, exclude_none=True)
        if self.annotates and not self.return_sources:
            given["return_sources"] = MOST_CITED
        penalty = self.one_of("repeat_penalty", "repetition_penalty")
        if penalty is not None:
            given["repetition_penalty"] = penalty
        if self.repetition_detection is not None:
            given["repetition_detection"] = self.repetition_detection
        elif self.ignore_eos:  # benchmarks want answers of a certain length
            given["repetition_detection"] = None
        structured = self._structured_outputs()
        with renamed({STRUCTURED: self.constrained_by}):
            return SamplingParams(
                **{**defaults, **given},
                max_tokens=max_tokens,
                structured_outputs=structured,
                seed=self.seed,
                stop=self.stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                logprobs=logprobs,
                priority=self.priority or 0,
            )


class ChatBody(Ending, GenerateBody):  # pydantic looks at the last base's fields first
    asks_in = "messages"
    limited_by = "max_completion_tokens", "max_tokens"
    tool_types = ("function",)
    echoes: ClassVar[bool] = False
    prompt_count: ClassVar[int] = 1

    messages: Messages
    max_completion_tokens: Annotated[Int, in_range("max_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, in_range("logprobs")] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice[ChosenTool] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_annotations: bool | None = None

    @property
    def annotates(self) -> bool:
        return bool(self.return_annotations)

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of the chat template beside the messages."""
        hints = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        arguments: dict[str, Any] = {k: v for k, v in hints.items() if v is not None}
        if self.reasoning_effort is not None:  # vLLM's argument for templates such as Qwen 3's
            arguments["enable_thinking"] = self.reasoning_effort != "none"
        arguments |= self.chat_template_kwargs or {}
        arguments |= self.ending
        if self.tools:  # even if the answer may not call them: most templates begin with them
            arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return arguments

    @property
    def used_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tool(self) -> str | None:
        """A tool's name or "required" if the answer must be a call."""
        if isinstance(self.tool_choice, ChosenTool):
            return self.tool_choice.function.name
        return "required" if self.tool_choice == "required" else None

    @property
    def constrained_by(self) -> str:
        return super().constrained_by if self.forced_tool is None else "tools"

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        other = super()._structured_outputs()
        if self.forced_tool is None:
            if self.structured_outputs is not None and self.used_tools:
                raise RequestError(
                    "structured_outputs keeps the model from calling tools: leave one of them out, "
                    "or set tool_choice to 'none', 'required' or a tool",
                    param=STRUCTURED,
                )
            return other
        if self.structured_outputs is not None:  # a response_format is one of texts, not of calls
            raise RequestError(
                "a forced tool_choice excludes structured_outputs", param="tool_choice"
            )
        if self.min_tokens:
            raise RequestError(
                "a forced tool_choice excludes min_tokens: calls may be shorter", "tool_choice"
            )
        schemas = {tool.function.name: tool.schema_of_arguments for tool in self.used_tools}
        with renamed({STRUCTURED: self.constrained_by}):
            return forced(schemas, self.forced_tool, self.parallel_tool_calls is not False)

    def tool_use(self, encoder: PromptEncoder) -> ToolUse | None:
        """Return which tools the answers may call, and how; `RequestError` as `tool_use`."""
        if not self.used_tools:
            return None
        names = [tool.function.name for tool in self.used_tools]
        return tool_use(encoder, names, self.forced_tool, self.parallel_tool_calls is not False)

    def encoded(
        self, encoder: PromptEncoder, max_model_len: int, *, ends: bool, keeps: bool = False
    ) -> Iterator[tuple[Sequence[int] | Ints, PromptText | None]]:
        """Yield the tokens of each prompt, and with ``ends`` its text with their places.

        With ``keeps``, `contexts` is called next. Raises `RequestError` as
        `PromptEncoder.check_length` does for the text behind a kept context.
        """
        messages = [message.for_template() for message in self.messages]
        text = encoder.chat_text(messages, **self.template)
        begin = 0 if self._kept is None else self._kept.text.length
        encoder.check_length(text[begin:], max_model_len, "messages")
        if not (ends or self._kept or (keeps and self.marks and encoder.knows_ends)):
            yield encoder.text(text, special_tokens=False), None
            return
        if self._kept is None:
            ids, where = encoder.with_ends(text)
        else:
            ids, where = continued(encoder, self._kept.text, text)
        self._encoded = text, ids, where
        parts = encoder.chat_parts(text, messages, **self.template) if ends else []
        yield ids, PromptText(parts, where) if ends else None

    def go_on_with(self, kept: KeptContext) -> None:
        super().go_on_with(kept)
        self.messages = kept.before(self.messages)

    @property
    def marks(self) -> list[Mark]:
        """The ends of the beginnings of the conversation to keep."""
        documents, segments = self.cited
        cites = self._kept is not None and self._kept.cites
        found = []
        for index, message in enumerate(self.messages):
            places = [(at, control, True) for at, control in message.marks]
            if message.cache_control is not None and message.content is not None:
                places.append((len(message.text), message.cache_control, False))
            for at, control, goes_on in places:
                count = bisect_right(segments, (index, at), key=lambda one: (one.message, one.end))
                place = index, at, control.seconds, goes_on, False
                found.append(Mark(*place, len(documents), count, cites=cites))
        return found

    @property
    def cited(self) -> tuple[Sequence[CitedDocument], Sequence[BlockText]]:
        """The documents that an answer may cite, and the places of all blocks in the messages."""
        return ((), ()) if self._kept is None else self._kept.cited(self.messages)

    def contexts(self, encoder: PromptEncoder) -> tuple[list[KeptContext], list[str]]:
        chat = self.messages, self.template, self._encoded
        return contexts(encoder, self.marks, *chat, *self.cited)

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise RequestError("two tools have the same name", param="tools")
        if self.forced_tool not in (None, "required", *names):
            raise RequestError(f"there is no tool {self.forced_tool!r:.80}", param="tool_choice")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice is only allowed with tools", param="tool_choice")

    def check(self) -> None:
        super().check()
        self._check_tools()
        check_contents(self.messages)
        field = "truncate_prompt_tokens" if self.truncate_prompt_tokens else "cache_prompt"
        if (self.truncate_prompt_tokens or self.cache_prompt is False) and self.marks:
            raise RequestError(f"{field} is not allowed with cache_control", param=field)
        if not self.messages:
            raise RequestError("messages must hold at least one message", param="messages")
        self.one_of("n_predict", "max_tokens", "max_completion_tokens")
        self.check_ending()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling settings; without a limit, ``max_tokens`` is None."""
        field, limit = self.limit
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        with renamed({"max_tokens": field, "logprobs": "top_logprobs"}):
            return self._sampling(
                None if (field, limit) == UNLIMITED else limit, logprobs, defaults
            )
