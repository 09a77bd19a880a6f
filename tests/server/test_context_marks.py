"""Marks of a request beside each other, some of which are pinned already: usage and handles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from razor_dist.api.errors import Failure
from razor_dist.api.request import Endpoint, ParsedRequest
from razor_dist.api.responses_format import FORMATS
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.answers import Choice, ChoiceEvent, LiveChoices
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.prompts import Checked
from razor_dist.protocol.messages import Add, Failed, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.context import Context
from razor_dist.server.contexts import Contexts
from razor_dist.server.metrics import Metrics
from razor_dist.server.service import Service
from razor_dist.server.sse import stream
from tests.server.fake_client import FakeClient
from tests.server.marked import DOCUMENT, ENCODER, MARK, parsed, part, user
from tests.server.test_context_histories import kept

pytestmark = pytest.mark.anyio
TOKENS = tuple(range(1100))


class Server:
    def __init__(self) -> None:
        self.client = FakeClient()
        self.contexts = Contexts(self.client, 1e12)

    async def ask(
        self, *marks: int, n: int = 1
    ) -> tuple[LiveChoices, Sequence[Context], list[Add]]:
        """Ask with marks at these tokens; return what is sent, too: pins, and the prompt."""
        before = len(self.client.adds)
        found = await self.contexts.use(None, [kept(TOKENS[:n]) for n in marks], "a", None)
        assert found is not None
        pinned, used = found
        prompt = Checked(np.array(TOKENS, np.int32), SamplingParams(max_tokens=1, n=n))
        choices = LiveChoices(self.client, None, [prompt], report_progress=True, pinned=pinned)
        return choices, used, self.client.adds[before:]

    async def read(self, add: Add, begin: int, end: int, *, cached: int) -> None:
        self.client.receive(Progress(add.id, end, end, begin, cached, 0.0))
        await asyncio.sleep(0.01)

    async def answered(self, choices: LiveChoices, add: Add) -> list[Any]:
        """Answer with a token; return the events."""
        self.client.receive(Token(add.id, 5, finish="length"))
        events = [event async for event in choices.events()]
        choices.close()
        return events

    async def keep(self, *marks: int) -> None:
        choices, _, adds = await self.ask(*marks)
        before = 0
        for add, end in zip(adds, [*marks, len(TOKENS)], strict=True):
            await self.read(add, before, end, cached=before)
            before = end
        await self.answered(choices, adds[-1])
        assert choices.choices[0].pinned_tokens == marks[-1]


@pytest.fixture
async def server() -> Server:
    return Server()


async def test_a_new_mark_before_what_is_pinned_is_read_beside_the_answer(server: Server) -> None:
    await server.keep(1000)
    choices, [short, long], [pin, add] = await server.ask(300, 1000)
    assert pin.pin and pin.prefix is None and add.prefix not in (None, pin.id)
    await server.read(pin, 0, 0, cached=0)
    await server.read(add, 1000, 1100, cached=1000)
    events = await server.answered(choices, add)
    [choice] = choices.choices
    assert (choice.cached_tokens, choice.pinned_tokens) == (1000, 0)
    progress = [event.what.processed for event in events if isinstance(event.what, Progress)]
    assert progress == [1100]  # of the prompt alone
    # Its answer has named both.
    assert await server.contexts.find(short.id, "a") is short and short.pin is not None
    assert await server.contexts.find(long.id, "a") is long and not server.client.aborted
    again, [known, _], [only] = await server.ask(300, 1000)
    assert known is short and not only.pin
    again.close()


@pytest.mark.parametrize(
    ("known", "marks"), [(300, (300, 1000)), (64, (64, 300, 1000)), (900, (300, 900, 1000))]
)
async def test_usage_counts_what_the_answer_waits_for(
    known: int, marks: tuple[int, ...], server: Server
) -> None:
    await server.keep(known)
    choices, _, [*pins, add] = await server.ask(*marks)
    before = dict(zip(marks, (0, *marks), strict=False))
    for pin, mark in zip(pins, [mark for mark in marks if mark != known], strict=True):
        await server.read(pin, before[mark], mark, cached=before[mark])
    await server.read(add, 1000, 1100, cached=1000)
    await server.answered(choices, add)
    [choice] = choices.choices
    assert (choice.cached_tokens, choice.pinned_tokens) == (known, 1000 - known)


async def test_usage_of_new_contexts_counts_what_the_prefix_cache_had(server: Server) -> None:
    metrics, traced = Metrics("m"), list[int]()
    metrics.on_end = lambda answer, reason, now: traced.append(answer.cached)
    server.client.observer = metrics
    choices, _, [first, second, add] = await server.ask(300, 1000)
    await server.read(first, 0, 300, cached=299)
    await server.read(second, 300, 1000, cached=980)
    await server.read(add, 1000, 1100, cached=1050)
    await server.answered(choices, add)
    [choice] = choices.choices
    assert (choice.cached_tokens, choice.pinned_tokens) == (1050 - 1 - 20, 1 + 20)
    assert traced == [choice.cached_tokens]


FULL = "pinned_contexts_full"


async def test_a_request_goes_on_without_a_context_that_is_refused_beside_it(
    server: Server,
) -> None:
    await server.keep(1000)
    choices, [short, long], [pin, add] = await server.ask(300, 1000)
    server.client.receive(Failed(pin.id, "this context would take more", code=FULL))
    await server.read(add, 1000, 1100, cached=1000)
    await server.answered(choices, add)
    with pytest.raises(RequestError, match="there is no context"):
        await server.contexts.find(short.id, "a")
    assert await server.contexts.find(long.id, "a") is long and not server.client.aborted


@pytest.mark.parametrize("code", [FULL, "pinned_prefixes_hold_cache"])
@pytest.mark.parametrize("kept", [0, 300])
async def test_a_mark_that_is_refused_is_a_hint(code: str, kept: int, server: Server) -> None:
    if kept:
        await server.keep(kept)
    choices, used, [pin, add] = await server.ask(1000)
    assert (pin.prefix is not None) is bool(kept)
    server.client.receive(Failed(pin.id, "this context would take more", code=code))
    server.client.receive(Failed(add.id, "there is no pinned prefix", "prefix"))
    await asyncio.sleep(0.01)
    again = server.client.adds[-1]
    assert again not in (pin, add) and not again.pin
    assert (again.prefix, len(again.prompt)) == (pin.prefix, 1100 - kept)
    await server.read(again, kept, 1100, cached=kept)
    await server.answered(choices, again)
    [choice] = choices.choices
    assert (choice.cached_tokens, choice.pinned_tokens) == (kept, 0)
    assert not used[0].is_pinned
    with pytest.raises(RequestError, match="there is no context"):
        await server.contexts.find(used[0].id, "a")


@pytest.mark.parametrize("endpoint", ["chat", "completions", "messages"])
async def test_a_stream_begins_with_the_contexts_that_are_kept(endpoint: Endpoint) -> None:
    named = [{"id": "ctx_kept"}, {"id": "ctx_refused"}]
    request = ParsedRequest([], kept_as=lambda: list(named))
    form = FORMATS[endpoint](request, "m", [Choice(np.array([5]))], ENCODER.tokenizer)

    async def events() -> AsyncIterator[ChoiceEvent | None]:
        yield None  # a heartbeat, while rank 0 reads a chunk of another prompt
        named.pop()
        yield ChoiceEvent(0, TextPiece(5, "a", finish_reason="stop"))

    lines = [line async for line in stream(events(), form, include_usage=False)]
    first = next(line for line in lines if "ctx_" in line)
    assert lines[0] == form.heartbeat and lines[1] == first
    chunk = json.loads(first.partition("data: ")[2])
    assert chunk.get("message", chunk)["contexts"] == [{"id": "ctx_kept"}]


async def test_a_context_leaves_room_for_its_own_request(
    caplog: pytest.LogCaptureFixture, server: Server
) -> None:
    caplog.set_level("INFO")
    choices, _, [pin, add] = await server.ask(1000)
    await server.read(pin, 0, 1000, cached=0)
    held = "pinned_prefixes_hold_cache"
    server.client.receive(Failed(add.id, "pinned prefixes hold 3 of the 3", code=held))
    await asyncio.sleep(0.01)
    again = server.client.adds[-1]
    assert again.prefix is None and server.client.aborted == [pin.id]
    assert "is given up for its own request: pinned prefixes hold 3" in caplog.text
    server.client.receive(Failed(again.id, "pinned prefixes hold 3 of the 3", code=held))
    with pytest.raises(RequestError, match="hold 3 of the 3"):
        _ = [event async for event in choices.events()]
    choices.close()


@pytest.mark.parametrize("begun", [True, False])
async def test_an_answer_that_fails_is_not_begun_again(begun: bool, server: Server) -> None:
    """Although its context was deleted meanwhile."""
    choices, [context], [pin, add] = await server.ask(1000)
    await server.read(pin, 0, 1000, cached=0)
    await server.read(add, 1000, 1100, cached=1000)
    if begun:
        server.client.receive(Token(add.id, 5))
    await asyncio.sleep(0.01)
    await server.contexts.end(context.id, "a")
    server.client.receive(Failed(add.id, "the grammar failed", "structured_outputs"))
    await asyncio.sleep(0.01)
    assert server.client.adds == [pin, add]
    with pytest.raises(RequestError, match="the grammar failed"):
        _ = [event async for event in choices.events()]
    choices.close()


async def test_a_request_that_goes_on_without_its_context_counts_once(server: Server) -> None:
    metrics = server.client.observer = Metrics("m")
    ended: list[str] = []
    metrics.on_end = lambda answer, reason, now: ended.append(reason)
    choices, _, [pin, add] = await server.ask(1000, n=2)
    await asyncio.sleep(0.01)  # both answers are waited for
    server.client.receive(Failed(pin.id, "this context would take more", code=FULL))
    for id_ in choices.ids:
        server.client.receive(Failed(id_, "there is no pinned prefix", "prefix"))
    await asyncio.sleep(0.01)
    assert not ended and server.client.adds[2:] == [again := server.client.adds[-1]]
    assert choices.ids == [again.id, f"{again.id}/1"] and add.id != again.id
    for id_ in choices.ids:
        server.client.receive(Token(id_, 5, finish="length"))
    _ = [event async for event in choices.events()]
    choices.close()
    lines = metrics.render(True, None).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    counts = {name.partition("{")[0]: float(value) for name, value in pairs}
    assert counts["razor:request_prompt_tokens_sum"] == len(TOKENS)
    assert counts["razor:e2e_request_latency_seconds_count"] == 2
    assert ended == ["length"] * 2


async def test_a_mark_that_moves_on_continues_what_is_pinned(server: Server) -> None:
    stays = 100  # marked in each request, as a system prompt
    await server.keep(stays, 300)
    pins = [pin for pin in server.client.adds if pin.pin]
    for end in (500, 700, 900):
        choices, used, [pin, add] = await server.ask(stays, end)
        assert pin.prefix == pins[-1].id and len(pin.prompt) == 200
        pins.append(pin)
        await server.read(pin, end - 200, end, cached=end - 200)
        await server.read(add, end, 1100, cached=end)
        await server.answered(choices, add)
        assert choices.choices[0].pinned_tokens == 200
    # The last two stay, and what each request has marked.
    listed = await server.contexts.listed("a", None)
    assert [one["tokens"] for one in listed] == [stays, 700, 900]
    assert server.client.aborted == [pins[1].id, pins[2].id]
    named = await server.contexts.use(used[0], [kept(TOKENS[:400])], "a", None)
    assert named is not None and len(named[1]) == 2


async def test_what_is_read_beside_an_answer_goes_with_a_client_that_hangs_up(
    server: Server,
) -> None:
    await server.keep(1000)
    choices, [short, _], [pin, add] = await server.ask(300, 1000)
    await server.read(add, 1000, 1100, cached=1000)
    choices.close()
    assert server.client.aborted == [add.id, pin.id]
    with pytest.raises(RequestError, match="there is no context"):
        await server.contexts.find(short.id, "a")


async def test_contexts_are_read_with_the_priority_of_their_request(server: Server) -> None:
    service = Service(ServerConfig(pinned_gb=1), server.client)
    content = part(DOCUMENT, cache_control=MARK), part("What is red?")
    request = parsed("chat", messages=[user(*content)], priority=7)
    service.load(ENCODER, mock.Mock(), {})
    assert service.reader is not None
    _, choices = await service._submit(request, None, service.reader)
    assert [(add.pin, add.params["priority"]) for add in server.client.adds] == [
        (True, 7),
        (False, 7),
    ]
    choices.close()


async def test_a_request_for_which_contexts_leave_no_room_may_come_again(server: Server) -> None:
    error = RequestError("pinned prefixes hold it", code="pinned_prefixes_hold_cache")
    assert Failure.of(error).status == 429
    service = Service(ServerConfig(), server.client)
    assert service.retry_after(error) == 1
    service.contexts = server.contexts
    await server.keep(300, 1000)
    assert 3590 < service.retry_after(error) <= 3600
