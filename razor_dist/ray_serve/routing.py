"""The choice of an engine for a request: the engine that has the least left to read.

Prompts are compared by a chain of hashes. Reading, waiting and answering are counted in one unit,
bytes of JSON. Why this is not Ray's ``PrefixCacheAffinityRouter`` is in docs/LOG.md.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

# Bytes of a block: prompts are compared in whole blocks.
BLOCK_BYTES = 512
# An answer slows other requests down as much as this much of a prompt: answers share steps.
ANSWER_BYTES = 256
# Blocks that are remembered of each engine: 256 MiB of text in about 80 MB.
_REMEMBERED = 1 << 19
_HASH_BYTES = 8

Engine = TypeVar("Engine", bound=Hashable)

_NONE = msgspec.Raw()  # of a field that is not there


@dataclass
class Route:
    """The part of a request that decides which engine answers it.

    Attributes
    ----------
    length : int
        Bytes of the prompt as JSON.
    blocks : tuple of bytes
        Of each whole block of `BLOCK_BYTES` bytes: the hash of the prompt up to its end.
    holder : str
        `engine_tag` of the engine whose context is asked for; empty if none is.
    avoid : mapping of str to bool
        Ids of replicas that could not answer, and whether their caches were lost.
    is_read : bool
        The answer has begun. The ingress sets it, in this very object, while the router counts it.
    """

    length: int = 0
    blocks: tuple[bytes, ...] = field(default=(), repr=False)
    holder: str = ""
    avoid: Mapping[str, bool] = field(default_factory=dict)
    is_read: bool = field(default=False, compare=False)


class _Fields(msgspec.Struct):
    """A body's fields that decide a route; the prompt's fields as the bytes that were sent.

    Other fields are not decoded, since other threads wait meanwhile: 64 MiB take 16 ms (one text)
    to 130 ms (the smallest values), where `json.loads` takes 0.1 to 5 s.
    """

    # All endpoints' fields of the prompt, in the order in which they become the prompt.
    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = msgspec.Raw(b"null")
    context: str | None = None


_decoder = msgspec.json.Decoder(_Fields)


def route_of(body: bytes | bytearray, owner: str) -> Route:
    """Return the route of a body; of an invalid body, an empty route: any engine may refuse it.

    Prompts of different ``owner`` or ``cache_salt`` share nothing, as in the prefix cache.
    """
    try:
        *prompt, salt, context = msgspec.structs.astuple(_decoder.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Route()
    before = b"%s\n%s\n" % (owner.encode(), bytes(salt))
    blocks = []
    data = memoryview(b"".join(prompt))
    for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
        link = hashlib.blake2b(before, digest_size=_HASH_BYTES)
        link.update(data[end - BLOCK_BYTES : end])
        before = link.digest()
        blocks.append(before)
    return Route(len(data), tuple(blocks), tag_of(context or ""))


def engine_tag(replica: str) -> str:
    """Return the 8 hexadecimal digits with which the ids of an engine's contexts begin."""
    return hashlib.blake2b(replica.encode(), digest_size=4).hexdigest()


def tag_of(context: str) -> str:
    """Return the `engine_tag` in a context's id."""
    return context.removeprefix("ctx_")[:8]


class EngineTable(Generic[Engine]):
    """The prompts that each engine has read, and its requests in flight, as routed here."""

    def __init__(self) -> None:
        self._read: dict[Engine, OrderedDict[bytes, None]] = {}
        # Requests in flight, and the bytes that their engines had not read.
        self._placed: dict[str, tuple[Engine, int, Route]] = {}

    def update(self, engines: Collection[Engine]) -> None:
        """Forget all engines but these."""
        for engine in self._read.keys() - set(engines):
            self.forget(engine)

    def forget(self, engine: Engine) -> None:
        """Forget an engine's prompts: it was lost or started again."""
        self._read.pop(engine, None)

    def unread(self, engine: Engine, route: Route) -> int:
        """Return the bytes of a prompt that an engine has not read."""
        read: Collection[bytes] = self._read.get(engine, ())
        count = 0
        for block in route.blocks:
            if block not in read:
                break
            count += 1
        return route.length - count * BLOCK_BYTES

    def order(self, engines: Mapping[Engine, str], route: Route) -> list[Engine]:
        """Return engines by the bytes to be read before an answer could begin, fewest first.

        The prompt's own unread bytes count twice, since they delay later requests as well: counted
        once, a text would be read and cached on a second engine for a slightly earlier answer.
        ``engines`` maps to replica ids. Of equal engines the least cached is first.
        """
        left = dict.fromkeys(engines, 0)
        for engine, unread, placed in self._placed.values():
            if engine in left:
                left[engine] += ANSWER_BYTES + (0 if placed.is_read else unread)

        def cost(engine: Engine) -> tuple[bool, bool, int, int]:
            replica = engines[engine]
            return (
                replica in route.avoid,
                route.holder not in ("", engine_tag(replica)),
                left[engine] + 2 * self.unread(engine, route),
                len(self._read.get(engine, ())),
            )

        return sorted(engines, key=cost)

    def place(self, engine: Engine, request: str, route: Route) -> None:
        """Note that an engine answers a request, and has read its prompt from then on."""
        if request in self._placed and self._placed[request][0] == engine:
            return
        self._placed[request] = engine, self.unread(engine, route), route
        read = self._read.setdefault(engine, OrderedDict())
        # In reverse, so that a prompt's end is forgotten first: its beginning is often shared.
        for block in reversed(route.blocks):
            read[block] = None
            read.move_to_end(block)
        while len(read) > _REMEMBERED:
            read.popitem(last=False)

    def end(self, request: str) -> None:
        """Note that a request has ended."""
        self._placed.pop(request, None)
