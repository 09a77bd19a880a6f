"""What the server does with a request, apart from HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from razor_dist.config import ServerConfig
from razor_dist.engine.client import EngineClient, EngineInfo, Status
from razor_dist.engine.prompts import PromptEncoder, check_prompt
from razor_dist.errors import RequestError
from razor_dist.sampling_params import SamplingParams
from razor_dist.server.answers import Answers
from razor_dist.server.errors import NotReadyError
from razor_dist.server.formats import ChatFormat, CompletionFormat, Format
from razor_dist.server.schema import ChatBody, CompletionBody

# Seconds; what polls the counters often gives up after 10 itself.
_STATS_PATIENCE = 8.0


class Service:
    """The model behind the API.

    Parameters
    ----------
    config : ServerConfig
        The server's settings.
    client : EngineClient
        The engine.

    Attributes
    ----------
    encoder : PromptEncoder or None
        ``None`` until the tokenizer is loaded.
    """

    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self.config = config
        self.client = client
        self.encoder: PromptEncoder | None = None
        self.started = int(time.time())

    @property
    def status(self) -> Status:
        """The engine's state; "loading" until the tokenizer is there too."""
        if self.client.status.state == "ready" and self.encoder is None:
            return Status("loading", "the tokenizer is being loaded")
        return self.client.status

    def require_ready(self) -> tuple[EngineInfo, PromptEncoder]:
        """The engine's limits and the encoder; `NotReadyError` unless requests can be served."""
        if self.status.state != "ready" or self.client.info is None or self.encoder is None:
            raise NotReadyError(self.status)
        return self.client.info, self.encoder

    def check_model(self, name: str) -> None:
        """Raise `RequestError` (``model_not_found``) unless ``name`` is the served model."""
        if name != self.config.name:
            raise RequestError(
                f"the model {name!r} does not exist; this server serves {self.config.name!r}",
                param="model",
                code="model_not_found",
            )

    async def chat(self, body: ChatBody) -> tuple[Answers, Format]:
        """Submit a chat completion."""
        params = body.sampling()
        _, encoder = self._admit(body.model, 1)
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(encoder.chat, messages)
        answers = self._submit([prompt], params, "messages")
        return answers, ChatFormat(self.config.name, answers, encoder.tokenizer)

    async def complete(self, body: CompletionBody) -> tuple[Answers, Format]:
        """Submit a completion; each prompt is a request of its own to the engine."""
        params = body.sampling()
        _, encoder = self._admit(body.model, len(body.prompt))

        def encode() -> list[list[int]]:
            return [encoder.text(p) if isinstance(p, str) else p for p in body.prompt]

        answers = self._submit(await asyncio.to_thread(encode), params, "prompt")
        return answers, CompletionFormat(self.config.name, answers, encoder.tokenizer)

    async def stats(self) -> dict[str, Any]:
        """The engine's description and its counters.

        Raises
        ------
        EngineBusyError
            If a wave keeps rank 0 from answering for longer than a client may want to wait.
        """
        info, _ = self.require_ready()
        answer = await self.client.stats(_STATS_PATIENCE)
        counters = {k: v for k, v in answer.items() if k not in ("t", "tag")}
        return {**info.fields, **counters, "unfinished": self.client.unfinished}

    def _admit(self, model: str, requests: int) -> tuple[EngineInfo, PromptEncoder]:
        """Refuse what cannot be served before time is spent on its prompts."""
        self.check_model(model)
        ready = self.require_ready()
        if requests > self.config.max_queue:
            raise RequestError(
                f"prompt must hold at most {self.config.max_queue} prompts, got {requests}",
                param="prompt",
            )
        self.client.check_room(requests)
        return ready

    def _submit(self, prompts: Sequence[list[int]], params: SamplingParams, param: str) -> Answers:
        info, encoder = self.require_ready()  # again: the engine may have died meanwhile
        settled = [
            check_prompt(
                prompt,
                params,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                has_tokenizer=encoder.tokenizer is not None,
                param=param,
            )
            for prompt in prompts
        ]
        return Answers(self.client, encoder.tokenizer, prompts, settled)
