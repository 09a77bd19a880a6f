"""Prompts to answers: the offline API's arguments, and its use of an engine's messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import RequestError
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.frontend.assembler import Assembler, TextPiece, prompt_logprobs
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.frontend.prompts import Checked, PromptEncoder
from razor_dist.llm.prefix import Prefix
from razor_dist.llm.progress import PromptBar, UseTqdm

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


# A prompt as the caller gave it, and as the engine gets it.
CheckedPrompt = tuple[Encoded, Checked]


@dataclass(frozen=True)
class GenerationCall:
    """One call of `LLM.generate` or `LLM.chat`."""

    client: EngineClient
    tokenizer: PreTrainedTokenizerBase | None
    ids: Iterator[int]  # names for the requests
    prefix: Prefix | None  # continued by every prompt
    together: int  # requests given to the engine at a time: it keeps waiting prompts in memory

    async def run(self, prompts: Sequence[CheckedPrompt], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Return the answers in the order of the prompts; the first failure aborts the others."""
        room = asyncio.Semaphore(self.together)
        bar = PromptBar(use_tqdm, [len(checked.tokens) for _, checked in prompts])

        async def answer(prompt: CheckedPrompt) -> RequestOutput:
            async with room:
                output = await self._answer(prompt, bar)
            bar.answered()
            return output

        with bar:
            tasks = [asyncio.create_task(answer(prompt)) for prompt in prompts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one failed, or the caller was interrupted: abort the others
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prompt: CheckedPrompt, bar: PromptBar) -> RequestOutput:
        (text, ids), (tokens, params) = prompt
        assembler = Assembler(self.tokenizer, params)
        result = RequestOutput(str(next(self.ids)), text, ids)
        pieces: list[TextPiece] = []
        entries: list[Any] = []
        pinned = None
        if self.prefix is not None:
            result.num_cached_tokens = self.prefix.num_tokens
            pinned = self.prefix.stream_for(self.client)  # another thread may have released it
        begin = time.perf_counter()
        with self.client.generate(result.request_id, tokens, params, prefix=pinned) as stream:
            async for message in stream:
                if message["t"] == "progress":
                    bar.progress(message)
                    result.metrics.prefill_seconds = message["seconds"]
                elif message["t"] == "prompt":
                    entries += message["logprobs"]  # a message per chunk
                elif message["t"] == "token":
                    if not pieces:
                        result.metrics.time_to_first_token = time.perf_counter() - begin
                    pieces.append(assembler.push(message))
                    if pieces[-1].finish_reason is not None:
                        break
        result.metrics.total_seconds = time.perf_counter() - begin
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(self.tokenizer, ids, entries)
        result.outputs, result.finished = [_joined(pieces, params)], True
        return result


def _joined(pieces: Sequence[TextPiece], params: SamplingParams) -> CompletionOutput:
    """Return an answer made of its pieces, the last of which says why it ends."""
    answer = CompletionOutput(
        text="".join(piece.text for piece in pieces),
        token_ids=[piece.token for piece in pieces],
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )
    if params.logprobs is not None:
        answer.logprobs = [piece.logprobs or {} for piece in pieces]
        chosen = zip(answer.logprobs, answer.token_ids, strict=True)
        answer.cumulative_logprob = sum(entry[token].logprob for entry, token in chosen)
    return answer
