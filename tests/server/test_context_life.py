"""Contexts from the first mark to their end, in several servers on one store, without an engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from razor_dist.api.errors import NotReadyError
from razor_dist.config.errors import EngineError, RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.pins import Pinned
from razor_dist.prefix import parts
from razor_dist.protocol.messages import Ready
from razor_dist.server.context_files import ContextFiles
from razor_dist.server.contexts import Contexts
from tests.server.fake_client import FakeClient
from tests.server.marked import CALLING, DOCUMENT, MARK, parsed, part, user
from tests.server.used_contexts import (
    MESSAGES,
    begun,
    contexts_of,
    ids,
    kept,
    server,
    stored_in,
    until,
    used,
)

pytestmark = pytest.mark.anyio


async def test_a_context_that_ends_while_its_request_is_read_leaves_no_pin() -> None:
    client = FakeClient(reads=True)
    contexts = contexts_of(client)
    context = await used(contexts, kept())
    await contexts.end(context.id, "a")  # between `find` and `use`
    with pytest.raises(RequestError, match="it was deleted") as error:
        await contexts.use(context, [], "a", None)
    assert error.value.code == "context_not_found"
    assert client.aborted == [add.id for add in client.adds] and len(client.adds) == 1


async def test_what_was_begun_is_taken_back_if_the_engine_dies_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    contexts = contexts_of(client)
    died = EngineError("the engine is restarting")
    monkeypatch.setattr(client, "require_ready", mock.Mock(side_effect=[client.info, died]))
    marks = [part(DOCUMENT, cache_control=MARK), part(DOCUMENT, cache_control=MARK)]
    with pytest.raises(EngineError):
        await contexts.use(None, parsed("chat", messages=[user(*marks)]).contexts, "a", None)
    [first] = client.adds
    assert await ids(contexts) == [] and client.aborted == [first.id]


async def test_an_engine_that_dies_does_not_take_contexts_along() -> None:
    client = FakeClient(reads=True)
    contexts = contexts_of(client)
    context = await used(contexts, kept())
    info = client.require_ready()
    client.lost("it was killed")
    client.receive(Ready(info))
    client.reads = False  # the client hangs up meanwhile, or there is no room now
    pinned, _ = await begun(contexts, base=context)
    pinned.close()
    assert await ids(contexts) == [context.id]
    pinned, [new] = await begun(contexts, kept("Other."))
    pinned.close()
    assert await ids(contexts) == [context.id] and not new.is_pinned
    assert client.aborted == [client.adds[-1].id] == [new.pin.stream.request_id]


async def test_a_disk_that_refuses_costs_no_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = server(tmp_path)
    write = mock.Mock(side_effect=OSError("No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(parts, "write_file", write)
        context = await used(contexts, kept())
    assert write.called and not context.stored and stored_in(tmp_path) == []
    assert await contexts.find(context.id, "a") is context
    await used(contexts, base=context)
    assert context.stored and len(stored_in(tmp_path)) == 1
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", mock.Mock(side_effect=OSError("stale handle")))
        assert await contexts.find(context.id, "a") is context


async def test_while_the_ranks_start_again_contexts_stay_and_can_be_deleted(tmp_path: Path) -> None:
    contexts = contexts_of(client := FakeClient(tmp_path, reads=True))
    context = await used(contexts, kept())
    client.info = None
    assert await contexts.find(context.id, "a") is context
    await contexts.end(context.id, "a")
    assert await ids(contexts) == [] == stored_in(tmp_path)


async def test_until_the_engine_is_ready_contexts_of_a_store_are_not_known(tmp_path: Path) -> None:
    context = await used(server(tmp_path), kept())
    # Its model is being loaded.
    again = Contexts(EngineClient(tmp_path / "socket"), 1e9, has_store=True)
    loading = pytest.raises(NotReadyError, match="the model is being loaded")
    for call in (again.find, again.end):
        with loading:
            await call(context.id, "a")
    with loading:
        await again.listed("a", None)
    assert len(stored_in(tmp_path)) == 1
    alone = Contexts(EngineClient(tmp_path / "socket"), 1e9)
    none = Contexts(EngineClient(tmp_path / "socket"), 0)  # --pinned-gb is not given
    assert await none.listed("a", None) == await alone.listed("a", None) == []
    with pytest.raises(RequestError, match="there is no context"):
        await alone.find(context.id, "a")
    with pytest.raises(RequestError, match="this server keeps none"):
        await none.find(context.id, "a")


async def test_a_longer_time_to_live_is_heard_by_all_servers(tmp_path: Path) -> None:
    first, second = server(tmp_path), server(tmp_path)
    context = await used(first, kept(ttl=300))
    other = await second.find(context.id, "a")
    assert other is not context and other.ttl == 300
    await used(first, kept(ttl=3600))
    assert (context.ttl, (await second.find(context.id, "a")).ttl) == (3600, 3600)
    [path] = stored_in(tmp_path)
    past = time.time() - 1000
    os.utime(path, (past, past))
    other.used = past
    await until(lambda: other.expires > time.time())
    assert await ids(first) == await ids(second) == await ids(server(tmp_path)) == [context.id]
    past = time.time() - 3700
    os.utime(path, (past, past))
    assert await ids(server(tmp_path)) == [] and not path.exists()


async def test_a_time_to_live_that_another_server_has_heard_stays(tmp_path: Path) -> None:
    first, second = server(tmp_path), server(tmp_path)
    context = await used(first, kept(ttl=300))
    pinned, _ = await begun(first, base=context)
    await second.find(context.id, "a")
    await used(second, kept(ttl=604800))  # while the first answers
    pinned.close()
    await used(first, base=context)
    found = [(await one.find(context.id, "a")).ttl for one in (first, second, server(tmp_path))]
    assert found == [604800] * 3
    await used(first, kept(ttl=300))  # does not shorten what a request was promised
    found = [(await one.find(context.id, "a")).ttl for one in (first, second)]
    assert found == [604800] * 2


async def test_a_file_is_renewed_while_a_request_goes_on(tmp_path: Path) -> None:
    contexts = server(tmp_path)
    context = await used(contexts, kept())
    [path] = stored_in(tmp_path)
    pinned, _ = await begun(contexts, base=context)
    past = time.time() - 3610
    os.utime(path, (past, past))
    assert await ids(server(tmp_path)) == [] and path.exists()  # it may be in use elsewhere
    context.used = past
    await until(lambda: path.stat().st_mtime > past + 1)
    assert await ids(server(tmp_path)) == [context.id]
    pinned.close()


async def test_another_server_deletes_and_this_one_lists_it_no_more(tmp_path: Path) -> None:
    client = FakeClient(tmp_path, reads=True)
    first, second = contexts_of(client), server(tmp_path)
    context = await used(first, kept())
    await second.end(context.id, "a")
    assert await ids(first) == [] and client.aborted == [add.id for add in client.adds]
    again = await used(first, kept())  # not by the name of the one that is gone
    assert again.id != context.id and await ids(second) == [again.id]
    await first.end(again.id, "a")
    with pytest.raises(RequestError, match="there is no context"):
        await second.find(again.id, "b")


async def test_what_another_server_deletes_stays_pinned_nowhere(tmp_path: Path) -> None:
    client = FakeClient(tmp_path, reads=True)
    first, second = contexts_of(client), server(tmp_path)
    context = await used(first, kept())
    await second.end(context.id, "a")
    await until(lambda: not context.is_pinned)
    assert client.aborted == [add.id for add in client.adds]


async def test_what_is_deleted_while_its_file_is_read_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, deleted = server(tmp_path), server(tmp_path), threading.Event()
    context = await used(first, kept())
    read = ContextFiles.read

    def read_slowly(files: ContextFiles, id_: str) -> Any:
        found = read(files, id_)
        deleted.wait(60)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(ContextFiles, "read", read_slowly)
        finding = asyncio.create_task(second.find(context.id, "a"))
        await asyncio.sleep(0)
    await second.end(context.id, "a")
    deleted.set()
    with pytest.raises(RequestError, match="it was deleted"):
        await finding


async def test_a_context_expires_when_it_was_not_used() -> None:
    client = FakeClient(reads=True)
    contexts = contexts_of(client)
    pinned, [context] = await begun(contexts, kept())
    context.ttl = 0
    await asyncio.sleep(0.05)
    assert await contexts.find(context.id, "a") is context  # its request has not ended
    pinned.close()
    await until(lambda: not context.is_pinned)
    assert await ids(contexts) == [] and client.aborted == [context.pin.stream.request_id]
    with pytest.raises(RequestError, match=r"it expired at 20\d\d-.*: send the text again"):
        await contexts.find(context.id, "a")
    with pytest.raises(RequestError) as error:
        await contexts.find(context.id, "b")
    assert "expired" not in str(error.value)


@pytest.mark.parametrize("stored", [True, False])
async def test_messages_that_only_call_tools_are_kept_and_listed(
    stored: bool, tmp_path: Path
) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    call = {"role": "assistant", "content": None, "tool_calls": [called]}
    told = {"role": "tool", "tool_call_id": "c1", "content": MESSAGES[0]["content"]}

    client = FakeClient(tmp_path if stored else None, reads=True)
    contexts = contexts_of(client)
    both = parsed("chat", by=CALLING, messages=[call, told, *MESSAGES]).contexts
    pinned, found = await begun(contexts, *both)
    pinned.close()
    await contexts.written()
    assert [context.users for context in found] == [0, 0]
    assert await ids(contexts) == [context.id for context in found]
    assert all(one["begins"] for one in await contexts.listed("a", None))
    for context in found:
        await contexts.end(context.id, "a")
    assert client.aborted == [add.id for add in client.adds] and await ids(contexts) == []


async def test_a_pinned_prefix_is_the_last(tmp_path: Path) -> None:
    """Marks of one request continue each other, and what was pinned is not read anew."""

    client = FakeClient(reads=True)
    contexts = contexts_of(client)
    marks = [part(DOCUMENT, cache_control=MARK), part(DOCUMENT, cache_control=MARK)]
    both = parsed("chat", messages=[user(*marks)]).contexts
    pinned, [first, second] = await begun(contexts, *both)
    assert isinstance(pinned, Pinned) and pinned.last is second.pin
    assert [add.prefix for add in client.adds] == [None, first.pin.stream.request_id]
    assert client.adds[1].id == second.pin.stream.request_id
    again, found = await begun(contexts, *both)
    assert found == [first, second] and len(client.adds) == 2
    for one in (pinned, again):
        one.close()
    await contexts.end(first.id, "a")
    assert second.is_pinned and await ids(contexts) == [second.id]
