"""Prompts to answers: what the offline API makes of an engine's messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.frontend.assembler import Assembler, TextPiece, prompt_logprobs
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.frontend.prompts import Checked
from razor_dist.llm.inputs import Encoded
from razor_dist.llm.prefix import Prefix
from razor_dist.llm.progress import PromptBar, UseTqdm


class Question(NamedTuple):
    """A prompt as the caller gave it, and as the engine gets it."""

    given: Encoded
    checked: Checked


class Answers:
    """Answers one call's prompts.

    Parameters
    ----------
    client : EngineClient
    tokenizer : PreTrainedTokenizerBase or None
        Without one an answer has no text.
    ids : iterator of int
        Names for the requests.
    prefix : Prefix, optional
        Continued by every prompt.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase | None,
        ids: Iterator[int],
        prefix: Prefix | None = None,
    ) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._ids, self._prefix = ids, prefix

    async def to(
        self, questions: Sequence[Question], *, together: int, use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """The answers, in the order of the questions.

        Parameters
        ----------
        questions : sequence of Question
        together : int
            Requests that the engine is given at a time: it keeps the waiting prompts in memory.
        use_tqdm : bool or callable
            See `PromptBar`.

        Raises
        ------
        RequestError, EngineError
            The first failure; the other requests are aborted.
        """
        room = asyncio.Semaphore(together)
        bar = PromptBar(use_tqdm, [len(question.checked.tokens) for question in questions])

        async def answer(question: Question) -> RequestOutput:
            async with room:
                output = await self._answer(question, bar)
            bar.answered()
            return output

        with bar:
            tasks = [asyncio.create_task(answer(question)) for question in questions]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one failed, or the caller was interrupted: abort the others
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, question: Question, bar: PromptBar) -> RequestOutput:
        (text, ids), (tokens, params) = question
        assembler = Assembler(self._tokenizer, params)
        result = RequestOutput(str(next(self._ids)), text, ids)
        pieces: list[TextPiece] = []
        entries: list[Any] = []
        kept = None
        if self._prefix is not None:
            result.num_cached_tokens = self._prefix.num_tokens
            kept = self._prefix.stream_for(self._client)  # another thread may have released it
        begin = time.perf_counter()
        with self._client.generate(result.request_id, tokens, params, prefix=kept) as stream:
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
            result.prompt_logprobs = prompt_logprobs(self._tokenizer, ids, entries)
        result.outputs, result.finished = [_joined(pieces, params)], True
        return result


def _joined(pieces: Sequence[TextPiece], params: SamplingParams) -> CompletionOutput:
    """An answer of its pieces, the last of which says why it ends."""
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
