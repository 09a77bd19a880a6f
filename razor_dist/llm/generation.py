"""Prompts to answers: the offline API's use of an engine's messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.frontend.assembler import Assembler, TextPiece, prompt_logprobs
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.frontend.prompts import Checked
from razor_dist.llm.inputs import Encoded
from razor_dist.llm.prefix import Prefix
from razor_dist.llm.progress import PromptBar, UseTqdm

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
