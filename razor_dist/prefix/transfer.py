"""A rank's part in moving cached sequences to and from host memory and disk.

Rank 0 chooses what moves (`razor_dist.prefix.tiers`): one bounded part with each plan, so that
other requests' steps go on between. With every plan all ranks gather how many parts each has left,
so that a save or a load succeeds on all ranks or on none.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from razor_dist.cache.caches import Caches
from razor_dist.cache.sequence import Sequence
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import held_positions, shard_lengths
from razor_dist.prefix.manifest import Manifest, Rows, kv_part, part_header, state_part
from razor_dist.prefix.parts import BadPartError, PartWriter, read_file, unpack, write_file

log = logging.getLogger(__name__)

# Largest size of a part, about: to copy it delays a step by some milliseconds.
PART_BYTES = 16 << 20
# In place of the parts left, in a rank's answer: it has failed; or the sequence's answer has gone
# on so far that its tail no longer has the node's tokens.
FAILED, TOO_LATE = -1, -2


class LoadJob(msgspec.Struct, frozen=True):
    """A sequence to load; with the first plan of a load."""

    chain: list[Manifest]  # of the nodes to load, the root first
    cuts: list[int]  # for each node: the end of the tokens that are taken from it
    same: bool  # the nodes were written by as many ranks: each reads its own parts
    chunks: Rows  # of the sequence
    mark: int  # `Sequence.position_mark`

    @property
    def end(self) -> int:
        """The number of tokens to load."""
        return self.cuts[-1]


class SaveJob(msgspec.Struct, frozen=True):
    """A sequence to save; with the first plan of a save."""

    drop: list[str]  # digests of the manifests of nodes that leave host memory
    manifest: Manifest | None = None  # of the new node; None: nothing is saved
    host: bool = False  # the node goes to host memory
    draft: str | None = None  # the folder on disk for the node; None: it does not go to disk


as_payload = msgspec.msgpack.encode  # a job, for a plan
save_job = msgspec.msgpack.Decoder(SaveJob).decode
load_job = msgspec.msgpack.Decoder(LoadJob).decode


@dataclass
class _Read:
    """A part of keys and values to read, and where its tokens go in this rank's shard."""

    node: int  # index in the chain
    rank: int  # that wrote the part
    part: int
    tokens: int  # in the part
    take: Tensor  # int64 [n]: the tokens to take, as indices in the part
    at: Tensor  # int64 [n]: their indices in this rank's shard
    positions: Tensor  # int64 [n]: their positions in the sequence


