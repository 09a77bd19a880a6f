"""Contexts over HTTP: pinned prefixes with an id, an owner and a time to live."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from razor_dist.api.contexts import KeptContext
from razor_dist.config.errors import RequestError
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.pins import Pin, Pinned
from razor_dist.protocol.messages import Fields

# Ended contexts whose ids are remembered, so that a late request learns why there is none.
_REMEMBERED = 1000


@dataclass(eq=False)
class Context:
    id: str
    owner: str | None  # `KeyHolder.id`
    salt: str | None  # of its cache namespace
    kept: KeptContext
    parent: Context | None  # with whose tokens it begins
    pin: Pin
    created: float  # by the wall clock, as is `used`
    used: float
    ttl: int  # seconds from its last use on
    users: int = 0  # requests in flight that continue it
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def name(self) -> bytes:
        """What another request's context has if it is the same."""
        about = f"{self.owner}\n{self.salt}\n{self.kept.goes_on}\n".encode()
        return hashlib.sha256(about + self.kept.text.digest + self.kept.text.token_bytes).digest()

    @property
    def expires(self) -> float:
        return self.used + self.ttl

    @property
    def brief(self) -> Fields:
        """What an answer tells of it."""
        tokens = len(self.kept.text.tokens)
        return {"id": self.id, "tokens": tokens, "expires_at": int(self.expires)}


class Contexts:
    """The contexts of all keys; ``most`` are the bytes of KV cache that one key's may take."""

    def __init__(self, client: EngineClient, most: float) -> None:
        self._client, self._most = client, int(most)
        self._contexts: dict[str, Context] = {}
        self._by_name: dict[bytes, Context] = {}
        self._ended: OrderedDict[str, tuple[str | None, str]] = OrderedDict()  # owner, and how

    def find(self, id_: str, owner: str | None) -> Context:
        """Return a context of a key; `RequestError` (``context_not_found``) if there is none."""
        found = self._contexts.get(id_)
        if found is not None and found.owner == owner:
            return found
        whose, how = self._ended.get(id_, (owner, ""))
        if not self._most:
            how = "; this server keeps none: it runs without --pinned-gb"
        raise RequestError(
            f"there is no context {id_!r:.80}" + (how if whose == owner else ""),
            param="context",
            code="context_not_found",
        )

    def of(self, owner: str | None) -> list[Context]:
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
        if base is not None and not base.pin.is_kept:  # the engine was started again
            base.pin = self._pin(base.kept, base.parent, owner, base.salt)
            new.append(base.pin)
        for one in kept:
            before = used[-1] if used else None
            if before is not None and len(one.text.tokens) <= before.pin.tokens:
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
                if not context.pin.is_kept or not (context.users or context.pin.is_whole):
                    self._forget(context, "")  # refused, or its request has gone before it was read

        return Pinned([context.pin for context in used], new, end), used

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
        blank = Context(id_, owner, salt, kept, before, None, now, now, kept.ttl)  # type: ignore[arg-type]
        found = self._by_name.get(blank.name)
        if found is not None and found.pin.is_kept:
            found.ttl = kept.ttl
            return found
        context = found or blank
        context.pin = self._pin(kept, before, owner, salt)
        new.append(context.pin)
        self._contexts[context.id] = self._by_name[context.name] = context
        return context

    def _pin(
        self, kept: KeptContext, before: Context | None, owner: str | None, salt: str | None
    ) -> Pin:
        behind = None if before is None or not before.pin.is_kept else before.pin
        quota = owner or "", self._most
        tokens = kept.text.tokens
        return Pin(self._client, tokens, behind=behind, quota=quota, cache_salt=salt)

    def _touch(self, context: Context) -> None:
        """Begin its time to live anew."""
        if self._contexts.get(context.id) is not context:
            return
        context.used = time.time()
        if context.timer is not None:
            context.timer.cancel()
        loop = asyncio.get_running_loop()
        context.timer = loop.call_later(context.ttl, self._expire, context)

    def _expire(self, context: Context) -> None:
        if not context.users:  # else its time begins when they have ended
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(context.expires))
            self._forget(context, f"; it expired at {when}: send the text again")

    def _forget(self, context: Context, how: str) -> None:
        if self._contexts.pop(context.id, None) is None:
            return
        if self._by_name.get(context.name) is context:
            del self._by_name[context.name]
        if context.timer is not None:
            context.timer.cancel()
        context.pin.close()
        context.parent = None
        self._ended[context.id] = context.owner, how
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


def described(context: Context, tiers: Callable[[str], Fields] | None) -> dict[str, Any]:
    """Return a context as ``/v1/contexts`` has it.

    ``tiers`` returns the bytes in host memory and on disk of a pinned request; they are null
    without it, while the engine is too busy to tell.
    """
    lower = (
        dict.fromkeys(("host", "disk")) if tiers is None else tiers(context.pin.stream.request_id)
    )
    device = context.pin.nbytes if context.pin.is_kept else 0
    return {
        **context.brief,
        "object": "context",
        "created_at": int(context.created),
        "last_used_at": int(context.used),
        "ttl": context.ttl,
        "bytes": {"device": device, **lower},
    }
