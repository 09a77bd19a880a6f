"""A stored prefix's manifest, its name and the names of its parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from razor_dist.parallel.sharding import cut_chunks
from razor_dist.parallel.zigzag import Chunk
from razor_dist.prefix.parts import BadPartError

FORMAT = 2  # in format 1, parts did not name their manifest

Tokens = npt.NDArray[np.int32]
Rows = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Manifest:
    """One copy of a node: the layout of its parts."""

    fingerprint: str
    node: str
    copy: str  # random: two writers' parts differ in rounding even where the layout is the same
    parent: str | None  # the node with the tokens before ``begin``; it may have other tokens behind
    begin: int
    end: int
    space: str  # name of the namespace: prompts in different namespaces share nothing
    world_size: int
    chunks: Rows  # of each chunk: begin and end, then begin and end of the chunk as it was read
    tails: tuple[int, ...]  # for each window: the first token in the tail
    kv_parts: int  # files of each rank
    steps: tuple[int, ...]  # for each window: rows of the streaming heads in a part
    state_parts: tuple[int, ...]  # for each window: the number of parts
    nbytes: int
    tokens_sha256: str

    def __post_init__(self) -> None:
        """`ValueError` if the fields contradict each other."""
        windows = (self.tails, self.steps, self.state_parts)
        least_0 = [self.begin, self.kv_parts, self.nbytes, *self.tails, *self.steps]
        least_1 = [self.world_size, *self.state_parts]
        edges = [self.begin, *(edge for a, b, _, _ in self.chunks for edge in (a, b)), self.end]
        if not (
            min(least_0) >= 0
            and min(least_1) >= 1
            and edges == sorted(edges)
            and all(c <= a < b <= d for a, b, c, d in self.chunks)
            and len({len(row) for row in windows}) == 1
        ):
            raise ValueError("its numbers contradict each other")

    @cached_property
    def sha256(self) -> str:
        """Digest of all fields; every part's header has it."""
        return digest(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @property
    def layout(self) -> list[Chunk]:
        """The chunks in which the node's own tokens were read."""
        return [Chunk(a, b, self.world_size, (c, d)) for a, b, c, d in self.chunks]

    @staticmethod
    def rows_of(chunks: list[Chunk], begin: int, end: int) -> Rows:
        """Return ``chunks`` for a part ``[begin, end)`` of a sequence."""
        parts = cut_chunks(chunks, end, begin)
        return tuple((c.begin, c.end, *(c.whole or (c.begin, c.end))) for c in parts)

    def to_json(self) -> str:
        return json.dumps({**self._fields, "sha256": self.sha256}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest; `BadPartError` if it is damaged or of another format."""
        try:
            fields = json.loads(text)
            stated = fields.pop("sha256")
            if stated != digest(fields):
                raise BadPartError("its manifest is damaged")
            if (version := fields.pop("format")) != FORMAT:
                raise BadPartError(f"its format is {version}, and this version reads {FORMAT}")
            return msgspec.convert(fields, cls)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadPartError(f"its manifest is damaged ({error!r:.100})") from None

    def files(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Stream the names of the node's parts, each with what its header must have."""
        for rank in range(self.world_size):
            for part in range(self.kv_parts):
                yield kv_part(rank, part), part_header(self.sha256, rank=rank, part=part)
        for window, parts in enumerate(self.state_parts):
            for part in range(parts):
                yield state_part(window, part), part_header(self.sha256, window=window, part=part)


def part_header(manifest: str, **part: int) -> dict[str, str]:
    """Return a part's header: the digest of its manifest, and which part it is."""
    return {"manifest": manifest, **{name: str(number) for name, number in part.items()}}


def kv_part(rank: int, part: int) -> str:
    """Name of a file with keys and values of retrieval heads in one rank's shard."""
    return f"kv-{rank:03d}-{part:05d}.safetensors"


def state_part(window: int, part: int) -> str:
    """Name of a file with some streaming heads of one window."""
    return f"state-{window:03d}-{part:05d}.safetensors"


class Names:
    """Names of namespaces and nodes: keyed hashes, which hide salts and texts."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def namespace(self, cache_salt: str | None, mark: int) -> str:
        """Name the namespace of one cache salt and one set of rotary frequencies."""
        return self._digest(
            f"{mark} {'none' if cache_salt is None else 'salt ' + cache_salt}".encode()
        )

    def node(self, namespace: str, tokens: Tokens) -> str:
        """Name the node of a text, by all its ``tokens`` from the first one to the node's last."""
        return self._digest(namespace.encode(), np.ascontiguousarray(tokens, "<i4").tobytes())

    def _digest(self, *texts: bytes) -> str:
        found = hashlib.blake2b(key=self._secret, digest_size=16)
        for text in texts:
            found.update(text)
        return found.hexdigest()


def tokens_digest(tokens: Tokens) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).hexdigest()


def digest(fields: dict[str, Any]) -> str:
    """SHA-256 of fields as JSON with sorted keys."""
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
