"""The model behind the API: a request's body in, a response out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi.responses import Response

from razor_dist.api.answer_json import dumped
from razor_dist.api.errors import NotReadyError
from razor_dist.api.fields import renamed
from razor_dist.api.openapi import openapi
from razor_dist.api.request import Endpoint, ParsedRequest
from razor_dist.api.responses_format import FORMATS
from razor_dist.config.errors import EngineError, RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.documents.read import Document
from razor_dist.frontend.answers import ChoiceEvent, LiveChoices
from razor_dist.frontend.client import EngineClient, Status
from razor_dist.frontend.prompts import Checked, PromptEncoder
from razor_dist.protocol.counters import Counters
from razor_dist.protocol.messages import CacheScope, EngineInfo
from razor_dist.protocol.sampling_params import SamplingDefaults, SamplingParams
from razor_dist.server.access import RateLimitError, charge, note_answers
from razor_dist.server.bodies import Body, in_pieces
from razor_dist.server.context import Context, described
from razor_dist.server.contexts import Contexts
from razor_dist.server.documents import DocumentReader
from razor_dist.server.metrics import Metrics
from razor_dist.server.parsing_process import ParsingProcess
from razor_dist.server.reading import RequestReader
from razor_dist.server.request_log import current_record
from razor_dist.server.sse import EventStream, stream
from razor_dist.server.tracing import Traces, exporting

# Prometheus gives up after 10 s, and has the last counters if the engine is busy.
_SCRAPE_SECONDS = 1.0
# Seconds that a stream waits for the engine to refuse the request, which then is an HTTP error
# and not an event in a stream that has begun with 200.
_REFUSAL_SECONDS = 1.0
_DRAINING = Status("draining", "the server is shutting down")


class Service:
    """The model behind the API.

    ``stats_patience`` are seconds: what polls the counters often gives up after 10 itself. A stream
    gets empty lines after ``heartbeat`` seconds of silence, so that no proxy gives it up. ``tag``
    is that of its `Contexts`.
    """

    stats_patience = 8.0

    def __init__(
        self, config: ServerConfig, client: EngineClient, *, heartbeat: float = 3.0, tag: str = ""
    ) -> None:
        self.config = config
        self.client = client
        self.reader: RequestReader | None = None  # until the tokenizer is loaded
        has_store = config.prefix_store is not None
        self.contexts = Contexts(client, config.pinned_gb * 2**30, tag, has_store=has_store)
        self.documents = DocumentReader(int(config.max_body_mb * 2**20))
        self._asking: asyncio.Task[Counters] | None = None
        self.draining = False  # it ends what it has begun, and takes nothing more
        self.metrics = client.observer = Metrics(
            config.name, config.metrics_prefix, caches_prefixes=config.caches_prefixes
        )
        self.traces: Traces | None = None
        if config.otlp_endpoint is not None:
            self.traces = Traces(exporting(config.otlp_endpoint), config.name)
            self.metrics.on_end = self.traces.ended
        self._heartbeat = heartbeat
        self._started = int(time.time())

    def load(
        self, encoder: PromptEncoder, process: ParsingProcess, defaults: SamplingDefaults
    ) -> None:
        """Read requests with these (`RequestReader`), now that there is a tokenizer."""
        parts = self.config, self.client, self.documents
        self.reader = RequestReader(*parts, encoder, process, defaults)

    @property
    def status(self) -> Status:
        """The engine's state; "loading" until the tokenizer is there too, "draining" at the end."""
        if self.draining and self.client.status.state == "ready":
            return _DRAINING
        if self.client.status.state == "ready" and self.reader is None:
            return Status("loading", "the tokenizer is being loaded")
        return self.client.status

    def require_open(self) -> None:
        """Raise `NotReadyError` while the server is ending and takes nothing more."""
        if self.draining:
            raise NotReadyError(_DRAINING)

    def _require_ready(self) -> tuple[EngineInfo, RequestReader]:
        # Not `status`: while the server drains, what it has begun goes on.
        if self.client.status.state != "ready" or self.client.info is None or self.reader is None:
            raise NotReadyError(self.status)
        return self.client.info, self.reader

    def model_card(self) -> dict[str, Any]:
        info = self.client.info
        return {
            "id": self.config.name,
            "object": "model",
            "created": self._started,
            "owned_by": "razor_dist",
            "root": self.config.model,  # whose tokenizer vLLM's benchmark loads
            "parent": None,
            "max_model_len": info.max_model_len if info is not None else None,
        }

    def _reserved(self, prompt: int, params: SamplingParams) -> int:
        """Return the most tokens that a prompt and its answers may take of the caches."""
        tokens = prompt + params.n * (params.max_tokens or 0)
        if params.fit_max_tokens and self.config.kv_tokens is not None:
            tokens = max(prompt + params.n, min(tokens, self.config.kv_tokens))
        return tokens

    async def respond(self, endpoint: Endpoint, raw: Body, arrived: float) -> Response:
        """Answer a completion request, streaming or not; its end frees what it holds.

        Its time-outs count from ``arrived`` by the loop's clock.

        Raises `RequestError` or `EngineError` if it cannot be served, or if its time is over or the
        engine fails before the response begins.
        """
        seconds, record = self.config.request_timeout or math.inf, current_record()
        record.operation = "text_completion" if endpoint == "completions" else "chat"
        self.require_open()
        try:
            async with asyncio.timeout_at(arrived + seconds) as timeout:
                parsed, context = await self._read(endpoint, raw)
                if parsed.answer is not None:
                    return raw.answered(parsed.answer)
                del raw  # megabytes, for as long as the answer takes
                _, reader = self._require_ready()  # again: it may have died meanwhile
                with renamed(parsed.names):
                    charge(sum(self._reserved(len(ids), p) for ids, p, _ in parsed.prompts))
                seconds = min(seconds, parsed.timeout or math.inf)
                timeout.reschedule(arrived + seconds)
                try:
                    parsed, choices = await self._submit(parsed, context, reader)
                except EngineError:
                    self._require_ready()  # if it died, it never had this request: a 503
                    raise
        except TimeoutError:
            raise _late(seconds) from None
        choices.fail_at(arrived + seconds, _late(seconds))
        name, tokenizer = self.config.name, reader.encoder.tokenizer
        form = FORMATS[endpoint](parsed, name, choices.choices, tokenizer)
        try:
            if not parsed.stream:
                async for _ in _naming(choices.events(), parsed.names):
                    pass
                choices.close()
                # Thousands of tokens with twenty log-probabilities each take seconds.
                whole = await asyncio.to_thread(lambda: dumped(form.whole()))
                return in_pieces(whole)
            events = choices.events(self._heartbeat, forgets=True)
            events = await _unless_refused(_naming(events, parsed.names))
            lines = stream(
                events,
                form,
                include_usage=parsed.include_usage,
                continuous_usage=parsed.continuous_usage,
                heartbeat=self._heartbeat,
            )
            return EventStream(lines, close=choices.close)
        except BaseException:
            choices.close()
            raise

    async def read_file(self, data: Body, name: str, arrived: float) -> Document:
        """Return what `DocumentReader.read` does, within the time-out of `respond`."""
        seconds = self.config.request_timeout or math.inf
        try:
            async with asyncio.timeout_at(arrived + seconds):
                return await self.documents.read(data, name, current_record().turn)
        except TimeoutError:
            raise _late(seconds) from None

    async def _submit(
        self, parsed: ParsedRequest, context: Context | None, reader: RequestReader
    ) -> tuple[ParsedRequest, LiveChoices]:
        """Ask for a request's answers, after the contexts that it continues or has kept."""
        prompts = await self._compiled(parsed)
        salt, pinned = self._salt(parsed.cache_salt), None
        key, priority = current_record().key, prompts[0].params.priority
        if found := await self.contexts.use(context, parsed.contexts, key, salt, priority):
            pinned, used = found
            parsed = replace(parsed, kept_as=partial(_named, used))
        try:
            choices = LiveChoices(
                self.client,
                reader.encoder.tokenizer,
                prompts,
                report_progress=parsed.return_progress,
                pinned=pinned,
                scope=CacheScope(salt, parsed.cache_prompt),
            )
        except BaseException:
            if pinned is not None:
                pinned.close()
            raise
        note_answers(lambda: choices.ids)
        return parsed, choices

    def retry_after(self, error: Exception) -> int:
        """Whole seconds until a request that was refused by this error may be sent again."""
        if isinstance(error, RateLimitError):
            return self.client.retry_after(error.groups)
        if isinstance(error, NotReadyError) and error.state in ("loading", "restarting"):
            return self.client.start.seconds_left
        code = error.code if isinstance(error, RequestError) else None
        if code == "pinned_prefixes_hold_cache":
            return self.contexts.retry_after()
        return self.client.retry_after() if code == "queue_full" else 1

    async def _read(self, endpoint: Endpoint, raw: Body) -> tuple[ParsedRequest, Context | None]:
        """Read a request's body, with its files and the context that it names."""
        info, reader = self._require_ready()
        parsed = await reader.parse(info, endpoint, raw)
        if not parsed.unread and parsed.context is None:
            return parsed, None
        context = kept = None
        if parsed.context is not None:
            context = await self.contexts.find(parsed.context, current_record().key)
            kept = context.kept
        files = await reader.files(raw, parsed.unread)
        info, reader = self._require_ready()  # again: it may have died meanwhile
        return await reader.parse(info, endpoint, raw, files, kept), context

    async def _compiled(self, parsed: ParsedRequest) -> list[Checked]:
        """Compile what the answers must match; the request counts for ``max_queue`` meanwhile."""
        with self.client.reading(), renamed(parsed.names):
            return await self.client.compiled(parsed.prompts, current_record().turn)

    def _salt(self, given: str | None) -> str | None:
        """The salt of a request's cached prefixes: timing must not tell what others have read."""
        key = None if self.config.share_prefixes else current_record().key
        return given if key is None else f"{key}:{given or ''}"

    def openapi(self) -> dict[str, Any]:
        """Return the description of the API with the model that is served."""
        info, reader = self._require_ready()
        return openapi(reader.limits(info), knows_tools=reader.encoder.tools.shows_tools)

    async def stats(self) -> dict[str, Any]:
        """The engine's description and counters; `EngineBusyError` while a chunk keeps it busy."""
        info, _ = self._require_ready()
        counters = await self.counters()
        about = msgspec.to_builtins(info) | msgspec.to_builtins(counters)
        del about["prefix_folder"]
        return about | {"unfinished": self.client.unfinished}

    async def described_contexts(self, id_: str | None = None) -> list[dict[str, Any]]:
        """Return the contexts of the request's key, or the one of that id."""
        key = current_record().key
        if id_ is not None:
            await self.contexts.find(id_, key)  # before the ranks are asked
        elif not await self.contexts.listed(key, None):
            return []
        held = None
        with contextlib.suppress(EngineError):
            held = (await self.counters()).pinned
        if id_ is None:
            return await self.contexts.listed(key, held)
        return [described(await self.contexts.find(id_, key), held)]

    async def scrape(self) -> bytes:
        """Return the metrics as Prometheus' text, the ranks' as last reported if they are busy."""
        state, ranks = self.client.status.state, None
        if state == "ready" and self.client.info is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                counters = await asyncio.wait_for(self.counters(), _SCRAPE_SECONDS)
                ranks = self.client.info, counters
        return self.metrics.render(state == "ready", ranks)

    async def counters(self) -> Counters:
        """Return the ranks' counters, asked once for all who ask meanwhile: it is a collective."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.client.stats(self.stats_patience))
            # The client may have gone.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._asking)


def _named(contexts: Sequence[Context]) -> list[dict[str, Any]]:
    """Return the contexts that are kept, as an answer names them."""
    return [context.brief for context in contexts if context.is_pinned]


def _late(seconds: float) -> RequestError:
    return RequestError(f"the request was not answered within {seconds:g} s", code="timeout")


async def _naming(
    events: AsyncIterator[ChoiceEvent | None], names: Mapping[str, str]
) -> AsyncIterator[ChoiceEvent | None]:
    """Return the events; errors name the request's own fields (`renamed`)."""
    with renamed(names):
        async for event in events:
            yield event


async def _unless_refused(
    events: AsyncIterator[ChoiceEvent | None],
) -> AsyncIterator[ChoiceEvent | None]:
    """Return the events once the first is there; raises if it is an error that comes soon."""
    first = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait({first}, timeout=_REFUSAL_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise

    async def resumed() -> AsyncIterator[ChoiceEvent | None]:
        yield await first
        async for event in events:
            yield event

    return resumed()
