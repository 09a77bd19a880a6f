"""The offline API for callers that have an event loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from functools import partial
from typing import Any, Self, TypeVar

from razor_dist.config.errors import EngineError
from razor_dist.frontend.outputs import RequestOutput
from razor_dist.llm.conversations import Conversation, conversation_of
from razor_dist.llm.generation import Prompt, encode, encode_chat
from razor_dist.llm.llm import LLM, closed
from razor_dist.llm.loop_thread import CLOSED
from razor_dist.llm.prefix import Prefix
from razor_dist.protocol.sampling_params import SamplingParams

T = TypeVar("T")


class AsyncLLM:
    """An engine whose answers are awaited, by any event loop; arguments and errors as `LLM`'s.

    The ranks are ready when the constructor returns, which takes as long as that of `LLM` (for
    which ``await asyncio.to_thread(AsyncLLM, ...)`` waits without blocking).

    Examples
    --------
    >>> with AsyncLLM("smollm2") as engine:
    ...     async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=8)):
    ...         print(output.outputs[0].text)
    """

    def __init__(self, model: str = "smollm2", **config: Any) -> None:
        self.llm = LLM(model, **config)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        prefix: Prefix | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the output of one prompt with every token, as `LLM.stream` does.

        Requests of many tasks are answered together. Cancelling or closing the iteration aborts
        the request.
        """
        return self._each(encode, prompt, sampling_params, prefix)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prefix: Prefix | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the next message of one conversation with every token, otherwise as `generate`.

        Arguments are those of `LLM.chat`.
        """
        template = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        conversation = conversation_of(messages)
        return self._each(partial(encode_chat, **template), conversation, sampling_params, prefix)

    async def _each(self, *arguments: Any) -> AsyncGenerator[RequestOutput]:
        # In a thread, since this tokenises texts and may wait for ranks that are restarted.
        outputs = await asyncio.to_thread(self.llm.outputs, *arguments)
        try:
            while (output := await self._run(anext(outputs, None))) is not None:
                yield output
        finally:
            if not self.llm.loop.finished:
                await self._run(closed(outputs))

    async def stats(self) -> dict[str, Any]:
        """Return the engine's counters, as `LLM.stats`."""
        return await asyncio.to_thread(self.llm.stats)

    def close(self) -> None:
        """End the ranks, as `LLM.close`."""
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _run(self, work: Awaitable[T]) -> T:
        """Await ``work`` in the engine's event loop."""

        async def awaited() -> T:
            return await work

        future = self.llm.loop.submit(awaited())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.llm.loop.finished and not (task and task.cancelling()):
                raise EngineError(CLOSED) from None
            raise
