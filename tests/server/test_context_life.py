"""Contexts from the first mark to their end, in several servers on one store, without an engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest

from razor_dist.api.contexts import KeptContext
from razor_dist.api.errors import NotReadyError
from razor_dist.cli import main
from razor_dist.config.errors import EngineError, RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.pins import Pinned
from razor_dist.prefix import parts
from razor_dist.prefix.store import PrefixStore
from razor_dist.protocol.messages import Ready
from razor_dist.server.context_files import ContextFiles, Head
from razor_dist.server.contexts import Context, Contexts
from tests.server.fake_client import FakeClient
from tests.server.process import fake_server, wait_until
from tests.server.test_contexts import DOCUMENT, MARK, parsed, part, user

MESSAGES = [user(part(DOCUMENT, cache_control=MARK))]


def kept(text: str = "", ttl: int = 3600) -> KeptContext:
    content = part(f"{text} {DOCUMENT}", cache_control=MARK)
    [found] = parsed("chat", messages=[user(content)]).contexts
    return msgspec.structs.replace(found, ttl=ttl)


def server(folder: Path) -> Contexts:
    return Contexts(FakeClient(folder, reads=True), 1e9)


def played(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(play())  # type: ignore[arg-type]


async def begun(contexts: Contexts, *new: KeptContext, base: Context | None = None) -> Any:
    found = await contexts.use(base, new, "a", None)
    assert found is not None
    await asyncio.sleep(0)  # its pins hear of what was prefilled
    return found


async def used(contexts: Contexts, *new: KeptContext, base: Context | None = None) -> Context:
    """A whole request; the last context that it uses."""
    pinned, found = await begun(contexts, *new, base=base)
    pinned.close()
    await asyncio.gather(*contexts._writing.values())
    last: Context = found[-1]
    return last


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("razor_dist.server.contexts._WATCH_SECONDS", 0.01)


async def ids(contexts: Contexts) -> list[str]:
    return [one["id"] for one in await contexts.listed("a", None)]


def stored_in(store: Path) -> list[Path]:
    return list(store.glob("contexts.d/*"))


def test_a_context_that_ends_while_its_request_is_read_leaves_no_pin() -> None:
    async def play() -> None:
        client = FakeClient(reads=True)
        contexts = Contexts(client, 1e9)
        context = await used(contexts, kept())
        await contexts.end(context.id, "a")  # between `find` and `use`
        with pytest.raises(RequestError, match="it was deleted") as error:
            await contexts.use(context, [], "a", None)
        assert error.value.code == "context_not_found"
        assert client.aborted == [add.id for add in client.adds] and len(client.adds) == 1

    played(play)


def test_what_was_begun_is_taken_back_if_the_engine_dies_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        client = FakeClient()
        contexts = Contexts(client, 1e9)
        died = EngineError("the engine is restarting")
        monkeypatch.setattr(client, "require_ready", mock.Mock(side_effect=[client.info, died]))
        marks = [part(DOCUMENT, cache_control=MARK), part(DOCUMENT, cache_control=MARK)]
        with pytest.raises(EngineError):
            await contexts.use(None, parsed("chat", messages=[user(*marks)]).contexts, "a", None)
        [first] = client.adds
        assert await ids(contexts) == [] and client.aborted == [first.id]

    played(play)


def test_an_engine_that_dies_does_not_take_contexts_along() -> None:
    async def play() -> None:
        client = FakeClient(reads=True)
        contexts = Contexts(client, 1e9)
        context = await used(contexts, kept())
        info = client.require_ready()
        client.lost("it was killed")
        client._handle(Ready(info))
        client.reads = False  # the client hangs up meanwhile, or there is no room now
        pinned, _ = await begun(contexts, base=context)
        pinned.close()
        assert await ids(contexts) == [context.id]
        pinned, [new] = await begun(contexts, kept("Other."))
        pinned.close()
        assert await ids(contexts) == [context.id] and not new.is_pinned
        assert client.aborted == [client.adds[-1].id] == [new.pin.stream.request_id]

    played(play)


def test_a_disk_that_refuses_costs_no_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
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

    played(play)


def test_while_the_ranks_start_again_contexts_stay_and_can_be_deleted(tmp_path: Path) -> None:
    async def play() -> None:
        contexts = server(tmp_path)
        context = await used(contexts, kept())
        contexts._client.info = None
        assert await contexts.find(context.id, "a") is context
        await contexts.end(context.id, "a")
        assert await ids(contexts) == [] == stored_in(tmp_path)

    played(play)


def test_until_the_engine_is_ready_contexts_of_a_store_are_not_known(tmp_path: Path) -> None:
    async def play() -> None:
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

    played(play)


def test_a_longer_time_to_live_is_heard_by_all_servers(tmp_path: Path) -> None:
    async def play() -> None:
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

    played(play)


def test_a_time_to_live_that_another_server_has_heard_stays(tmp_path: Path) -> None:
    async def play() -> None:
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

    played(play)


def test_a_file_is_renewed_while_a_request_goes_on(tmp_path: Path) -> None:
    async def play() -> None:
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

    played(play)


def test_another_server_deletes_and_this_one_lists_it_no_more(tmp_path: Path) -> None:
    async def play() -> None:
        client = FakeClient(tmp_path, reads=True)
        first, second = Contexts(client, 1e9), server(tmp_path)
        context = await used(first, kept())
        await second.end(context.id, "a")
        assert await ids(first) == [] and client.aborted == [add.id for add in client.adds]
        again = await used(first, kept())  # not by the name of the one that is gone
        assert again.id != context.id and await ids(second) == [again.id]
        await first.end(again.id, "a")
        with pytest.raises(RequestError, match="there is no context"):
            await second.find(again.id, "b")

    played(play)


def test_what_another_server_deletes_stays_pinned_nowhere(tmp_path: Path) -> None:
    async def play() -> None:
        client = FakeClient(tmp_path, reads=True)
        first, second = Contexts(client, 1e9), server(tmp_path)
        context = await used(first, kept())
        await second.end(context.id, "a")
        await until(lambda: not context.is_pinned)
        assert client.aborted == [add.id for add in client.adds] and not first._contexts

    played(play)


def test_what_is_deleted_while_its_file_is_read_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
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
        assert not second._contexts

    played(play)


def test_files_are_read_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[threading.Thread]()

    def noting(what: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            threads.add(threading.current_thread())
            return what(*arguments)

        return run

    async def play() -> None:
        context = await used(server(tmp_path), kept())
        for name in ("look", "read", "all"):
            monkeypatch.setattr(ContextFiles, name, noting(getattr(ContextFiles, name)))
        other = server(tmp_path)
        await used(other, base=await other.find(context.id, "a"))
        assert await ids(other) == [context.id]
        assert threads and threading.main_thread() not in threads

    played(play)


def test_a_new_context_is_no_reason_to_look_for_prefixes(tmp_path: Path) -> None:
    store, one = PrefixStore(tmp_path, {"model": 1}), kept()
    files, past = ContextFiles(store.folder), time.time() - 10
    for number in range(2):
        if number:
            os.utime(store.folder, (past, past))
            assert store.changed() and not store.changed()
        assert files.write(Head(f"ctx_{number:032x}", "a", None, 0.0, 99, "The door"), 300, one)
    files.remove(f"ctx_{0:032x}")
    assert not store.changed()


def test_a_context_expires_when_it_was_not_used() -> None:
    async def play() -> None:
        client = FakeClient(reads=True)
        contexts = Contexts(client, 1e9)
        pinned, [context] = await begun(contexts, kept())
        context.ttl = 0
        contexts._touch(context)
        await asyncio.sleep(0.05)
        assert await contexts.find(context.id, "a") is context  # its request has not ended
        pinned.close()
        await until(lambda: not contexts._contexts)
        assert await ids(contexts) == [] and client.aborted == [context.pin.stream.request_id]
        with pytest.raises(RequestError, match=r"it expired at 20\d\d-.*: send the text again"):
            await contexts.find(context.id, "a")
        with pytest.raises(RequestError) as error:
            await contexts.find(context.id, "b")
        assert "expired" not in str(error.value)

    played(play)


def test_expired_ones_say_so_after_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        context = await used(server(tmp_path), kept())
        [path] = stored_in(tmp_path)
        past = time.time() - 3610
        os.utime(path, (past, past))
        with pytest.raises(RequestError, match=r"it expired at 20\d\d-.*: send the text again"):
            await server(tmp_path).find(context.id, "a")
        with pytest.raises(RequestError) as error:
            await server(tmp_path).find(context.id, "b")
        assert "expired" not in str(error.value)

    played(play)


def contexts_of_other_models(store: Path) -> list[Path]:
    """Contexts of three models, in this order: expired, not used for two days, just used.

    The last lies where contexts were before they had a folder of their own.
    """
    found, day = [], 86400.0
    for number, (age, ttl) in enumerate([(3700.0, 3600), (2 * day, 604800), (0.0, 3600)]):
        folder = PrefixStore(store, {"model": number}).folder
        one, id_ = kept(), f"ctx_{number:032x}"
        assert ContextFiles(folder).write(Head(id_, "a", None, 0.0, 99, "The door"), ttl, one)
        found.append(folder / f"contexts.d/{id_}.context")
        os.utime(found[-1], (time.time() - age,) * 2)
    found[-1].rename(folder / found[-1].name)
    return found


@pytest.mark.parametrize(("flags", "left"), [([], 2), (["--older-than", "1"], 1)])
def test_prune_removes_expired_contexts_of_all_models(
    flags: list[str], left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = contexts_of_other_models(tmp_path)
    assert main(["store", "prune", str(tmp_path), *flags]) == 0
    assert [path for path in files if path.exists()] == files[3 - left :]
    assert f"removed {3 - left};" in capsys.readouterr().out


def test_a_server_that_starts_removes_expired_contexts_of_all_models(tmp_path: Path) -> None:
    files = contexts_of_other_models(tmp_path)
    with fake_server("--prefix-store", str(tmp_path)) as starting:
        url = starting.url()
        assert wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 60)
    assert [path for path in files if path.exists()] == files[1:]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "head"])
def test_damaged_files_are_no_contexts(tmp_path: Path, damage: str) -> None:
    files, one = ContextFiles(tmp_path), kept()
    id_ = f"ctx_{0:032x}"
    assert files.write(Head(id_, "a", None, 0.0, len(one.text.tokens), "The door"), 300, one)
    assert files.read(id_) == (files.look([id_])[id_], one)
    [path] = stored_in(tmp_path)
    data = path.read_bytes()
    at = data.index(one.text.token_bytes)
    changed = {
        "cut": data[:-9],
        "flipped": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "empty": b"",
        "head": b"\xff" * 8 + data[8:],
    }
    path.write_bytes(changed[damage])
    assert files.read(id_) is None
    past = time.time() - 8 * 86_400  # longer than any context lives
    os.utime(path, (past, past))
    assert files.all() == [] and not path.exists()


@pytest.mark.parametrize("stored", [True, False])
def test_messages_that_only_call_tools_are_kept_and_listed(stored: bool, tmp_path: Path) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    call = {"role": "assistant", "content": None, "tool_calls": [called]}
    told = {"role": "tool", "tool_call_id": "c1", "content": MESSAGES[0]["content"]}

    async def play() -> None:
        client = FakeClient(tmp_path if stored else None, reads=True)
        contexts = Contexts(client, 1e9)
        both = parsed("chat", messages=[call, told, *MESSAGES]).contexts
        pinned, found = await begun(contexts, *both)
        pinned.close()
        await asyncio.gather(*contexts._writing.values())
        assert [context.users for context in found] == [0, 0]
        assert await ids(contexts) == [context.id for context in found]
        assert all(one["begins"] for one in await contexts.listed("a", None))
        for context in found:
            await contexts.end(context.id, "a")
        assert client.aborted == [add.id for add in client.adds] and await ids(contexts) == []

    played(play)


def test_a_disk_that_fails_at_the_end_of_a_request_leaves_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        contexts = server(tmp_path)
        both = [kept("One."), kept("One. " + DOCUMENT)]
        pinned, found = await begun(contexts, *both)
        monkeypatch.setattr(contexts, "_write", mock.Mock(side_effect=OSError("it is gone")))
        with pytest.raises(OSError, match="it is gone"):
            pinned.close()
        assert len(found) == 2 and [context.users for context in found] == [0, 0]

    played(play)


def test_a_pinned_prefix_is_the_last(tmp_path: Path) -> None:
    """Marks of one request continue each other, and what was pinned is not read anew."""

    async def play() -> None:
        client = FakeClient(reads=True)
        contexts = Contexts(client, 1e9)
        marks = [part(DOCUMENT, cache_control=MARK), part(DOCUMENT, cache_control=MARK)]
        both = parsed("chat", messages=[user(*marks)]).contexts
        pinned, [first, second] = await begun(contexts, *both)
        assert isinstance(pinned, Pinned) and pinned.last is second.pin
        assert [add.prefix for add in client.adds] == [None, first.pin.stream.request_id]
        assert client.adds[1].id == second.pin.stream.request_id and second.parent is first
        again, found = await begun(contexts, *both)
        assert found == [first, second] and len(client.adds) == 2
        for one in (pinned, again):
            one.close()
        await contexts.end(first.id, "a")
        assert second.is_pinned and await ids(contexts) == [second.id]

    played(play)
