"""A context of one key: a pinned beginning of conversations, with an id and a time to live."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from razor_dist.api.contexts import KeptContext
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.pins import Pin
from razor_dist.server.context_files import ContextHead, Stored

# Marks move on from contexts of at most this time to live, the longest in Anthropic's clients.
_MOVES_SECONDS = 3600
# Characters of a context's text in a list.
_BEGINS = 120
# Bytes of a context that this server has not pinned.
_UNKNOWN: dict[str, int | None] = {"device": 0, "host": None, "disk": None}
# `Counters.pinned`.
Held = Mapping[str, Mapping[str, int]]
# An owner, a salt and a digest, equal for two requests that keep the same context.
Name = tuple[str | None, str | None, bytes]


@dataclass(eq=False)
class Context:
    head: ContextHead
    ttl: int  # seconds from its last use on
    used: float  # by the wall clock
    kept: KeptContext
    pin: Pin | None = None  # None after a restart, until it is used
    named: bool = False  # a request has named it, so it stays when a mark moves on
    stays: bool = False  # until it expires: it was pinned as a whole once, or an answer named it
    stored: bool = False  # in a file
    users: int = 0  # requests in flight that continue it

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def is_pinned(self) -> bool:
        return self.pin is not None and self.pin.is_kept

    @property
    def name(self) -> Name:
        return self.head.owner, self.head.salt, self.kept.digest

    @property
    def expires(self) -> float:
        return self.used + self.ttl

    @property
    def brief(self) -> dict[str, Any]:
        """The context as an answer names it."""
        return {"id": self.id, "tokens": self.head.tokens, "expires_at": int(self.expires)}

    def begins_with(self, other: Context) -> bool:
        """True if a shorter context of the same key and salt is the beginning of this one."""
        if (self.head.owner, self.head.salt) != (other.head.owner, other.head.salt):
            return False
        shorter = other.head.tokens < self.head.tokens
        return shorter and self.kept.text.token_bytes.startswith(other.kept.text.token_bytes)

    def before(self, contexts: Iterable[Context]) -> list[Context]:
        """Return the pinned contexts that this one begins with, by ascending length."""
        found = (one for one in contexts if one.is_pinned and self.begins_with(one))
        return sorted(found, key=lambda one: one.head.tokens)

    def require_pin(
        self,
        client: EngineClient,
        before: Sequence[Context],
        most: int,
        priority: int,
        *,
        hint: bool = False,
    ) -> list[Pin]:
        """Pin the context, unless it is pinned, behind the last of the contexts ``before``.

        ``most`` are the bytes that its key's contexts may take. Returns a new pin, if any.
        """
        if self.pin is not None and self.is_pinned:
            self.pin.hint = self.pin.hint and hint
            return []
        self.pin = Pin(
            client,
            self.kept.text.tokens,
            behind=before[-1].pin if before else None,
            quota=(self.head.owner or "", most),
            cache_salt=self.head.salt,
            priority=priority,
            hint=hint,
        )
        return [self.pin]


def passed(before: Sequence[Context], but: Sequence[Context | None]) -> list[Context]:
    """Return the contexts ``before`` a new one from which marks have moved on.

    The longest stays until the new one is whole. A context that a request has named, or keeps for
    longer than Anthropic's clients can, is not among them: its owner goes on with it by its id.
    """
    if not before or before[-1].pin is None or not before[-1].pin.is_whole:
        return []
    found = [one for one in before[:-1] if not (one.named or one.users or one in but)]
    return [one for one in found if one.ttl <= _MOVES_SECONDS]


def new_context(kept: KeptContext, owner: str | None, salt: str | None, tag: str) -> Context:
    now = time.time()
    id_ = f"ctx_{tag}{secrets.token_hex(16)[len(tag) :]}"
    head = ContextHead(id_, owner, salt, now, len(kept.text.tokens), _beginning(kept))
    return Context(head, kept.ttl, now, kept)


def _beginning(kept: KeptContext) -> str:
    """Return the beginning of what the user said, or of all, if that is nothing."""
    messages = sorted(kept.messages, key=lambda message: message["role"] != "user")
    # A message that calls tools may have no content.
    return next(filter(None, (one.get("content") for one in messages)), "")[:_BEGINS]


def described(context: Context, held: Held | None) -> dict[str, Any]:
    """Return a context as ``/v1/contexts`` has it.

    ``held`` has the bytes in host memory and on disk by pinned request. They are null without it,
    while the engine is too busy to tell, and after a restart until the context is used.
    """
    nbytes = _UNKNOWN
    if context.is_pinned and context.pin is not None:
        none = {"host": 0, "disk": 0}
        lower = {} if held is None else held.get(context.pin.stream.request_id, none)
        nbytes = {**_UNKNOWN, "device": context.pin.nbytes, **lower}
    return entry(context, nbytes)


def entry(of: Context | Stored, nbytes: Mapping[str, int | None] = _UNKNOWN) -> dict[str, Any]:
    return {
        "id": of.head.id,
        "tokens": of.head.tokens,
        "expires_at": int(of.expires),
        "object": "context",
        "begins": of.head.begins,
        "created_at": int(of.head.created),
        "last_used_at": int(of.used),
        "ttl": of.ttl,
        "bytes": nbytes,
    }
