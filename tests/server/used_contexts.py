"""Contexts of a server without an engine, as its requests use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from razor_dist.api.contexts import KeptContext
from razor_dist.frontend.client import EngineClient
from razor_dist.server.context import Context
from razor_dist.server.contexts import Contexts
from tests.server.fake_client import FakeClient
from tests.server.marked import DOCUMENT, MARK, parsed, part, user

MESSAGES = [user(part(DOCUMENT, cache_control=MARK))]


def kept(text: str = "", ttl: int = 3600) -> KeptContext:
    content = part(f"{text} {DOCUMENT}", cache_control=MARK)
    [found] = parsed("chat", messages=[user(content)]).contexts
    return msgspec.structs.replace(found, ttl=ttl)


def server(folder: Path) -> Contexts:
    return contexts_of(FakeClient(folder, reads=True))


def contexts_of(client: EngineClient, most: float = 1e9) -> Contexts:
    """Contexts of a server that looks all the time at what others do to those of its store."""
    return Contexts(client, most, watch_seconds=0.01)


async def begun(contexts: Contexts, *new: KeptContext, base: Context | None = None) -> Any:
    found = await contexts.use(base, new, "a", None)
    assert found is not None
    await asyncio.sleep(0)  # its pins hear of what was prefilled
    return found


async def used(contexts: Contexts, *new: KeptContext, base: Context | None = None) -> Context:
    """A whole request; the last context that it uses."""
    pinned, found = await begun(contexts, *new, base=base)
    pinned.close()
    await contexts.written()
    last: Context = found[-1]
    return last


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def ids(contexts: Contexts) -> list[str]:
    return [one["id"] for one in await contexts.listed("a", None)]


def stored_in(store: Path) -> list[Path]:
    return list(store.glob("contexts.d/*"))
