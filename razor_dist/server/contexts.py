"""Contexts over HTTP: pinned prefixes with an id, an owner and a time to live."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from razor_dist.api.contexts import KeptContext
from razor_dist.api.errors import NotReadyError
from razor_dist.config.errors import RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.pins import Pin, Pinned
from razor_dist.server.context import (
    Context,
    Held,
    Name,
    described,
    entry,
    new_context,
    passed,
)
from razor_dist.server.context_files import GRACE_SECONDS, ContextFiles

# Ended contexts whose ids are remembered, so that a late request learns why there is none.
_REMEMBERED = 1000

# Seconds between two looks for contexts that have expired, or that other servers have deleted:
# fewer than those for which the file of an expired one stays, which may be in use here.
_WATCH_SECONDS = GRACE_SECONDS / 3


class Contexts:
    """The contexts of all keys; ``most`` are the bytes of KV cache that one key's may take.

    Their ids begin with ``tag``, hexadecimal digits by which a router finds this engine. With
    ``has_store`` some may be known only once the engine has said where it stores prefixes.
    Those that expire, or that other servers delete, are forgotten within ``watch_seconds``.
    """

    def __init__(
        self,
        client: EngineClient,
        most: float,
        tag: str = "",
        *,
        has_store: bool = False,
        watch_seconds: float = _WATCH_SECONDS,
    ) -> None:
        self._client, self.most, self._tag = client, int(most), tag
        self._has_store, self._watch_seconds = has_store, watch_seconds
        self._contexts, self._by_name = dict[str, Context](), dict[Name, Context]()
        self._stored_in: ContextFiles | None = None
        self._writing: dict[Context, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._ended: OrderedDict[str, tuple[str | None, str]] = OrderedDict()  # owner, and how

    async def find(self, id_: str, owner: str | None) -> Context:
        """Return a context of a key; `RequestError` (``context_not_found``) if there is none.

        `NotReadyError` while that is not known.
        """
        if id_ in self._contexts:
            await self._look([self._contexts[id_]])
        else:
            self._require_known()
            await self._read(id_, owner)
        return self._known(id_, owner)

    def _known(self, id_: str, owner: str | None) -> Context:
        found = self._contexts.get(id_)
        if found is not None and found.head.owner == owner:
            return found
        whose, how = self._ended.get(id_, (owner, ""))
        if not self.most:
            how = "; this server keeps none: it runs without --pinned-gb"
        raise RequestError(
            f"there is no context {id_!r:.80}" + (how if whose == owner else ""),
            param="context",
            code="context_not_found",
        )

    def _require_known(self) -> None:
        """Raise `NotReadyError` until the engine has said where contexts are stored."""
        if self.most and self._has_store and self._files is None:
            raise NotReadyError(self._client.status)

    @property
    def _files(self) -> ContextFiles | None:
        info = self._client.info  # None while the ranks start again
        if self.most and info is not None and info.prefix_folder is not None:
            self._stored_in = ContextFiles(Path(info.prefix_folder))
        return self._stored_in

    async def _look(self, contexts: Iterable[Context]) -> None:
        """Take in what other servers have done to contexts; forget those that one has deleted."""
        files, stored = self._files, [context for context in contexts if context.stored]
        if files is None or not stored:
            return
        ids = [context.id for context in stored]
        for id_, seen in (await asyncio.to_thread(files.look, ids)).items():
            context = self._contexts.get(id_)
            if context is None:  # ended meanwhile
                continue
            if seen is None:
                self._forget(context, "; it was deleted")
            else:
                context.used, context.ttl = max(context.used, seen.used), max(context.ttl, seen.ttl)

    async def _watch(self) -> None:
        """Forget contexts that expire, or that other servers delete, as long as there are any."""
        while self._contexts:
            await asyncio.sleep(self._watch_seconds)
            await self._look(list(self._contexts.values()))
            for context in [c for c in self._contexts.values() if c.expires <= time.time()]:
                if context.users:
                    self._touch(context)  # else another server would remove its file
                else:
                    self._forget(context, _expired(context))

    def _enter(self, context: Context) -> None:
        self._contexts[context.id] = context
        self._by_name.setdefault(context.name, context)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _read(self, id_: str, owner: str | None) -> None:
        """Take in a key's context that another server has kept, or this one before its restart."""
        files, ended = self._files, self._ended.get(id_)
        found = None if files is None else await asyncio.to_thread(files.read, id_)
        if found is None or found[0].head.owner != owner:
            return
        if id_ in self._contexts or self._ended.get(id_) is not ended:  # meanwhile
            return
        stored, kept = found
        context = Context(*stored, kept, stays=True, stored=True)
        if context.expires < time.time():
            self._remember(context, _expired(context))
        else:
            self._enter(context)

    def _write(self, context: Context) -> None:
        """Keep a context in a file, if there is a store."""
        files, ended = self._files, self._contexts.get(context.id) is not context
        if files is None or ended or context.stored or context in self._writing:
            return

        async def write() -> None:
            try:
                parts = context.head, context.ttl, context.kept
                written = await asyncio.to_thread(files.write, *parts)
            finally:
                del self._writing[context]
            if self._contexts.get(context.id) is not context:  # ended meanwhile
                files.remove(context.id)
            elif written:
                context.stored = True
                self._touch(context, stated=True)  # its time to live may have changed

        self._writing[context] = asyncio.create_task(write())

    async def written(self) -> None:
        """Wait until no context is being written to a file."""
        await asyncio.gather(*self._writing.values())

    async def listed(self, owner: str | None, held: Held | None) -> list[dict[str, Any]]:
        """Return a key's contexts as `described` does, those that only files have as well.

        `NotReadyError` while they are not known.
        """
        self._require_known()
        await self._look([c for c in self._contexts.values() if c.head.owner == owner])
        files = self._files
        stored = [] if files is None else await asyncio.to_thread(files.all)
        own = [c for c in self._contexts.values() if c.head.owner == owner]
        return [described(context, held) for context in own] + [
            entry(one)
            for one in stored
            if one.head.owner == owner and one.head.id not in self._contexts
        ]

    def retry_after(self) -> int:
        """Whole seconds, at least 1, until the first pinned context may expire."""
        pinned = [context.expires for context in self._contexts.values() if context.is_pinned]
        return max(1, math.ceil(min(pinned, default=0.0) - time.time()))

    async def end(self, id_: str, owner: str | None) -> None:
        """End a context; requests that continue it go on."""
        self._forget(await self.find(id_, owner), "; it was deleted")

    async def use(
        self,
        base: Context | None,
        kept: Sequence[KeptContext],
        owner: str | None,
        salt: str | None,
        priority: int = 0,
    ) -> tuple[Pinned, list[Context]] | None:
        """Return the pins that a request continues, and the contexts that it uses.

        The request names ``base``, and marks its beginnings ``kept``, which are pinned with its
        ``priority``. The contexts do not expire before it has ended. None if it continues nothing.
        Raises as `EngineClient.submit`, and as `find` if ``base`` has ended.
        """
        salt = salt if base is None else base.head.salt
        known = [self._by_name.get((owner, salt, one.digest)) for one in kept]
        await self._look([context for context in (base, *known) if context is not None])
        used, new = list[Context](), list[Pin]()
        try:
            if base is not None:
                used.append(self._known(base.id, owner))  # it may have ended since it was found
                before = used[0].before(self._contexts.values())
                new += used[0].require_pin(self._client, before, self.most, priority)
                used[0].named = True
            for one in kept:
                if used and len(one.text.tokens) <= used[-1].head.tokens:
                    continue
                blank = new_context(one, owner, salt, self._tag)
                found = self._by_name.get(blank.name, blank)
                before = found.before(self._contexts.values())
                for context in passed(before, [*known, *used]):
                    self._forget(context, "; its mark has moved on: name the longer context")
                pin = self._client, before, self.most, priority
                new += found.require_pin(*pin, hint=True)
                found.ttl = max(found.ttl, one.ttl)
                self._enter(found)
                self._touch(found, stated=True)
                used.append(found)
        except BaseException:
            self._drop_unread(used)
            raise
        if not used:
            return None
        for context in used:
            context.users += 1
            self._touch(context)

        def end(answered: bool) -> None:
            for context in used:  # of all, also if the disk fails in the next loop
                context.users -= 1
            for context in used:
                self._touch(context)
                pin = context.pin
                if pin is not None and (pin.is_whole or (answered and pin.is_kept)):
                    context.stays = True
                    self._write(context)
            self._drop_unread(used)

        return Pinned([context.pin for context in used if context.pin], new, end), used

    def _drop_unread(self, contexts: Sequence[Context]) -> None:
        """Forget contexts that were refused, or whose requests have gone before they were read."""
        for context in contexts:
            if not (context.users or context.stays):
                self._forget(context, "")

    def _touch(self, context: Context, *, stated: bool = False) -> None:
        """Begin a context's time to live anew.

        If no request has ``stated`` it, the file's stays: another server may have lengthened it.
        """
        if self._contexts.get(context.id) is not context:
            return
        context.used = time.time()
        if context.stored and self._files is not None:
            self._files.touch(context.id, context.ttl if stated else None)

    def _forget(self, context: Context, how: str) -> None:
        if self._contexts.pop(context.id, None) is None:
            return
        if self._by_name.get(context.name) is context:
            del self._by_name[context.name]
        if context.pin is not None:
            context.pin.close()
        if context.stored and self._files is not None:
            self._files.remove(context.id)
        self._remember(context, how)

    def _remember(self, context: Context, how: str) -> None:
        self._ended[context.id] = context.head.owner, how
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


def _expired(context: Context) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(context.expires))
    return f"; it expired at {when}: send the text again"
