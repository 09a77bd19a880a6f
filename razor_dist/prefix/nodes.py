"""The prefixes in host memory and on disk, as rank 0 knows them.

A *node* has the caches of the tokens ``[begin, end)`` of a prompt; its parent has the tokens
before. A full tier evicts the node that is worth least, as the device does
(`razor_dist.prefix.device`), and never a node whose children would be lost with it.

Another process may write the same text to the disk, cut into other chunks, and remove and rewrite
nodes. So a node is one copy, known by its manifest's digest: host memory and disk share a node
only if both have this copy.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from msgspec.structs import replace

from razor_dist.cache.accounting import CacheAccounts
from razor_dist.parallel.sharding import cut_chunks
from razor_dist.parallel.zigzag import Chunk
from razor_dist.prefix.index import Entry, Match, Namespace, PrefixIndex, Tier
from razor_dist.prefix.manifest import Manifest, Tokens
from razor_dist.prefix.parts import BadPartError
from razor_dist.prefix.store import PrefixStore, Stamp, read_node
from razor_dist.protocol.counters import TierCounters

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Node(Entry):
    """The tokens ``[begin, end)`` of a prompt, in host memory, on disk or in both."""

    manifest: Manifest
    parent: Node | None
    last_use: float  # wall clock, seconds: of nodes that are worth the same, the oldest goes first
    stamp: Stamp | None = None  # of its folder on disk, when its manifest was read or written
    lost: bool = False  # on disk only: this node or an ancestor could not be loaded
    children: set[Node] = field(default_factory=set)

    @property
    def chain(self) -> list[Node]:
        """The node's ancestors, the root first, and the node itself."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def parts(self, end: int) -> list[tuple[Node, int]]:
        """The nodes of `chain` that have the first ``end`` tokens, each with the end of its part.

        A child may begin before its parent ends: then the child's tokens count. One that begins
        where it ends has windows alone.
        """
        found = []
        for node in reversed(self.chain):
            if node.manifest.begin <= end:
                found.append((node, min(end, node.manifest.end)))
                end = node.manifest.begin
        return found[::-1]

    def written_by(self, world_size: int) -> bool:
        """True if an engine of ``world_size`` ranks has written the whole chain."""
        return all(node.manifest.world_size == world_size for node in self.chain)

    def layout(self, world_size: int, end: int) -> list[Chunk]:
        """Return the chunks by which the chain's first ``end`` tokens are dealt to ranks.

        They are the writer's chunks, or a single one if another number of ranks has written them.
        """
        if not self.written_by(world_size):
            return [Chunk(0, end, world_size)]
        return [c for node, at in self.parts(end) for c in cut_chunks(node.manifest.layout, at)]


