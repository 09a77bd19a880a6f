"""What is kept of prompts in host memory and on disk: rank 0's account, and what moves next.

Soon after a prompt has been read, what is new in it is copied out (`Op.SAVE`): a *node*, which
follows on the node whose text it shares the beginning with. A prompt that begins like a node gets
that node and those before it back into pages first (`Op.LOAD`), as an entry of the prefix cache
that it then continues. Both go part by part, beside other requests' steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from razor_dist.cache.parts import BadPartError
from razor_dist.cache.radix import RadixIndex, Tokens
from razor_dist.cache.sequence import cut_chunks, shard_lengths
from razor_dist.cache.store import Manifest, Names, PrefixStore
from razor_dist.engine.ledger import Holding, Ledger
from razor_dist.engine.step import Op, StepPlan
from razor_dist.engine.transfer import FAILED, Job, as_payload, kv_parts
from razor_dist.engine.turns import StepCost
from razor_dist.parallel.zigzag import Chunk

log = logging.getLogger(__name__)

Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
Space = tuple[str | None, int]  # a salt, and the mark of positions (`razor_dist.models.longrope`)

# A prompt is saved if so many pages of it, and this part, are in no node: streaming heads' windows
# are written with every node, however little is new.
_WORTH_PAGES, _WORTH_PART = 4, 1 / 16
# Seconds until the ranks' writers are asked again, and until a disk that has failed is.
_WRITER_SECONDS, _DISK_SECONDS = 0.005, 60.0


@dataclass(eq=False)
class Node:
    """The tokens ``[begin, end)`` of a prompt, in host memory, on disk or in both."""

    key: int  # in the index
    manifest: Manifest
    parent: Node | None
    where: set[Tier]
    used_at: float
    children: set[Node] = field(default_factory=set)

    @property
    def chain(self) -> list[Node]:
        """The nodes that have its tokens from the first one on; it is the last."""
        return [*(self.parent.chain if self.parent else ()), self]


@dataclass(frozen=True)
class Found:
    node: Node
    tokens: int  # of a prompt that can be had from it


@dataclass(eq=False)
class Candidate:
    """A sequence that is in the caches as of ``tokens``, and may be saved."""

    key: int
    space: Space
    tokens: Tokens
    holding: Holding


@dataclass(eq=False)
class Saving:
    of: Candidate
    manifest: Manifest
    parent: Node | None
    draft: Path | None
    host: bool
    drop: list[str]  # nodes that leave host memory for it
    payload: Tensor | None  # until the ranks have been told


@dataclass(eq=False)
class Loading:
    key: int
    node: Node
    space: Space
    holding: Holding
    tier: Tier


class Tiers:
    """Nodes by their tokens, and the one save and the one load that are under way.

    ``room`` has the bytes that each tier may take, over all ranks, without those that are not used.
    ``state_parts`` tells for a length, for each window, how many rows of streaming heads make a
    part, and how many parts that makes.
    """

    def __init__(
        self,
        ledger: Ledger,
        cost: StepCost,
        fingerprint: str,
        store: PrefixStore | None,
        room: dict[Tier, float],
        state_parts: Callable[[int], list[tuple[int, int]]],
    ) -> None:
        self._ledger, self._cost, self._fingerprint = ledger, cost, fingerprint
        self._store, self._room, self._state_parts = store, room, state_parts
        self._names = Names(secrets.token_bytes(32)) if store is None else store.names
        self._index = RadixIndex()
        self._nodes: dict[str, Node] = {}
        self._by_key: dict[int, Node] = {}
        self._unreadable: set[str] = set()
        self._keys = 0
        self._clock = dict.fromkeys(TIERS, 0.0)  # of evictions
        self._queue: dict[int, Candidate] = {}
        self.saving: Saving | None = None
        self.loading: Loading | None = None
        self._wait_until, self._disk_failed = 0.0, -math.inf
        self.counts: Counter[str] = Counter()
        self.bytes = dict.fromkeys(TIERS, 0)
        self.refresh()

    @property
    def active(self) -> bool:
        """True if there is anything to move."""
        return bool(self.saving or self.loading or self._queue)

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of each tier that is used, and sequences that are still to be saved."""
        found: dict[str, Any] = {}
        for tier in self._room:
            names = ("hits", "hit_tokens", "evictions", "failures")
            entries = sum(tier in node.where for node in self._nodes.values())
            counts = {name: self.counts[f"{tier}_{name}"] for name in names}
            found[tier] = counts | {"entries": entries, "bytes": self.bytes[tier]}
        return found | {"saving": len(self._queue) + (self.saving is not None)}

    # ------------------------------------------------------------------------- what there is

    def refresh(self) -> None:
        """Take in what other processes have written or removed since the last call."""
        if self._store is None or not self._store.changed():
            return
        try:
            names = self._store.nodes()
        except OSError as error:
            log.warning("prefix_store cannot be read: %s", error)
            return
        for node in [n for n in self._nodes.values() if "disk" in n.where]:
            if node.manifest.node not in names:
                self._leave(node, "disk")
        fresh: dict[str, tuple[Manifest, Tokens]] = {}
        for name in names - self._unreadable - self._on_disk():
            try:
                fresh[name] = self._store.read(name)
            except BadPartError as error:
                self._unreadable.add(name)
                log.warning("a stored prefix is left out: %s of %s", error, name)
        while ready := [n for n, (m, _) in fresh.items() if m.parent not in fresh]:
            for name in ready:
                manifest, own = fresh.pop(name)
                parent = self._nodes.get(manifest.parent or "")
                if (parent is None) == (manifest.parent is None):  # it is there, or there is none
                    self._enter(manifest, parent, own, "disk", self._store.used(name))

    def _on_disk(self) -> set[str]:
        return {name for name, node in self._nodes.items() if "disk" in node.where}

    def _enter(
        self, manifest: Manifest, parent: Node | None, own: Tokens, tier: Tier, used_at: float = 0.0
    ) -> None:
        node = self._nodes.get(manifest.node)
        if node is None:
            before = own[:0] if parent is None else self._index.tokens(parent.key)
            if len(before) < manifest.begin:
                return
            tokens = np.concatenate([before[: manifest.begin], own])
            self._keys += 1
            node = Node(self._keys, manifest, parent, set(), self._clock[tier] + used_at * 1e-30)
            self._index.add(manifest.space, tokens, node.key, self._least_cut(manifest))
            self._nodes[manifest.node] = self._by_key[node.key] = node
            if parent is not None:
                parent.children.add(node)
        if tier not in node.where:
            node.where.add(tier)
            self.bytes[tier] += manifest.nbytes

    def _least_cut(self, manifest: Manifest) -> int:
        end, arenas = manifest.end, self._ledger.cache.arenas
        cuts = [
            arena.least_cut(end, arena.tail_begin(end, tail))
            for arena, tail in zip(arenas, manifest.tails, strict=True)
        ]
        return max(cuts, default=0)

    def _leave(self, node: Node, tier: Tier) -> None:
        """Note that a node is no longer in a tier; what follows on it is of no use without it."""
        if tier in node.where:
            node.where.remove(tier)
            self.bytes[tier] -= node.manifest.nbytes
        if not node.where and node.manifest.node in self._nodes:
            for child in list(node.children):
                for other in list(child.where):
                    self._leave(child, other)
            if node.parent is not None:
                node.parent.children.discard(node)
            self._index.remove(node.key)
            del self._nodes[node.manifest.node], self._by_key[node.key]

    # -------------------------------------------------------------------------------- to load

    def find(self, space: Hashable, tokens: Tokens, most: int) -> Found | None:
        """Return what a prompt can begin from that is in these tiers."""
        self.refresh()
        match = self._index.match(self._space(space), tokens, most)
        return None if match.key is None else Found(self._by_key[match.key], match.tokens)

    def _space(self, space: Hashable) -> str:
        assert isinstance(space, tuple)
        return self._names.space(*space)

    def layout(self, node: Node) -> list[Chunk]:
        """Return the chunks by which a node's tokens, from the first one on, are dealt to ranks.

        As they were, or, if they come from another number of ranks, as if read in one chunk.
        """
        if not self._same(node):
            return [Chunk(0, node.manifest.end, self._ledger.world_size)]
        parts = self._parts(node)
        return [c for one, cut in parts for c in cut_chunks(one.manifest.layout, cut)]

    def _same(self, node: Node) -> bool:
        size = self._ledger.world_size
        return all(one.manifest.world_size == size for one in node.chain)

    @staticmethod
    def _parts(node: Node) -> Iterator[tuple[Node, int]]:
        """Stream the nodes that have a node's tokens, and where the next one's begin."""
        chain = node.chain
        for one, after in zip(chain, [*chain[1:], None], strict=True):
            yield one, one.manifest.end if after is None else after.manifest.begin

    def load(self, node: Node, key: int, space: Space, holding: Holding) -> StepPlan:
        """Begin to load a node into a sequence that has room for it; return the plan to open it."""
        tier: Tier = "host" if all("host" in one.where for one in node.chain) else "disk"
        self.loading = Loading(key, node, space, holding, tier)
        chain: list[Job] = []
        for one, cut in self._parts(node):
            m = one.manifest
            about = {"node": m.node, "world_size": m.world_size, "begin": m.begin, "end": m.end}
            parts = {"kv_parts": m.kv_parts, "steps": m.steps, "parts": m.state_parts}
            chain.append({**about, **parts, "chunks": m.chunks, "cut": cut})
        chunks = Manifest.rows_of(holding.chunks, 0, node.manifest.end)
        job = {"chain": chain, "same": self._same(node), "chunks": chunks, "mark": space[1]}
        return StepPlan(Op.LOAD, key, total=node.manifest.end, payload=as_payload(job))

    def tokens(self, node: Node) -> Tokens:
        return self._index.tokens(node.key)

    def loaded(self, answers: Tensor) -> bool | None:
        """Take in how far the ranks are; True when all is loaded, False if some of it cannot be."""
        loading = self.loading
        assert loading is not None
        failed = (answers[:, 0] == FAILED).nonzero().flatten().tolist()
        chain = loading.node.chain
        if failed:
            self.loading = None
            for rank in failed:
                node = chain[int(answers[rank, 1])]
                for tier in list(node.where):
                    self.counts[f"{tier}_failures"] += 1
                    self._leave(node, tier)
                self._unreadable.add(node.manifest.node)
            return False
        if answers[:, 0].any():
            return None
        self.loading = None
        for node in chain:
            node.used_at = max(self._clock[tier] for tier in TIERS)
            if self._store is not None and "disk" in node.where:
                self._store.touch(node.manifest.node)
        return True

    def count_hit(self, tier: str, tokens: int) -> None:
        self.counts[f"{tier}_hits"] += 1
        self.counts[f"{tier}_hit_tokens"] += tokens

    # -------------------------------------------------------------------------------- to save

    def offer(self, candidate: Candidate) -> None:
        """Save a sequence as of its tokens, if enough of them is new, when its turn comes."""
        if self._is_new(candidate):
            self._queue[candidate.key] = candidate

    def _is_new(self, candidate: Candidate) -> bool:
        tokens = candidate.tokens
        match = self._index.match(self._space(candidate.space), tokens, len(tokens))
        least = max(_WORTH_PAGES * self._ledger.cache.page_size, _WORTH_PART * len(tokens))
        return len(tokens) - match.tokens >= least

    def forget(self, key: int) -> list[StepPlan]:
        """A sequence is about to be closed: return the plans that end what is done with it."""
        self._queue.pop(key, None)
        if self.saving is not None and self.saving.of.key == key:
            return self._abandon()
        return []

    def next(self) -> StepPlan | None:
        """Return the plan of the next part to move, if any can be moved now."""
        if self.loading is not None:
            return StepPlan(Op.LOAD, self.loading.key)
        while self.saving is None and self._queue:
            self.saving = self._begin(self._queue.pop(next(iter(self._queue))))
        if self.saving is None or time.monotonic() < self._wait_until:
            return None
        payload, self.saving.payload = self.saving.payload, None
        plan = StepPlan(Op.SAVE, self.saving.of.key)
        return plan if payload is None else StepPlan(Op.SAVE, plan.sequence, payload=payload)

    def _begin(self, of: Candidate) -> Saving | None:
        """Prepare to save a sequence, and make room for it; None if there is no room or reason."""
        self.refresh()
        if not self._is_new(of):
            return None
        space, end, cache = self._space(of.space), len(of.tokens), self._ledger.cache
        key, begin = self._index.sharing(space, of.tokens)
        parent = None if key is None else self._by_key[key]
        while parent is not None and begin <= parent.manifest.begin:
            parent = parent.parent
        begin = 0 if parent is None else begin
        size, chunks = self._ledger.world_size, of.holding.chunks
        after, before = (np.array(shard_lengths(chunks, at, size)) for at in (end, begin))
        tails = [a.tail_begin(end, t) for a, t in zip(cache.arenas, of.holding.tails, strict=True)]
        token_bytes = cache.page_bytes / cache.page_size
        states = self._state_parts(end)
        places = zip(cache.arenas, tails, cache.place_bytes, strict=True)
        nbytes = sum(place * (arena.ring + end - tail) for arena, tail, place in places)
        manifest = Manifest(
            fingerprint=self._fingerprint,
            node=self._names.node(space, of.tokens),
            parent=None if parent is None else parent.manifest.node,
            begin=begin,
            end=end,
            space=space,
            world_size=size,
            chunks=Manifest.rows_of(chunks, begin, end),
            tails=tuple(tails),
            kv_parts=kv_parts(int((after - before).max()), token_bytes),
            steps=tuple(step for step, _ in states),
            state_parts=tuple(parts for _, parts in states),
            nbytes=int(nbytes + token_bytes * (end - begin)),
        )
        keep = set() if parent is None else set(parent.chain)
        fits, drop = {}, []
        for tier in self._room:
            may = tier == "host" or self._may_write()
            gone = self._make_room(tier, manifest.nbytes, keep) if may else None
            fits[tier] = gone is not None
            drop += [node for node in gone or () if tier == "host"]
        draft = None
        if fits.get("disk"):
            assert self._store is not None
            try:
                draft = self._store.draft(manifest.node)
            except OSError as error:
                self._complain(error)
        host = fits.get("host", False)
        if draft is None and not host and not drop:
            return None
        job: Job = {"drop": drop}
        if draft is not None or host:
            job |= {"node": manifest.node, "begin": begin, "end": end, "host": host}
            job |= {"draft": draft and draft.name, "kv_parts": manifest.kv_parts}
            job |= {"steps": manifest.steps, "parts": manifest.state_parts}
        return Saving(of, manifest, parent, draft, host, drop, as_payload(job))

    def _may_write(self) -> bool:
        assert self._store is not None
        failed = time.monotonic() < self._disk_failed + _DISK_SECONDS
        return not failed and self._store.acquire()

    def _make_room(self, tier: Tier, nbytes: int, keep: set[Node]) -> list[str] | None:
        """Evict from a tier until so much fits; return what went, or None if it never will."""
        gone: list[str] = []
        if nbytes > self._room[tier]:
            return None
        while self.bytes[tier] + nbytes > self._room[tier]:
            leaves = [
                (self._worth(node, tier), node.key, node)
                for node in self._nodes.values()
                if tier in node.where and node not in keep and not self._needed(node, tier)
            ]
            if not leaves:
                return None
            self._clock[tier], _, node = min(leaves)
            gone.append(node.manifest.node)
            self.counts[f"{tier}_evictions"] += 1
            self._leave(node, tier)
            if tier == "disk":
                assert self._store is not None
                self._store.remove(node.manifest.node)
        return gone

    def _needed(self, node: Node, tier: Tier) -> bool:
        """Tell if what follows on a node would be lost with it, or it is being loaded."""
        if self.loading is not None and node in self.loading.node.chain:
            return True
        return bool(node.children) and node.where == {tier}

    def _worth(self, node: Node, tier: Tier) -> float:
        m = node.manifest
        return node.used_at + self._cost.work(m.end - m.begin, m.begin) / max(1, m.nbytes)

    def saved(self, answers: Tensor) -> list[StepPlan]:
        """Take in how far the ranks are with the save; return what they are to do at its end."""
        saving = self.saving
        assert saving is not None
        left = answers[:, 0]
        if (left < 0).any():
            if (left == FAILED).any():
                self._disk_failed = time.monotonic()
            return self._abandon()
        lost = saving.parent is not None and saving.parent.manifest.node not in self._nodes
        if lost:
            return self._abandon()
        if left.any():
            busy = answers[:, 1].any()
            self._wait_until = time.monotonic() + _WRITER_SECONDS if busy else 0.0
            return []
        self.saving = None
        self._wait_until = 0.0
        m = saving.manifest
        own = saving.of.tokens[m.begin :]
        if saving.draft is not None:
            assert self._store is not None
            try:
                self._store.publish(saving.draft, m, own)
            except OSError as error:
                self._complain(error)
            else:
                self._unreadable.discard(m.node)
                self._enter(m, saving.parent, own, "disk")
        if saving.host:
            self._enter(m, saving.parent, own, "host")
        return []

    def _abandon(self) -> list[StepPlan]:
        """Drop what has been saved of a sequence so far."""
        saving, self.saving = self.saving, None
        assert saving is not None
        self._wait_until = 0.0
        if saving.draft is not None and self._store is not None:
            self._store.discard(saving.draft)
        drop = [*(saving.drop if saving.payload is not None else ()), saving.manifest.node]
        return [StepPlan(Op.SAVE, payload=as_payload({"drop": drop}))]

    def _complain(self, error: OSError) -> None:
        self._disk_failed = time.monotonic()
        self.counts["disk_failures"] += 1
        log.warning("prefix_store cannot be written: %s", error)

    def close(self) -> None:
        """Drop what is not whole, and let another process write to the store."""
        if self._store is not None:
            if self.saving is not None and self.saving.draft is not None:
                self._store.discard(self.saving.draft)
            self._store.lock.release()

    def pause(self) -> None:
        """Sleep until the ranks' writers are to be asked again: nothing else is to be done."""
        with contextlib.suppress(ValueError):
            time.sleep(min(_WRITER_SECONDS, max(0.0, self._wait_until - time.monotonic())))