class Transfers:
    """Saves and loads of one rank, one of each at a time.

    ``folder`` has the nodes of this engine's fingerprint on disk; None without a store.
    """

    def __init__(self, comm: Communicator, caches: Caches, folder: Path | None) -> None:
        self._comm, self._caches, self._folder = comm, caches, folder
        self._writer = PartWriter()
        # Parts in host memory, by their manifest's digest and file name.
        self._host: dict[str, dict[str, bytes]] = {}
        self._saving: Iterator[int] = iter(())
        self._loading: Iterator[tuple[int, int]] = iter(())
        self._complaint = ""  # why the load cannot be finished, if this rank knows

    def save(self, sequence: Sequence | None, payload: bytes) -> Tensor:
        """Begin a save (with a ``payload``) or go on with it; return all ranks' `_answers`."""
        if payload:
            job = save_job(payload)
            for digest in job.drop:
                self._host.pop(digest, None)
            self._saving = iter(())
            self._writer.begin()
            if job.manifest is not None:
                assert sequence is not None
                self._saving = self._save(sequence, job, job.manifest)
        left = next(self._saving, 0) if not self._writer.busy else 1
        if left >= 0:
            left = max(left, self._writer.pending)
        if self._writer.error is not None:  # asked last: nothing is pending by then
            log.warning("a prefix cannot be saved: %s", self._writer.error)
            left = FAILED
        return self._answers(left, int(self._writer.busy))

    def load(self, sequence: Sequence, payload: bytes) -> Tensor:
        """Begin a load (with a ``payload``) or go on with it; return all ranks' `_answers`."""
        if payload:
            self._loading = self._load(sequence, load_job(payload))
            self._complaint = ""
            return self._answers(1, 0)
        left, node = next(self._loading, (0, 0))
        answers = self._answers(left, node, bool(self._complaint))
        # Only the first rank that knows a reason logs it.
        if answers[:, 2].nonzero()[:1].flatten().tolist() == [self._comm.rank]:
            log.warning("a cached prefix is read anew: %s", self._complaint)
        return answers

    def _answers(self, *mine: int) -> Tensor:
        """Gather the ranks' numbers, int64 ``[P, n]``: first the parts left, or why it failed.

        Second, for a save: 1 if the writer is busy; for a failed load: the index of the node that
        could not be read. Third, for a load: 1 if the rank knows the reason.
        """
        row = torch.tensor(mine, dtype=torch.int64, device=self._caches.pages.k.device)
        return self._comm.all_gather(row, "control").cpu()

    # -------------------------------------------------------------------------------- to save

    def _save(self, sequence: Sequence, job: SaveJob, manifest: Manifest) -> Iterator[int]:
        """Copy one part after the other for the writer; yield the number of parts left."""
        begin, end, size = manifest.begin, manifest.end, self._comm.size
        chunks, rank = list(sequence.chunks), self._comm.rank
        first, last = (shard_lengths(chunks, at, size)[rank] for at in (begin, end))
        states = [
            (window, part, slice(row, row + step))
            for window, (step, parts) in enumerate(
                zip(manifest.steps, manifest.state_parts, strict=True)
            )
            for part, row in enumerate(range(0, step * parts, step))
        ]
        left = itertools.count(len(states[rank::size]) + manifest.kv_parts - 1, -1)
        for window, part, rows in states[rank::size]:
            cache, slot = self._caches.streaming[window], sequence.streaming[window]
            tail = manifest.tails[window]
            if not cache.arena.can_cut(slot, end) or slot.tail_begin > tail:
                yield TOO_LATE
            rows = slice(rows.start, min(rows.stop, cache.rows.stop))
            # Cut at ``end`` in all parts: the sequence may grow between two of them.
            state = cache.state(slot, rows, end, tail)
            about = part_header(manifest.sha256, window=window, part=part)
            self._put(state, job, manifest, state_part(window, part), about)
            yield next(left)
        pages, parts = self._caches.pages, manifest.kv_parts
        for part in range(parts):
            edges = [first + (last - first) * n // parts for n in (part, part + 1)]
            k, v = pages.read(sequence.table, *edges)
            about = part_header(manifest.sha256, rank=rank, part=part)
            self._put({"k": k, "v": v}, job, manifest, kv_part(rank, part), about)
            yield next(left)

    def _put(
        self,
        tensors: dict[str, Tensor],
        job: SaveJob,
        manifest: Manifest,
        name: str,
        about: dict[str, str],
    ) -> None:
        on_host = {key: tensor.cpu() for key, tensor in tensors.items()}
        to: list[Callable[[bytes], object]] = []
        if job.host:
            held = self._host.setdefault(manifest.sha256, {})
            to.append(partial(held.__setitem__, name))
        if job.draft is not None:
            assert self._folder is not None
            to.append(partial(write_file, self._folder / job.draft / name))

        def everywhere(data: bytes) -> None:
            for one in to:
                one(data)

        self._writer.put(on_host, about, everywhere)

    # -------------------------------------------------------------------------------- to load

    def _load(self, sequence: Sequence, job: LoadJob) -> Iterator[tuple[int, int]]:
        """Fill a sequence part by part; yield (parts left, 0) or (`FAILED`, index of the node)."""
        reads, chain = self._reads(sequence, job), job.chain
        node = chain[-1]
        try:
            states = [
                (w, part) for w, parts in enumerate(node.state_parts) for part in range(parts)
            ]
            size = self._comm.size
            rounds = range(0, len(states), size)
            left = len(rounds) + len(reads)
            for first in rounds:
                self._load_states(sequence, node, states[first : first + size])
                left -= 1
                yield left, 0
        except BadPartError:
            yield FAILED, len(chain) - 1
            return
        if sum(len(read.take) for read in reads) != sequence.table.tokens:
            self._complain(node, "manifest.json", BadPartError("its chunks lack tokens"))
            yield FAILED, len(chain) - 1
            return
        for read in reads:
            try:
                self._load_tokens(sequence, chain[read.node], read)
            except BadPartError as error:
                self._complain(chain[read.node], kv_part(read.rank, read.part), error)
                yield FAILED, read.node
                return
            left -= 1
            yield left, 0

    def _load_states(
        self, sequence: Sequence, node: Manifest, states: list[tuple[int, int]]
    ) -> None:
        """Read a part on each rank and all-gather them; `BadPartError` on all if one cannot."""
        rank, data = self._comm.rank, b""
        if rank < len(states):
            window, part = states[rank]
            name = state_part(window, part)
            try:
                data = self._part(node, name)
                unpack(data, part_header(node.sha256, window=window, part=part))
            except BadPartError as error:
                self._complain(node, name, error)
                data = b""
        nbytes = self._answers(len(data))[: len(states), 0].tolist()
        if not all(nbytes):
            raise BadPartError
        device = self._caches.pages.k.device
        padded = torch.zeros(max(nbytes), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyones = self._comm.all_gather(padded.to(device), "halo").cpu()
        for (window, part), row, length in zip(states, everyones, nbytes, strict=False):
            about = part_header(node.sha256, window=window, part=part)
            state = unpack(row[:length].numpy().tobytes(), about)
            cache, step = self._caches.streaming[window], node.steps[window]
            rows = slice(part * step, min((part + 1) * step, cache.rows.stop))
            _, tail, end = state["at"].tolist()
            shape = (rows.stop - rows.start, min(cache.policy.sinks, end) + max(0, end - tail))
            as_told = end == node.end and tail <= node.tails[window]
            if tuple(state["k"].shape[:2]) != shape or not as_told:
                mismatch = BadPartError("its heads or tokens do not match the manifest")
                self._complain(node, state_part(window, part), mismatch)
                raise mismatch  # all ranks read the same bytes, so all raise
            on_device = {key: t if key == "at" else t.to(device) for key, t in state.items()}
            cache.restore(sequence.streaming[window], rows, on_device)

    def _load_tokens(self, sequence: Sequence, node: Manifest, read: _Read) -> None:
        pages = self._caches.pages
        data = self._part(node, kv_part(read.rank, read.part))
        about = part_header(node.sha256, rank=read.rank, part=read.part)
        found = unpack(data, about)
        want = (pages.k.shape[0], read.tokens, pages.width)
        if any(tuple(found[key].shape) != want for key in ("k", "v")):
            raise BadPartError("its heads or tokens do not match the manifest")
        device = pages.k.device
        slots = pages.slots(sequence.table, read.at).to(device)
        k, v = (found[key].index_select(1, read.take).to(device) for key in ("k", "v"))
        pages.put(slice(None), slots, k, v)
        if pages.positions is not None:
            pages.positions[slots] = read.positions.to(device)

    def _reads(self, sequence: Sequence, job: LoadJob) -> list[_Read]:
        """Return the parts that have tokens of this rank's shard."""
        reads: list[_Read] = []
        size, end = self._comm.size, job.end
        mine = held_positions(sequence.chunks, 0, end, self._comm.rank, size)
        if not len(mine):
            return reads
        for index, (node, cut) in enumerate(zip(job.chain, job.cuts, strict=True)):
            ranks = range(node.world_size)
            if job.same:
                ranks = range(self._comm.rank, self._comm.rank + 1)
            for rank in ranks:
                held = held_positions(node.layout, node.begin, node.end, rank, node.world_size)
                # Searched once for all parts, which are thousands: other requests wait for this.
                at = np.searchsorted(mine, held)
                wanted = (held < cut) & (mine.take(at, mode="clip") == held)
                for part in range(node.kv_parts):
                    a, b = (len(held) * n // node.kv_parts for n in (part, part + 1))
                    take = np.flatnonzero(wanted[a:b])
                    if len(take):
                        rows = take, at[a:b][take], held[a:b][take]
                        numbers = map(torch.from_numpy, rows)
                        reads.append(_Read(index, rank, part, b - a, *numbers))
        return reads

    def _part(self, node: Manifest, name: str) -> bytes:
        held = self._host.get(node.sha256, {}).get(name)
        if held is not None:
            return held
        if self._folder is None:
            raise BadPartError("it is not in host memory")
        return read_file(self._folder / node.node / name)

    def _complain(self, node: Manifest, name: str, error: BadPartError) -> None:
        self._complaint = f"{name} of {node.node}: {error}"


def kv_parts(tokens: int, token_bytes: float) -> int:
    """Return the number of parts for a rank's keys and values of ``tokens`` tokens."""
    return -int(-tokens * token_bytes // PART_BYTES)
