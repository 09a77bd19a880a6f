"""Contexts over HTTP: pinned prefixes with an id, an owner and a time to live."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from razor_dist.api.contexts import KeptContext
from razor_dist.config.errors import RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.pins import Pin, Pinned
from razor_dist.protocol.messages import Fields
from razor_dist.server.context_files import ContextFiles, Head

# Ended contexts whose ids are remembered, so that a late request learns why there is none.
_REMEMBERED = 1000
# Characters of a context's text in a list.
_BEGINS = 120


@dataclass(eq=False)
class Context:
    id: str
    owner: str | None  # `KeyHolder.id`
    salt: str | None  # of its cache namespace
    kept: KeptContext
    parent: Context | None  # with whose tokens it begins
    pin: Pin | None  # None after a restart, until it is used
    created: float  # by the wall clock, as is `used`
    used: float
    ttl: int  # seconds from its last use on
    stored: bool = False  # in a file
    users: int = 0  # requests in flight that continue it
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def is_pinned(self) -> bool:
        return self.pin is not None and self.pin.is_kept

    @cached_property
    def name(self) -> bytes:
        """A hash of all that makes a context, equal for two requests that keep the same one."""
        about = f"{self.owner}\n{self.salt}\n{self.kept.goes_on}\n".encode()
        return hashlib.sha256(about + self.kept.text.digest + self.kept.text.token_bytes).digest()

    @property
    def expires(self) -> float:
        return self.used + self.ttl

    @property
    def begins(self) -> str:
        """The beginning of what the user said, to know it again by; of all, if that is nothing."""
        messages = sorted(self.kept.messages, key=lambda message: message["role"] != "user")
        return next(filter(None, (one["content"] for one in messages)), "")[:_BEGINS]

    @property
    def brief(self) -> Fields:
        """The context as an answer names it."""
        tokens = len(self.kept.text.tokens)
        return {"id": self.id, "tokens": tokens, "expires_at": int(self.expires)}


class Contexts:
    """The contexts of all keys; ``most`` are the bytes of KV cache that one key's may take."""

    def __init__(self, client: EngineClient, most: float) -> None:
        self._client, self.most = client, int(most)
        self._contexts: dict[str, Context] = {}
        self._by_name: dict[bytes, Context] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[str, tuple[str | None, str]] = OrderedDict()  # owner, and how

    def find(self, id_: str, owner: str | None) -> Context:
        """Return a context of a key; `RequestError` (``context_not_found``) if there is none."""
        found = self._contexts.get(id_)
        if found is not None and found.stored and self._used(id_) is None:
            self._forget(found, "; it was deleted")  # by another server
            found = None
        elif found is None:
            found = self._read(id_, owner)
        if found is not None and found.owner == owner:
            return found
        whose, how = self._ended.get(id_, (owner, ""))
        if not self.most:
            how = "; this server keeps none: it runs without --pinned-gb"
        raise RequestError(
            f"there is no context {id_!r:.80}" + (how if whose == owner else ""),
            param="context",
            code="context_not_found",
        )

    @property
    def _files(self) -> ContextFiles | None:
        info = self._client.info
        if not self.most or info is None or info.prefix_folder is None:
            return None
        return ContextFiles(Path(info.prefix_folder))

    def _used(self, id_: str) -> float | None:
        return None if self._files is None else self._files.used(id_)

    def _read(self, id_: str, owner: str | None) -> Context | None:
        """Return a key's context that another server has kept, or this one before its restart."""
        files = self._files
        found = None if files is None else files.read(id_)
        used = self._used(id_)
        if found is None or used is None or found[0].owner != owner:
            return None
        head, kept = found
        left = used + head.ttl - time.time()
        if left < 0:
            return None
        context = Context(
            id_, owner, head.salt, kept, None, None, head.created, used, head.ttl, stored=True
        )
        self._contexts[id_] = context
        self._by_name.setdefault(context.name, context)
        self._arm(context, left)
        return context

    def _write(self, context: Context) -> None:
        """Keep a context in a file, if there is a store."""
        files = self._files
        if files is None or context.stored:
            return
        head = Head(context.id, context.owner, context.salt, context.created, context.ttl)

        async def write() -> None:
            await asyncio.to_thread(files.write, head, context.kept)
            context.stored = True
            if self._contexts.get(context.id) is not context:  # ended meanwhile
                files.remove(context.id)

        task = asyncio.create_task(write())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    def of(self, owner: str | None) -> list[Context]:
        for head in [] if self._files is None else self._files.heads():
            if head.owner == owner and head.id not in self._contexts:
                self._read(head.id, owner)
        return [context for context in self._contexts.values() if context.owner == owner]

    def end(self, id_: str, owner: str | None) -> None:
        """End a context; requests that continue it go on."""
        self._forget(self.find(id_, owner), "; it was deleted")

    def use(
        self,
        base: Context | None,
        kept: Sequence[KeptContext],
        owner: str | None,
        salt: str | None,
    ) -> tuple[Pinned, list[Context]] | None:
        """Return what a request continues that names ``base``, and whose beginnings are kept.

        With it the contexts come that it uses, which do not expire before it has ended. None if it
        continues nothing. Raises as `EngineClient.submit`.
        """
        used, new = ([] if base is None else [base]), list[Pin]()
        if base is not None and not base.is_pinned:  # it was kept by another engine
            base.pin = self._pin(base.kept, base.parent, owner, base.salt)
            new.append(base.pin)
        for one in kept:
            before = used[-1] if used else None
            if before is not None and len(one.text.tokens) <= len(before.kept.text.tokens):
                continue
            used.append(self._one(one, before, owner, salt if base is None else base.salt, new))
        if not used:
            return None
        for context in used:
            context.users += 1
            self._touch(context)

        def end() -> None:
            for context in used:
                context.users -= 1
                self._touch(context)
                pin = context.pin
                if pin is not None and pin.is_whole:
                    self._write(context)
                elif not context.users and not context.stored:
                    self._forget(context, "")  # refused, or its request has gone before it was read

        return Pinned([context.pin for context in used if context.pin], new, end), used

    def _one(
        self,
        kept: KeptContext,
        before: Context | None,
        owner: str | None,
        salt: str | None,
        new: list[Pin],
    ) -> Context:
        """Return the context of what is to be kept: one that is there, or a new one."""
        now = time.time()
        id_ = f"ctx_{secrets.token_hex(16)}"
        blank = Context(id_, owner, salt, kept, before, None, now, now, kept.ttl)
        found = self._by_name.get(blank.name)
        if found is not None and found.is_pinned:
            found.ttl = kept.ttl
            return found
        context = found or blank
        pin = context.pin = self._pin(kept, before, owner, salt)
        new.append(pin)
        self._contexts[context.id] = self._by_name[context.name] = context
        self._touch(context)
        return context

    def _pin(
        self, kept: KeptContext, before: Context | None, owner: str | None, salt: str | None
    ) -> Pin:
        behind = before.pin if before is not None and before.is_pinned else None
        quota = owner or "", self.most
        tokens = kept.text.tokens
        return Pin(self._client, tokens, behind=behind, quota=quota, cache_salt=salt)

    def _touch(self, context: Context) -> None:
        """Begin its time to live anew."""
        if self._contexts.get(context.id) is not context:
            return
        context.used = time.time()
        if context.stored and self._files is not None:
            self._files.touch(context.id)
        self._arm(context, context.ttl)

    def _arm(self, context: Context, seconds: float) -> None:
        if context.timer is not None:
            context.timer.cancel()
        loop = asyncio.get_running_loop()
        context.timer = loop.call_later(seconds, self._expire, context)

    def _expire(self, context: Context) -> None:
        if context.stored:  # another server may have used it
            context.used = max(context.used, self._used(context.id) or 0.0)
        if (left := context.expires - time.time()) > 0:
            self._arm(context, left)
        elif not context.users:  # else its time begins when they have ended
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(context.expires))
            self._forget(context, f"; it expired at {when}: send the text again")

    def _forget(self, context: Context, how: str) -> None:
        if self._contexts.pop(context.id, None) is None:
            return
        if self._by_name.get(context.name) is context:
            del self._by_name[context.name]
        if context.timer is not None:
            context.timer.cancel()
        if context.pin is not None:
            context.pin.close()
        context.parent = None
        if context.stored and self._files is not None:
            self._files.remove(context.id)
        self._ended[context.id] = context.owner, how
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


def described(context: Context, tiers: Callable[[str], Fields] | None) -> dict[str, Any]:
    """Return a context as ``/v1/contexts`` has it.

    ``tiers`` returns the bytes in host memory and on disk of a pinned request; they are null
    without it, while the engine is too busy to tell, and after a restart until it is used.
    """
    pin = context.pin if context.is_pinned else None
    lower: Fields = {"host": None, "disk": None}
    if pin is not None and tiers is not None:
        lower = tiers(pin.stream.request_id)
    device = 0 if pin is None else pin.nbytes
    return {
        **context.brief,
        "object": "context",
        "begins": context.begins,
        "created_at": int(context.created),
        "last_used_at": int(context.used),
        "ttl": context.ttl,
        "bytes": {"device": device, **lower},
    }
