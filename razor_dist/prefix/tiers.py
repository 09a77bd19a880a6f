"""Rank 0's saves to host memory and disk and loads from there, one of each at a time.

Soon after a prompt has been read, its new tokens are copied out (`Save`) as a *node* behind the
node that has its beginning. A prompt that begins like a node first gets the node and its ancestors
back into pages (`Load`), as an entry of the prefix cache that it then continues; with full
attention, only the tokens that both have. Both move part by part, between other requests' steps.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from razor_dist.cache.accounting import CacheAccounts
from razor_dist.parallel.sharding import shard_lengths
from razor_dist.prefix.index import Match, Namespace, PrefixIndex, Tier
from razor_dist.prefix.manifest import Manifest, Tokens, tokens_digest
from razor_dist.prefix.nodes import Node, Nodes
from razor_dist.prefix.store import PrefixStore
from razor_dist.prefix.transfer import FAILED, LoadJob, SaveJob, as_payload, kv_parts
from razor_dist.protocol.counters import TierCounters
from razor_dist.protocol.step_plan import Load, Save, StepPlan

log = logging.getLogger(__name__)

# A prompt is saved if at least 4 pages and 1/16 of it are in no node: every node has the streaming
# heads' windows, however few its tokens.
_WORTH_PAGES, _WORTH_PART = 4, 1 / 16
# Time between two questions to busy writers, which write a part of 16 MiB in some milliseconds.
_WRITER_SECONDS = 0.005
# Time after a failure of the disk until it is tried again: each failure is logged.
_DISK_SECONDS = 60.0


def least_new(tokens: int, page_size: int) -> int:
    """Return how many tokens of a prompt must be new for it to be saved."""
    return math.ceil(max(_WORTH_PAGES * page_size, _WORTH_PART * tokens))


@dataclass(eq=False)
class Candidate:
    """A sequence on the device that may be saved; it begins with ``tokens``."""

    key: int
    namespace: Namespace
    tokens: Tokens


@dataclass(eq=False)
class Saving:
    of: Candidate
    manifest: Manifest
    parent: Node | None
    draft: Path | None
    host: bool
    job: SaveJob | None  # until the ranks have it


class Waiter(Protocol):
    """A request that waits for a load."""

    @property
    def waits(self) -> bool: ...


@dataclass(eq=False)
class Loading:
    key: int
    node: Node  # that was found
    chain: list[Node]  # of which tokens are loaded: the node and ancestors, or ancestors alone
    namespace: Namespace
    tokens: Tokens
    tier: Tier
    wanted_by: set[Waiter] = field(default_factory=set)

    @property
    def wanted(self) -> bool:
        """True while a request waits for the load or has not yet continued the sequence."""
        return any(request.waits for request in self.wanted_by)

    def takes_longer(self, found: Match[Node]) -> bool:
        """True if a prompt's beginning is another node's, or less than half of what is loaded."""
        return found.entry is not self.node or 2 * found.tokens < len(self.tokens)


class Writing:
    """This process's permission to write to the store, and the state of the disk.

    The reason why nothing can be written is logged, and failures of the disk are counted.
    """

    def __init__(self, store: PrefixStore | None, counts: TierCounters) -> None:
        self._store, self._counts = store, counts
        self._failed_at, self._logged = -math.inf, ""

    @property
    def is_possible(self) -> bool:
        """True unless another process writes, or the disk has failed of late."""
        if self._store is None or time.monotonic() < self._failed_at + _DISK_SECONDS:
            return False
        try:
            writes = self._store.acquire()
        except OSError as error:
            self.failed(error)
            return False
        if not writes:
            self._warn("another process writes to prefix_store: this one reads there")
        return writes

    def failed(self, error: OSError | None) -> None:
        """Note that the disk has failed; no ``error`` if a rank has logged it."""
        self._failed_at = time.monotonic()
        self._counts.failures += 1
        if error is not None:
            self._warn(f"prefix_store cannot be written: {error}")

    def _warn(self, why: str) -> None:
        """Log why nothing is written, unless it was the last reason logged."""
        if why != self._logged:
            log.warning(why)
        self._logged = why


class Tiers:
    """The `Nodes`, and the one save and the one load that are under way.

    ``room`` is as in `Nodes`. ``state_parts`` returns, for a length in tokens, each window's rows
    of streaming heads in a part and its number of parts.
    """

    def __init__(
        self,
        accounts: CacheAccounts,
        index: PrefixIndex,
        fingerprint: str,
        store: PrefixStore | None,
        room: dict[Tier, float],
        state_parts: Callable[[int], list[tuple[int, int]]],
    ) -> None:
        self._accounts, self._fingerprint = accounts, fingerprint
        self._store, self._state_parts = store, state_parts
        assert not len(index), "stored prefixes are known before any request"
        if store is not None:
            index.names = store.names
        self._index, self.nodes = index, Nodes(accounts, index, store, room)
        self._queue: dict[int, Candidate] = {}
        self.saving: Saving | None = None
        self.loading: Loading | None = None
        self._wait_until = 0.0
        self.writing = Writing(store, self.nodes.counts["disk"])

    @property
    def active(self) -> bool:
        """True if a save or a load is under way or queued."""
        return bool(self.saving or self.loading or self._queue)

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of each tier in use, and the number of sequences still to be saved."""
        found: dict[str, Any] = {tier: self.nodes.stats(tier) for tier in self.nodes.room}
        return found and found | {"saving": len(self._queue) + (self.saving is not None)}

    def held(self, namespace: Namespace, tokens: Tokens) -> dict[str, int]:
        """Return the bytes, by tier, of the nodes that have a text's beginning."""
        chain = self._chain(namespace, tokens)
        return {
            tier: sum(node.manifest.nbytes for node in chain if tier in node.where)
            for tier in ("host", "disk")
        }

    def _chain(self, namespace: Namespace, tokens: Tokens) -> list[Node]:
        node = self.nodes.find(namespace, tokens, len(tokens)).entry
        return [] if node is None else node.chain

    # -------------------------------------------------------------------------------- to load

    def find(self, namespace: Namespace, tokens: Tokens, most: int) -> Match[Node]:
        """Return the longest beginning of a prompt, at most ``most`` tokens, in these tiers."""
        self.nodes.refresh()
        return self.nodes.find(namespace, tokens, most)

    def load(self, node: Node, end: int, key: int, namespace: Namespace) -> Load:
        """Begin to load ``end`` tokens into the sequence ``key``; return the plan that opens it."""
        chain, cuts = map(list, zip(*node.parts(end), strict=True))
        tier: Tier = "host" if all("host" in one.where for one in chain) else "disk"
        tokens = self._index.tokens(node)[:end]
        self.loading = Loading(key, node, chain, namespace, tokens, tier)
        chunks = Manifest.rows_of(self._accounts[key].chunks, 0, end)
        same = node.written_by(self._accounts.world_size)
        job = LoadJob([one.manifest for one in chain], cuts, same, chunks, namespace[1])
        return Load(key, as_payload(job))

    def loaded(self, answers: Tensor) -> bool | None:
        """Take in the ranks' answers; True once all is loaded, False if it failed, None before."""
        loading = self.loading
        assert loading is not None
        failed = (answers[:, 0] == FAILED).nonzero().flatten().tolist()
        if failed:
            self.loading = None
            for index in {int(answers[rank, 1]) for rank in failed}:
                self.nodes.failed(loading.chain[index])
            return False
        if answers[:, 0].any():
            return None
        self.loading = None
        self.nodes.used(loading.chain)
        return True

    def count_hit(self, tier: Tier, tokens: int) -> None:
        self.nodes.counts[tier].hits += 1
        self.nodes.counts[tier].hit_tokens += tokens

    # -------------------------------------------------------------------------------- to save

    def offer(self, candidate: Candidate) -> None:
        """Queue a sequence to be saved, if it has enough new tokens."""
        room = self.nodes.room
        if room and self._is_new(candidate, on_disk="disk" in room):
            self._queue[candidate.key] = candidate

    def _is_new(self, candidate: Candidate, *, on_disk: bool) -> bool:
        """True if a sequence has enough tokens in no node, or in no node ``on_disk``."""
        tokens = candidate.tokens
        new = len(tokens) - self.nodes.held(candidate.namespace, tokens, on_disk=on_disk)
        return new >= least_new(len(tokens), self._accounts.cache.page_size)

    def forget(self, key: int) -> list[StepPlan]:
        """Give up saving a sequence that is about to be closed; return the plans for that."""
        self._queue.pop(key, None)
        if self.saving is not None and self.saving.of.key == key:
            return self._abandon()
        return []

    def next(self, pinned: Iterable[tuple[Namespace, Tokens]] = ()) -> Save | Load | None:
        """Return the plan of the next part to move, if any; ``pinned`` nodes are not evicted."""
        if self.loading is not None:
            return Load(self.loading.key)
        while self.saving is None and self._queue:
            self.saving = self._begin(self._queue.pop(next(iter(self._queue))), pinned)
        if self.saving is None or time.monotonic() < self._wait_until:
            return None
        job, self.saving.job = self.saving.job, None
        if job is None:
            return Save(self.saving.of.key)
        job = replace(job, drop=self.nodes.take_left_host())
        return Save(self.saving.of.key, as_payload(job))

    def _begin(self, of: Candidate, pinned: Iterable[tuple[Namespace, Tokens]]) -> Saving | None:
        """Prepare to save a sequence, and make room for it; None if there is no room or reason."""
        nodes = self.nodes
        nodes.refresh()
        # A sequence may be in host memory alone, if the disk could not be written before.
        writes = "disk" in nodes.room and self._is_new(of, on_disk=True)
        writes = writes and self.writing.is_possible
        wanted = {"disk": writes, "host": self._is_new(of, on_disk=False)}
        if not any(wanted.values()):
            return None
        parent, begin = nodes.sharing(of.namespace, of.tokens, on_disk=writes)
        wanted["host"] &= parent is None or nodes.is_own(parent)
        manifest = self._manifest(of, parent, begin)
        keep = set() if parent is None else set(parent.chain)
        keep |= set() if self.loading is None else set(self.loading.chain)
        for namespace, tokens in pinned:
            keep |= set(self._chain(namespace, tokens))
        nbytes = manifest.nbytes
        fits = {t: wanted[t] and nodes.make_room(t, nbytes, keep) for t in nodes.room}
        draft = None
        if fits.get("disk"):
            assert self._store is not None
            try:
                draft = self._store.draft(manifest.node)
            except OSError as error:
                self.writing.failed(error)
        host = fits.get("host", False)
        if draft is None and not host:
            return None
        job = SaveJob([], manifest, host, None if draft is None else draft.name)
        return Saving(of, manifest, parent, draft, host, job)

    def _manifest(self, of: Candidate, parent: Node | None, begin: int) -> Manifest:
        names, end, cache = self._index.names, len(of.tokens), self._accounts.cache
        namespace = names.namespace(*of.namespace)
        held = self._accounts[of.key]
        size, chunks = self._accounts.world_size, held.chunks
        after, before = (np.array(shard_lengths(chunks, at, size)) for at in (end, begin))
        tails = [a.tail_begin(end, t) for a, t in zip(cache.arenas, held.tails, strict=True)]
        if not held.cached:
            # Half the tail is given up: the answer goes on and moves the tail's beginning.
            windows = (max(a.policy.sinks, a.policy.start(end)) for a in cache.arenas)
            later = (at + a.tail // 2 for at, a in zip(tails, cache.arenas, strict=True))
            tails = [min(pair) for pair in zip(windows, later, strict=True)]
        token_bytes = cache.page_bytes / cache.page_size
        states = self._state_parts(end)
        places = zip(cache.arenas, tails, cache.place_bytes, strict=True)
        nbytes = sum(place * (arena.ring + end - tail) for arena, tail, place in places)
        return Manifest(
            fingerprint=self._fingerprint,
            node=names.node(namespace, of.tokens),
            copy=secrets.token_hex(16),
            parent=None if parent is None else parent.manifest.node,
            begin=begin,
            end=end,
            space=namespace,
            world_size=size,
            chunks=Manifest.rows_of(chunks, begin, end),
            tails=tuple(tails),
            kv_parts=kv_parts(int((after - before).max()), token_bytes),
            steps=tuple(step for step, _ in states),
            state_parts=tuple(parts for _, parts in states),
            nbytes=int(nbytes + token_bytes * (end - begin)),
            tokens_sha256=tokens_digest(of.tokens[begin:]),
        )

    def saved(self, answers: Tensor) -> list[StepPlan]:
        """Take in the ranks' answers to a save; return the plans that end it if it failed."""
        saving = self.saving
        assert saving is not None
        left = answers[:, 0]
        if (left < 0).any():
            if (left == FAILED).any() and saving.draft is not None:
                self.writing.failed(None)
                if saving.host:  # begin again, for host memory alone
                    assert self._store is not None
                    self._store.discard(saving.draft)
                    saving.draft, self._wait_until = None, 0.0
                    saving.job = SaveJob([], saving.manifest, host=True)
                    return []
            return self._abandon()
        parent, on_disk = saving.parent, saving.draft is not None
        tiers = {"disk"} if on_disk else {"disk", "host"}
        if parent is not None and (parent.lost or not parent.where & tiers):
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
                stamp = self._store.publish(saving.draft, m, own)
            except OSError as error:
                self._store.discard(saving.draft)
                self.writing.failed(error)
            else:
                self.nodes.enter(m, own, parent, "disk", stamp)
        if saving.host:
            self.nodes.enter(m, own, parent, "host")
        return []

    def _abandon(self) -> list[StepPlan]:
        """Give up the present save and drop its parts."""
        saving, self.saving = self.saving, None
        assert saving is not None
        self._wait_until = 0.0
        if saving.draft is not None and self._store is not None:
            self._store.discard(saving.draft)
        drop = [saving.manifest.sha256, *self.nodes.take_left_host()]
        return [Save(saving.of.key, as_payload(SaveJob(drop)))]

    def close(self) -> None:
        """Drop an unfinished save, and let another process write to the store."""
        if self._store is not None:
            if self.saving is not None and self.saving.draft is not None:
                self._store.discard(self.saving.draft)
            self._store.lock.release()

    def pause(self) -> None:
        """Sleep until the ranks' writers are to be asked again; for when nothing else is to do."""
        time.sleep(min(_WRITER_SECONDS, max(0.0, self._wait_until - time.monotonic())))
