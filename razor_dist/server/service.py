"""What the server does with a request, apart from HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import EngineClient, EngineInfo, Status
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.server.answers import Answers
from razor_dist.server.errors import NotReadyError
from razor_dist.server.formats import ChatFormat, CompletionFormat, Format
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.request_parsing import (
    Endpoint,
    Limits,
    ParsedRequest,
    check_model,
    parse_request,
)

# Bytes of a body from which on another process reads it.
_LONG = 1 << 18
# Seconds; what polls the counters often gives up after 10 itself.
_STATS_PATIENCE = 8.0


class Reader(NamedTuple):
    """What makes tokens of requests: in this process, and for long ones in another."""

    encoder: PromptEncoder
    process: ParsingProcess


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
    reader : Reader or None
        ``None`` until the tokenizer is loaded.
    """

    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self.config = config
        self.client = client
        self.reader: Reader | None = None
        self.started = int(time.time())

    @property
    def status(self) -> Status:
        """The engine's state; "loading" until the tokenizer is there too."""
        if self.client.status.state == "ready" and self.reader is None:
            return Status("loading", "the tokenizer is being loaded")
        return self.client.status

    def require_ready(self) -> tuple[EngineInfo, Reader]:
        """The engine's limits and the reader; `NotReadyError` unless requests can be served."""
        if self.status.state != "ready" or self.client.info is None or self.reader is None:
            raise NotReadyError(self.status)
        return self.client.info, self.reader

    def check_model(self, name: str) -> None:
        """Raise `RequestError` (``model_not_found``) unless ``name`` is the served model."""
        check_model(name, self.config.name)

    async def parse_request(self, endpoint: Endpoint, raw: bytes | bytearray) -> ParsedRequest:
        """Read a request's body; see `razor_dist.server.request_parsing.parse_request`.

        The request counts for ``max_queue`` from here on.

        Raises
        ------
        RequestError
            If the request cannot be served; with the code ``queue_full`` unread.
        EngineError
            If the engine is not ready.
        """
        info, reader = self.require_ready()
        limits = Limits(
            self.config.name, self.config.max_queue, info.max_model_len, info.vocab_size
        )
        with self.client.reading():
            if len(raw) >= _LONG:
                return await reader.process.parse_request(endpoint, raw, limits)
            return await asyncio.to_thread(parse_request, endpoint, raw, reader.encoder, limits)

    def submit(self, endpoint: Endpoint, parsed: ParsedRequest) -> tuple[Answers, Format]:
        """Hand a request's prompts to the engine, each as a request of its own.

        Raises
        ------
        RequestError
            Code ``queue_full``; nothing has been submitted then.
        EngineError
            If the engine is not ready.
        """
        _, reader = self.require_ready()  # again: it may have died since the request was read
        tokenizer = reader.encoder.tokenizer
        answers = Answers(
            self.client, tokenizer, parsed.prompts, report_progress=parsed.return_progress
        )
        form = ChatFormat if endpoint == "chat" else CompletionFormat
        return answers, form(self.config.name, answers, tokenizer)

    async def stats(self) -> dict[str, Any]:
        """The engine's description and its counters.

        Raises
        ------
        EngineBusyError
            If a chunk keeps rank 0 from answering for longer than a client may want to wait.
        """
        info, _ = self.require_ready()
        answer = await self.client.stats(_STATS_PATIENCE)
        counters = {k: v for k, v in answer.items() if k not in ("t", "tag")}
        return {**info.fields, **counters, "unfinished": self.client.unfinished}
