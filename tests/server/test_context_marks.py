"""Marks of a request beside each other, some of which are pinned already: usage and handles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from razor_dist.api.errors import Failure
from razor_dist.config.errors import RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.answers import LiveChoices
from razor_dist.frontend.prompts import Checked
from razor_dist.protocol.messages import Add, Failed, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.contexts import Context, Contexts
from razor_dist.server.service import Service
from tests.server.fake_client import FakeClient
from tests.server.marked import DOCUMENT, ENCODER, MARK, parsed, part, user
from tests.server.test_context_histories import kept

TOKENS = tuple(range(1100))


class Server:
    def __init__(self) -> None:
        self.client = FakeClient()
        self.contexts = Contexts(self.client, 1e12)

    async def ask(self, *marks: int) -> tuple[LiveChoices, Sequence[Context], list[Add]]:
        """Ask with marks at these tokens; return what is sent, too: pins, and the prompt."""
        before = len(self.client.adds)
        found = await self.contexts.use(None, [kept(TOKENS[:n]) for n in marks], "a", None)
        assert found is not None
        pinned, used = found
        prompt = Checked(np.array(TOKENS, np.int32), SamplingParams(max_tokens=1))
        choices = LiveChoices(self.client, None, [prompt], report_progress=True, pinned=pinned)
        return choices, used, self.client.adds[before:]

    async def read(self, add: Add, begin: int, end: int, *, cached: int) -> None:
        self.client._handle(Progress(add.id, end, end, begin, cached, 0.0))
        await asyncio.sleep(0.01)

    async def answered(self, choices: LiveChoices, add: Add) -> list[Any]:
        """Answer with a token; return the events."""
        self.client._handle(Token(add.id, 5, finish="length"))
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


def played(play: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        await play(Server())

    asyncio.run(run())


def test_a_new_mark_before_what_is_pinned_is_read_beside_the_answer() -> None:
    async def play(server: Server) -> None:
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

    played(play)


@pytest.mark.parametrize(
    ("known", "marks"), [(300, (300, 1000)), (64, (64, 300, 1000)), (900, (300, 900, 1000))]
)
def test_usage_counts_what_the_answer_waits_for(known: int, marks: tuple[int, ...]) -> None:
    async def play(server: Server) -> None:
        await server.keep(known)
        choices, _, [*pins, add] = await server.ask(*marks)
        before = dict(zip(marks, (0, *marks), strict=False))
        for pin, mark in zip(pins, [mark for mark in marks if mark != known], strict=True):
            await server.read(pin, before[mark], mark, cached=before[mark])
        await server.read(add, 1000, 1100, cached=1000)
        await server.answered(choices, add)
        [choice] = choices.choices
        assert (choice.cached_tokens, choice.pinned_tokens) == (known, 1000 - known)

    played(play)


def test_a_request_one_of_whose_contexts_is_refused_fails() -> None:
    async def play(server: Server) -> None:
        await server.keep(1000)
        choices, [short, long], [pin, add] = await server.ask(300, 1000)
        refused = Failed(pin.id, "this context would take more", code="pinned_contexts_full")
        server.client._handle(refused)
        server.client._handle(Progress(add.id, 1000, 1100, 1000, 1000, 0.0))
        with pytest.raises(RequestError, match="would take more"):
            await anext(choices.events())
        choices.close()
        with pytest.raises(RequestError, match="there is no context"):
            await server.contexts.find(short.id, "a")
        assert await server.contexts.find(long.id, "a") is long and server.client.aborted == [
            add.id
        ]

    played(play)


def test_what_is_read_beside_an_answer_goes_with_a_client_that_hangs_up() -> None:
    async def play(server: Server) -> None:
        await server.keep(1000)
        choices, [short, _], [pin, add] = await server.ask(300, 1000)
        await server.read(add, 1000, 1100, cached=1000)
        choices.close()
        assert server.client.aborted == [add.id, pin.id]
        with pytest.raises(RequestError, match="there is no context"):
            await server.contexts.find(short.id, "a")

    played(play)


def test_contexts_are_read_with_the_priority_of_their_request() -> None:
    async def play(server: Server) -> None:
        service = Service(ServerConfig(pinned_gb=1), server.client)
        content = part(DOCUMENT, cache_control=MARK), part("What is red?")
        request = parsed("chat", messages=[user(*content)], priority=7)
        service.load(ENCODER, mock.Mock(), {})
        assert service.reader is not None
        _, choices = await service._submit(request, None, request.prompts, service.reader)
        assert [(add.pin, add.params["priority"]) for add in server.client.adds] == [
            (True, 7),
            (False, 7),
        ]
        choices.close()

    played(play)


def test_a_request_for_which_contexts_leave_no_room_may_come_again() -> None:
    error = RequestError("pinned prefixes hold it", code="pinned_prefixes_hold_cache")
    assert Failure.of(error).status == 429

    async def play(server: Server) -> None:
        service = Service(ServerConfig(), server.client)
        assert service.retry_after(error) == 1
        service.contexts = server.contexts
        await server.keep(300, 1000)
        assert 3590 < service.retry_after(error) <= 3600

    played(play)
