"""The offline API's calls: their arguments, and the outputs made of an engine's messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.frontend.answers import Choice, LiveChoices
from razor_dist.frontend.assembler import TextPiece, prompt_logprobs
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.frontend.passages import PromptText
from razor_dist.frontend.prompts import Checked, PromptEncoder
from razor_dist.llm.conversations import Conversation
from razor_dist.llm.prefix import Prefix
from razor_dist.llm.progress import OnProgress, PromptBar, UseTqdm
from razor_dist.protocol.messages import CacheScope, Progress, check_text
from razor_dist.protocol.sampling_params import SamplingParams

T = TypeVar("T")
A = TypeVar("A")


class Encoded(NamedTuple):
    text: str | None  # None for token ids and conversations
    ids: list[int]
    cache_salt: str | None = None
    where: PromptText | None = None  # where the tokens end, for ``return_sources``


# An `Encoded` prompt is used unchanged.
Prompt = str | Sequence[int] | Mapping[str, str | Sequence[int]] | Encoded


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; a list of integers is one prompt.

    Raises `RequestError` if ``prompts`` is neither a prompt nor a sequence.
    """
    if isinstance(prompts, str | Mapping | Encoded):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts must be a text, a list of token ids, a mapping, or a list of these, not "
            f"{prompts!r:.80}",
            param="prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    default: SamplingParams,
    prefix: Prefix | None,
) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts, given one for all or one for each.

    Raises `RequestError` otherwise.
    """
    if params is None or isinstance(params, SamplingParams):
        params = [params or default] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params must be SamplingParams or a list of them, not {params!r:.80}",
            param="sampling_params",
        )
    if prefix is not None and any(own.return_sources for own in params):
        raise RequestError(
            "return_sources needs the whole prompt, not one that continues a pinned prefix: send "
            "all of it, whose beginning the prefix cache has as well",
            param="return_sources",
        )
    if len(params) != count:
        raise RequestError(
            f"sampling_params must be one or as many as the prompts: {len(params)} for {count}",
            param="sampling_params",
        )
    return list(params)


# (encoder, prompt or conversation, prefix that it continues, whether to set ``where``, the longest
# context in tokens)
Encode = Callable[[PromptEncoder, Any, Prefix | None, bool, int], Encoded]


def encode(
    encoder: PromptEncoder, prompt: Prompt, prefix: Prefix | None, ends: bool, max_model_len: int
) -> Encoded:
    """Return a prompt as token ids, without special tokens if it continues a prefix.

    With ``ends``, which excludes a prefix, the result has ``where``. Raises `RequestError` if it is
    not a prompt, or a text for a model without a tokenizer, has another salt than the prefix, or is
    too long to be tokenised at once (`PromptEncoder.check_length`).
    """
    salt: Any = None
    if isinstance(prompt, Encoded):
        return prompt
    if isinstance(prompt, Mapping):
        if set(prompt) - {"cache_salt"} not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(
                "a prompt given as a mapping has one key, prompt (a text) or "
                f"prompt_token_ids, not {set(prompt)}; a cache_salt may stand beside it",
                param="prompt",
            )
        given = dict(prompt)
        salt = given.pop("cache_salt", None)
        if salt == "" or not isinstance(salt, str | None):
            raise RequestError(
                f"cache_salt must be a string that is not empty, got {salt!r:.80}",
                param="cache_salt",
            )
        check_text(salt or "", "cache_salt")
        if prefix is not None:
            prefix.check_salt(salt)
        [(key, prompt)] = given.items()
        if isinstance(prompt, str) != (key == "prompt"):
            raise RequestError(f"{key} cannot hold {prompt!r:.80}", param=key)
    if isinstance(prompt, str):
        encoder.check_length(prompt, max_model_len, "prompt")
        if ends:
            tokens, where = encoder.text_with_ends(prompt)
            return Encoded(prompt, tokens, salt, where)
        if prefix is None:
            return Encoded(prompt, encoder.text(prompt), salt)
        return Encoded(prompt, encoder.continuation(prefix.border, prompt), salt)
    # Bytes are integers, too.
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not is_list or not all(isinstance(t, int) for t in prompt):
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {prompt!r:.80}", param="prompt"
        )
    return Encoded(None, [int(token) for token in prompt], salt)


def encode_chat(
    encoder: PromptEncoder,
    messages: Conversation,
    prefix: Prefix | None,
    ends: bool,
    max_model_len: int,
    /,
    **template: Any,
) -> Encoded:
    """Return a conversation as token ids; with a prefix, the ids of the text behind it.

    Raises `RequestError` if the chat template refuses the conversation, if that does not begin with
    the prefix, or if it is too long to be tokenised at once (`PromptEncoder.check_length`).
    """
    text = encoder.chat_text(messages, **template)
    rest = text if prefix is None else prefix.rest_of(text)
    encoder.check_length(rest, max_model_len, "messages")
    if ends:
        tokens, where = encoder.with_ends(text)
        parts = encoder.chat_parts(text, messages, **template)
        return Encoded(None, tokens.tolist(), None, PromptText(parts, where))
    if prefix is None:
        return Encoded(None, encoder.text(text, special_tokens=False))
    return Encoded(None, encoder.continuation(prefix.border, rest))


# A prompt as the caller gave it, and as the engine gets it.
CheckedPrompt = tuple[Encoded, Checked]


@dataclass(frozen=True)
class GenerationCall:
    """One call of `LLM.generate`, `LLM.chat` or `LLM.stream`, or a line of a batch file."""

    client: EngineClient
    tokenizer: PreTrainedTokenizerBase | None
    ids: Iterator[int]  # names for the requests
    prefix: Prefix | None  # continued by every prompt
    together: int  # most requests in the engine at a time: it has waiting prompts in memory

    async def run(self, prompts: Sequence[CheckedPrompt], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Return the answers in the order of the prompts; the first failure aborts the others."""

        async def answered(prompt: CheckedPrompt, on_progress: OnProgress) -> RequestOutput:
            async for output in self.stream(prompt, on_progress):  # noqa: B007 - the last
                pass
            return output

        lengths = [len(checked.tokens) for _, checked in prompts]
        return await self._each(prompts, answered, PromptBar(use_tqdm, lengths))

    async def choices(
        self,
        prompts: Sequence[Checked],
        scope: CacheScope,
        use_tqdm: UseTqdm,
    ) -> list[Choice]:
        """Return all prompts' answers in the form for the server's formats; otherwise as `run`."""

        async def answered(prompt: Checked, on_progress: OnProgress) -> list[Choice]:
            live = await self._submitted(prompt, scope)
            try:
                async for event in live.events():
                    if event is not None and isinstance(event.what, Progress):
                        on_progress(event.what)
            finally:
                live.close()
            return live.choices

        bar = PromptBar(use_tqdm, [len(prompt.tokens) for prompt in prompts])
        found = await self._each(prompts, answered, bar)
        return [choice for choices in found for choice in choices]

    async def _each(
        self,
        prompts: Sequence[T],
        answered: Callable[[T, OnProgress], Awaitable[A]],
        bar: PromptBar,
    ) -> list[A]:
        room = asyncio.Semaphore(self.together)

        async def answer(prompt: T) -> A:
            async with room:
                found = await answered(prompt, bar.progress)
            bar.answered()
            return found

        with bar:
            tasks = [asyncio.create_task(answer(prompt)) for prompt in prompts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one failed, or the caller was interrupted: abort the others
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _submitted(self, prompt: Checked, scope: CacheScope) -> LiveChoices:
        """Submit a prompt once its constraint is compiled."""
        prompts = await self.client.compiled([prompt])
        # Checked again: another thread may have released the prefix.
        pinned = None if self.prefix is None else self.prefix.stream_for(self.client)
        return LiveChoices(
            self.client,
            self.tokenizer,
            prompts,
            report_progress=True,
            prefix=pinned,
            scope=scope,
        )

    async def stream(
        self, prompt: CheckedPrompt, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the growing output with each token; arguments as in `LLM.stream`."""
        (text, ids, salt, _), checked = prompt
        params = checked.params
        result = RequestOutput(str(next(self.ids)), text, ids)
        result.outputs = [_unfinished(index, params) for index in range(params.n)]
        if self.prefix is not None:
            result.num_cached_tokens = self.prefix.num_tokens
        live = await self._submitted(checked, CacheScope(salt))
        begin = time.perf_counter()
        try:
            async for event in live.events():
                assert event is not None
                if not isinstance(event.what, TextPiece):
                    result.num_cached_tokens = event.what.cached
                    result.metrics.prefill_seconds = event.what.seconds
                    if on_progress is not None:
                        on_progress(event.what)
                    continue
                seconds = time.perf_counter() - begin
                if result.metrics.time_to_first_token is None:
                    result.metrics.time_to_first_token = seconds
                    if params.prompt_logprobs is not None:
                        entries = live.choices[0].prompt_entries
                        result.prompt_logprobs = prompt_logprobs(self.tokenizer, ids, entries)
                answer, choice = result.outputs[event.index], live.choices[event.index]
                _grow(answer, event.what)
                answer.sources, answer.grounded = choice.sources, choice.grounded
                answer.question_match = choice.question_match
                if all(output.finish_reason for output in result.outputs):
                    result.metrics.total_seconds, result.finished = seconds, True
                yield result
        finally:
            live.close()


def _unfinished(index: int, params: SamplingParams) -> CompletionOutput:
    answer = CompletionOutput(index, sentences=[] if params.return_sources else None)
    if params.logprobs is not None:
        answer.cumulative_logprob, answer.logprobs = 0.0, []
    return answer


def _grow(answer: CompletionOutput, piece: TextPiece) -> None:
    answer.text += piece.text
    if answer.sentences is not None:
        answer.sentences += piece.sentences
    answer.token_ids.append(piece.token)
    answer.finish_reason, answer.stop_reason = piece.finish_reason, piece.stop_reason
    if answer.logprobs is not None:
        entry = piece.logprobs or {}
        answer.logprobs.append(entry)
        assert answer.cumulative_logprob is not None
        answer.cumulative_logprob += entry[piece.token].logprob
