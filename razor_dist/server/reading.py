"""Requests as they come: a body and its files in, what is asked for out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from razor_dist.api.contexts import KeptContext
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.api.validate import warn_of
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.documents.read import Document
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.protocol.messages import EngineInfo
from razor_dist.protocol.sampling_params import SamplingDefaults
from razor_dist.server.bodies import Body
from razor_dist.server.documents import DocumentReader
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.request_log import current_record

# Another process reads bodies of this many bytes and more.
_LONG_BYTES = 1 << 18
# Or commas: each may stand for a wrong value, and pydantic's report of 100,000 takes 0.5 s.
_COMMAS = 1 << 14
# Of one log-probability while its prompt is read; shaping the answer takes two to three times it.
_LOGPROB_BYTES = 128


def is_long(raw: bytes | bytearray) -> bool:
    """Return whether a body is for another process to read."""
    return len(raw) >= _LONG_BYTES or raw.count(b",") >= _COMMAS


@dataclass(frozen=True)
class RequestReader:
    """Reads requests, which count for ``max_queue`` meanwhile.

    ``process`` reads what is long, with a tokenizer of its own; ``defaults`` are the model's
    sampling parameters.
    """

    config: ServerConfig
    client: EngineClient
    documents: DocumentReader
    encoder: PromptEncoder
    process: ParsingProcess
    defaults: SamplingDefaults

    def limits(self, info: EngineInfo) -> Limits:
        """Return the bounds of a request to that engine while no other request waits."""
        config = self.config
        return Limits(
            config.name,
            config.max_queue,
            PromptLimits.of(info, config, fit_max_tokens=True),
            self.defaults,
            pins=config.pinned_gb > 0,
            unknown_fields=config.unknown_fields,
            most_logprobs=int(config.max_total_body_mb * 2**20) // _LOGPROB_BYTES,
        )

    async def files(self, raw: Body, fields: Sequence[tuple[str, bytes]]) -> list[Document]:
        """Read the files of a body's fields; their texts count as the body does."""
        found, left = list[Document](), int(self.config.max_body_mb * 2**20)
        with self.client.reading():
            for name, data in fields:
                try:
                    document = await self.documents.read(data, "a.pdf", current_record().turn)
                except RequestError as error:
                    # Anthropic's words, by which Claude Code leaves the document out and goes on.
                    problem = f"{name}: could not process PDF: {error}"
                    raise RequestError(problem, param=name) from None
                left -= len(document.text)
                if left < 0:
                    raise RequestError(
                        f"the texts of the request's files have more than "
                        f"{self.config.max_body_mb:g} MiB of characters, the server's limit "
                        "(--max-body-mb); send them in several requests",
                        param=name,
                        code="body_too_large",
                    )
                raw.hold(sys.getsizeof(document.text))
                found.append(document)
        return found

    async def parse(
        self,
        info: EngineInfo,
        endpoint: Endpoint,
        raw: bytes | bytearray,
        files: Sequence[Document] = (),
        kept: KeptContext | None = None,
    ) -> ParsedRequest:
        """Read a body, with its files and the context that it names, for the engine of ``info``."""
        with self.client.reading():
            room = self.config.max_queue - self.client.unfinished + 1  # in its own place, too
            limits = self.limits(info)._replace(room=room)
            size = len(raw) + sum(len(file.text) for file in files)
            if size >= _LONG_BYTES or is_long(raw):
                key = current_record().turn
                parsed = await self.process.parse_request(endpoint, raw, limits, key, files, kept)
            else:
                given = endpoint, raw, self.encoder, limits, files, kept
                parsed = await asyncio.to_thread(parse_request, *given)
        warn_of(parsed.ignored)
        return parsed