class Nodes:
    """All nodes, and the bytes that they take.

    ``room`` has the bytes that each tier in use may take, summed over all ranks.
    """

    def __init__(
        self,
        accounts: CacheAccounts,
        index: PrefixIndex,
        store: PrefixStore | None,
        room: dict[Tier, float],
    ) -> None:
        self._accounts, self._index, self._store, self.room = accounts, index, store, room
        self._nodes: dict[str, Node] = {}  # by the digests of their manifests
        self._on_disk: dict[str, Node] = {}  # by name: the copy on disk
        self._unreadable: dict[str, Stamp | None] = {}  # by name: the copy that could not be read
        self._orphans: dict[str, tuple[Stamp, Manifest, Tokens]] = {}  # by name: parents are gone
        self._keys = 0
        self._left_host: list[str] = []
        self.counts: defaultdict[Tier, TierCounters] = defaultdict(TierCounters)
        self.bytes: dict[Tier, int] = {"host": 0, "disk": 0}
        self.refresh()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def entries(self, tier: Tier) -> int:
        return sum(tier in node.where for node in self)

    def find(self, namespace: Namespace, tokens: Tokens, most: int) -> Match[Node]:
        """Return the longest beginning of a prompt, at most ``most`` tokens, that can be loaded."""
        return self._index.match(Node, namespace, tokens, most, self._is_loadable)

    def held(self, namespace: Namespace, tokens: Tokens, *, on_disk: bool) -> int:
        """Return how many of a text's first tokens can be loaded, or only those ``on_disk``."""
        among = _is_on_disk if on_disk else self._is_loadable
        return self._index.match(Node, namespace, tokens, len(tokens), among).tokens

    def _is_loadable(self, node: Node) -> bool:
        """True if every rank can read its share of a node's chain.

        Parts of another number of ranks must be on disk: host memory has a rank's own only.
        """
        return _is_on_disk(node) or self.is_own(node)

    def is_own(self, node: Node) -> bool:
        """True if host memory can have a node's children: each rank its own parts."""
        return not node.lost and node.written_by(self._accounts.world_size)

    def sharing(
        self, namespace: Namespace, tokens: Tokens, *, on_disk: bool
    ) -> tuple[Node | None, int]:
        """Return the parent for a new node of these tokens, and the token where the node begins.

        The parent's whole chain is on disk if ``on_disk``; else this number of ranks has written
        it, so that host memory can have the new node.
        """
        among = _is_on_disk if on_disk else self.is_own
        node, begin = self._index.sharing(Node, namespace, tokens, among)
        while node is not None and begin <= node.manifest.begin:
            node = node.parent
        return node, 0 if node is None else begin

    def refresh(self) -> None:
        """Take in what other processes have written or removed since the last call."""
        if self._store is None or not self._store.changed():
            return
        try:
            stamps = self._store.stamps()
        except OSError as error:
            log.warning("prefix_store cannot be read: %s", error)
            return
        for name, node in list(self._on_disk.items()):
            if stamps.get(name) != node.stamp:  # removed, or written anew
                self.leave(node, "disk")
        fresh = {name: own for name, own in self._orphans.items() if stamps.get(name) == own[0]}
        left_out: dict[str, list[str]] = defaultdict(list)
        for name, stamp in stamps.items():
            if name in self._on_disk or name in fresh or self._unreadable.get(name) == stamp:
                continue
            try:
                manifest, own = read_node(self._store.folder / name)
                if len(manifest.tails) != len(self._accounts.cache.arenas):
                    raise BadPartError("it has another number of windows")
                fresh[name] = stamp, manifest, own
            except BadPartError as error:
                self._unreadable[name] = stamp
                left_out[str(error)].append(name)
        for reason, names in left_out.items():
            log.warning("stored prefixes left out: %d, %s (%s)", len(names), reason, names[0])
        disk = self._on_disk
        while ready := [n for n, (_, m, _) in fresh.items() if not m.parent or m.parent in disk]:
            for name in ready:
                stamp, manifest, own = fresh.pop(name)
                parent = disk.get(manifest.parent or "")
                self.enter(manifest, own, parent, "disk", stamp)
        self._orphans = fresh

    def enter(
        self,
        manifest: Manifest,
        own: Tokens,
        parent: Node | None,
        tier: Tier,
        stamp: Stamp | None = None,
    ) -> None:
        """Note that a node, whose tokens are ``own``, is in a tier; ignored without its parent.

        On disk ``parent`` must be there as well, and ``stamp`` is that of the node's folder.
        """
        if manifest.begin > (0 if parent is None else parent.end):
            return
        node = self._nodes.get(manifest.sha256)
        if node is None:
            before = own[:0] if parent is None else self._index.tokens(parent)[: manifest.begin]
            self._keys += 1
            on_disk = self._store if tier == "disk" else None
            used = time.time() if on_disk is None else on_disk.used(manifest.node)
            arenas, end = self._accounts.cache.arenas, manifest.end
            tails = [a.tail_begin(end, at) for a, at in zip(arenas, manifest.tails, strict=True)]
            least = self._accounts.least_cut(end, tails)
            node = Node(self._keys, manifest.end, least, {}, set(), manifest, parent, used)
            self._index.add(manifest.space, np.concatenate([before, own]), node)
            self._nodes[manifest.sha256] = node
        if node.parent is not None:
            node.parent.children.discard(node)
        if parent is not None:
            parent.children.add(node)
        node.parent = parent  # maybe another copy of the parent than before
        node.lost = parent is not None and parent.lost
        if tier == "disk":
            other = self._on_disk.get(manifest.node)
            if other is not None and other is not node:  # this node has replaced it
                self.leave(other, "disk")
            node.stamp = stamp
            self._on_disk[manifest.node] = node
            self._unreadable.pop(manifest.node, None)
        if tier not in node.where:
            node.where.add(tier)
            node.used_at[tier] = self._index.clock[tier]
            self.bytes[tier] += manifest.nbytes

    def leave(self, node: Node, tier: Tier) -> None:
        """Note that a node, and with it the children that need it there, has left a tier."""
        if tier not in node.where:
            return
        for child, other in _lost_with(node, tier):
            self.leave(child, other)
        node.where.remove(tier)
        self.bytes[tier] -= node.manifest.nbytes
        if tier == "host":
            self._left_host.append(node.manifest.sha256)
        else:
            del self._on_disk[node.manifest.node]
            if "host" in node.where and not self.is_own(node):
                self.leave(node, "host")  # a copy that cannot be loaded without the disk
                return
        if node.where:
            return
        if node.parent is not None:
            node.parent.children.discard(node)
        self._index.remove(node)
        del self._nodes[node.manifest.sha256]

    def take_left_host(self) -> list[str]:
        """Return, once, the digests of the nodes that the ranks are to drop from host memory."""
        left, self._left_host = self._left_host, []
        return left

    def used(self, chain: list[Node]) -> None:
        """Note that nodes were loaded, from whatever tier."""
        for node in chain:
            node.used_at, node.last_use = dict(self._index.clock), time.time()
            if self._store is not None and "disk" in node.where:
                self._store.touch(node.manifest.node)
                node.last_use = max(node.last_use, self._store.used(node.manifest.node))

    def failed(self, node: Node) -> None:
        """Give up a node that cannot be loaded, with all its descendants.

        They leave host memory. On disk they are evicted first; another copy may take their place.
        """
        for tier in node.where:
            self.counts[tier].failures += 1
        after = [node]
        for one in after:
            after += one.children
        for one in reversed(after):
            one.lost = True
            self.leave(one, "host")

    def make_room(self, tier: Tier, nbytes: int, keep: set[Node]) -> bool:
        """Evict nodes, none of ``keep``, until ``nbytes`` fit; evict none if they cannot: False."""
        if self.bytes[tier] + nbytes <= self.room[tier]:
            return True

        def stays(node: Node) -> bool:
            lost = _lost_with(node, tier)
            return node in keep or any(other != tier or stays(child) for child, other in lost)

        nodes = [node for node in self if tier in node.where and not stays(node)]
        evictable = sum(node.manifest.nbytes for node in nodes)
        if self.bytes[tier] - evictable + nbytes > self.room[tier]:
            self.counts[tier].no_room += 1
            return False
        may_go = set(nodes)
        worths: list[tuple[float, float, int, Node]] = []

        def push(node: Node) -> None:
            if node in may_go and not _lost_with(node, tier):
                may_go.remove(node)
                heappush(worths, (self._worth(node, tier), node.last_use, node.key, node))

        for node in nodes:
            push(node)
        while self.bytes[tier] + nbytes > self.room[tier]:
            worth, _, _, node = heappop(worths)
            if tier == "disk" and self._was_used_elsewhere(node):
                may_go.add(node)
                push(node)
                continue
            self._index.went(tier, worth)
            self.counts[tier].evictions += 1
            self.leave(node, tier)
            if tier == "disk":
                assert self._store is not None
                self._store.remove(node.manifest.node)
            if node.parent is not None:
                push(node.parent)
        return True

    def _was_used_elsewhere(self, node: Node) -> bool:
        """True, and noted, if another server has used a node since its last use known here."""
        assert self._store is not None
        used = self._store.used(node.manifest.node)
        if used <= node.last_use:
            return False
        node.last_use, node.used_at["disk"] = used, self._index.clock["disk"]
        return True

    def _worth(self, node: Node, tier: Tier) -> float:
        if node.lost:
            return -math.inf
        return self._index.worth(node, tier, node.manifest.begin, node.manifest.nbytes)

    def stats(self, tier: Tier) -> TierCounters:
        return replace(self.counts[tier], entries=self.entries(tier), bytes=self.bytes[tier])


def _lost_with(node: Node, tier: Tier) -> list[tuple[Node, Tier]]:
    """Return the children, and their tiers, that would be lost if a node left a tier.

    A child on disk needs its parent on disk; a child in host memory needs it in either tier.
    """
    alone = node.where == {tier}
    pairs = ((child, other) for child in node.children for other in child.where)
    return [(child, other) for child, other in pairs if alone or other == tier == "disk"]


def _is_on_disk(node: Node) -> bool:
    return "disk" in node.where and not node.lost
