"""Decode steps recorded once, and replayed for any sequences: in CUDA graphs, on CPU on a tape.

A decode step of a small batch is bound by the time it takes to launch its hundreds of kernels; a
CUDA graph launches them as one. It repeats the same kernels on the same memory, as a tape
(`razor_dist.engine.tape`) does without the model's Python. Which sequences a
step is of, and what it reads of them, is in two tensors that are written before every replay
(`razor_dist.attention.step`); so a recording fixes no more than how many sequences there
may be, and how long their shards and windows.

Whether a collective is captured must be the same on all ranks of a step (NCCL's rule: captured
everywhere or nowhere, replayed by all from one common capture). So everything decided here follows
from numbers that all ranks have alike: lengths. A recording that fails, or whose logits are not
those of the eager step, ends the use of graphs on all ranks by an all-reduce; the eager logits are
served. A rank that fails while the others wait in its collectives ends, and they with it.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from razor_dist.attention.step import BlockTables, DecodeBatch, StepInputs
from razor_dist.cache.caches import Caches
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.tape import StepFunction, Tape, recorded_rows
from razor_dist.kernels.decode import available
from razor_dist.parallel.comm import Communicator, Purpose

log = logging.getLogger(__name__)

# Of a step: float32 logits [n, V], and the likeliest token by each row, int64 [n].
Results = tuple[Tensor, Tensor]
Forward = Callable[[StepInputs, BlockTables], Results]

_BUCKET = 8
# Recordings kept at most. CUDA graphs share one pool of memory, but each holds its nodes.
_MOST = 16
# Steps of a recording that are compared with eager ones: the one that was recorded, and the next
# one, whose other numbers show whether the recording has kept any of the first.
_COMPARED = 2
# NCCL may add up a captured sum in another order, so that with several ranks on CUDA logits may
# differ by this much of the largest, or twice the spacing of the model's dtype at 1 (2**-6 in
# bfloat16), if that is more.
_SUMS_DIFFER = 2.0**-16


class CudaRecorder:
    """Records into CUDA graphs that share one pool of memory."""

    most_sequences = 1 << 30  # of a step that is recorded
    most_rows = 1 << 30  # of all recordings together
    # Lengths are padded to a multiple of at least this, in tokens: by less costs next to nothing.
    pad = 1024

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def rows(self, sequences: int) -> int:
        """The number of sequences that the recording of a step is for: see `batch_bucket`.

        Recording takes long, and rows without a sequence take little time.
        """
        return batch_bucket(sequences)

    def warm_up(self, step: StepFunction) -> None:
        """Run the step as when it is recorded, but at once.

        It loads kernels and makes workspaces, which a capture cannot.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, step: StepFunction) -> StepFunction:
        """Record the step without running it; return what replays it and gives its results."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if not self._graphs:
            # torch refuses a pool after a capture that failed, and one whose graphs are all gone as
            # long as any of its memory is in use.
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: NCCL's watchdog thread queries events, which would break a global capture.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        reason: BaseException | None = None
        try:
            with capture:
                try:
                    results = step()
                except BaseException as error:
                    reason = error  # instead of which the end of the capture raises its own
                    raise
        except BaseException as error:
            # A capture that fails as it ends leaves its stream the current one, and memory going
            # to its pool.
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            raise reason or error from None
        self._graphs.add(graph)

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            # The next replay of any graph may write over these.
            return tuple(result.clone() for result in results)

        return replay


# What records steps: into graphs, or on CPU on a tape.
Recorder = CudaRecorder | Tape


def recorder_of(config: EngineConfig, comm: Communicator, device: torch.device) -> Recorder | None:
    """The recorder of these ranks' decode steps, or None where they cannot be recorded."""
    if not config.cuda_graphs or device.type not in ("cuda", "cpu"):
        return None
    # Hosts may differ in whether they have a compiler, or Triton: all ranks record, or none does.
    there = torch.tensor([available(device)], dtype=torch.int64)
    if not comm.host.all_gather(there, "control").all():
        return None  # which has been said
    if device.type == "cpu":
        replicated = config.weights == "replicated"
        return Tape(comm, recorded_rows(config)) if replicated else None
    if comm.size > 1 and dist.get_backend(comm.group) != "nccl":
        log.info(
            "decode runs without CUDA graphs: they cannot hold collectives of %s",
            dist.get_backend(comm.group),
        )
        return None
    if config.weights != "replicated":
        if comm.rank == 0:
            log.warning(
                "decode steps are not recorded in CUDA graphs: with weights: %s every step "
                "gathers the weights anew",
                config.weights,
            )
        return None
    return CudaRecorder(device)


def padded_length(tokens: int, pad: int) -> int:
    """``tokens`` rounded up: to a multiple of ``pad``, or by 12.5 % at most where that is more.

    The steps grow with the length, so that a sequence outgrows few recordings in its life.
    """
    step = max(pad, (1 << tokens.bit_length()) // 16)
    return -(-tokens // step) * step


def batch_bucket(sequences: int) -> int:
    """``sequences`` rounded up: to a power of 2, or to a multiple of 8 beyond 8."""
    if sequences > _BUCKET:
        return -(-sequences // _BUCKET) * _BUCKET
    return 1 << (sequences - 1).bit_length()


class Key(NamedTuple):
    """Everything that a recording fixes; the same on every rank."""

    sequences: int  # at most
    stored: int  # tokens of the longest shard, at most
    windows: tuple[int, ...]  # by streaming cache: tokens of the longest window, at most


@dataclass
class _Recording:
    """One key's graph; without ``replay`` the key has been seen, but not recorded."""

    inputs: Tensor | None = None
    pages: Tensor | None = None
    tables: tuple[list[int], ...] = ()  # that ``pages`` holds
    replay: StepFunction | None = None
    compared: int = 0  # of its steps with eager ones
    # Difference of two eager runs of one step, relative to the largest logit: 0, the same bits,
    # unless ranks add up in an order that changes. A replay may differ by no more.
    noise: float = 0.0
    sent: Counter[Purpose] = field(default_factory=Counter)


class DecodeGraphs:
    """Runs decode steps, by replaying recordings where that can be done.

    A key's first step runs eagerly; the second is recorded and replayed, as are those that follow,
    and the first replays are checked against eager steps. So a step that never comes again is not
    recorded.

    ``forward`` gives a step's `Results` from its inputs and block tables. It may run several times
    for a step: it must not do more than compute, and write the new token's keys and values. Lengths
    are padded (`padded_length`), and batches as the recorder has it; beyond ``most`` recordings, or
    its ``most_rows``, the least recently used go. While ``enabled``, which is the same on every
    rank, steps are still recorded.
    """

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        forward: Forward,
        recorder: Recorder,
        most: int = _MOST,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._comm, self._caches, self._forward = comm, caches, forward
        self._recorder, self._most = recorder, most
        self._recordings: OrderedDict[Key, _Recording] = OrderedDict()
        sums = comm.size > 1 and caches.pages.k.device.type == "cuda"
        self._tolerated = max(_SUMS_DIFFER, 2 * torch.finfo(dtype).eps) if sums else 0.0
        self.enabled = True
        self.difference = 0.0  # the largest, relative to the largest logit, of those compared

    @property
    def recorded(self) -> dict[Key, int]:
        """The steps of each recording that were compared, the least recently used first."""
        kept = self._recordings.items()
        return {key: of.compared for key, of in kept if of.replay is not None}

    def close(self) -> None:
        """Forget the recordings and record no more; steps still run, eagerly.

        To be called before the process group is destroyed: NCCL waits then, without end, until no
        graph is left that holds a collective.
        """
        self.enabled = False
        self._recordings.clear()

    def run(self, batch: DecodeBatch) -> Results:
        """Logits of one step, and the likeliest tokens."""
        if not self.enabled or len(batch) > self._recorder.most_sequences:
            return self._eager(batch)
        key = self.key(batch)
        recording = self._recordings.get(key)
        if recording is None:
            self._recordings[key] = _Recording()
            if len(self._recordings) > self._most:
                self._recordings.popitem(last=False)
            return self._eager(batch)
        self._recordings.move_to_end(key)
        if recording.compared < _COMPARED:
            return self._compare(recording, key, batch)
        return self._replay(recording, batch)

    def key(self, batch: DecodeBatch) -> Key:
        pad = self._recorder.pad
        windows = tuple(padded_length(tokens, pad) for tokens in batch.windows)
        return Key(self._recorder.rows(len(batch)), padded_length(batch.longest, pad), windows)

    def _eager(self, batch: DecodeBatch) -> Results:
        """Run a step with the memory that is needed."""
        return self._forward(*batch.on(self._caches.pages.k.device, len(batch)))

    def _replay(self, recording: _Recording, batch: DecodeBatch) -> Results:
        assert recording.replay is not None
        self._write(recording, batch)
        logits, tokens = recording.replay()
        for purpose, nbytes in recording.sent.items():
            self._comm.note(purpose, nbytes)
        return logits[: len(batch)], tokens[: len(batch)]

    def _write(self, recording: _Recording, batch: DecodeBatch) -> None:
        """Give a recording the next step's numbers."""
        assert recording.inputs is not None and recording.pages is not None
        rows, pages = recording.pages.shape
        recording.inputs.copy_(batch.padded(rows))
        tables, held = batch.pages, recording.tables
        if len(tables) != len(held) or any(a is not b for a, b in zip(tables, held, strict=True)):
            recording.pages.copy_(batch.table(rows, pages))
            recording.tables = tables

    def _compare(self, recording: _Recording, key: Key, batch: DecodeBatch) -> Results:
        """The eager step's results; and a recording that gives them too, or none from here on.

        Both read tables of the same shapes, so that they differ in no rounding.
        """
        pool, problem = self._caches.pages, None
        device, pages = pool.k.device, pool.pages_for(key.stored)
        numbers = batch.padded(key.sequences).to(device)
        tables = batch.table(key.sequences, pages).to(device)
        memory = BlockTables(tables, batch.widths(key.windows))
        step = partial(self._forward, StepInputs.of(numbers), memory)
        logits, tokens = (found[: len(batch)] for found in step())
        if not recording.compared:
            again, _ = step()
            recording.noise = _difference(again[: len(batch)], logits)
        if recording.replay is None:
            self._make_room(key.sequences)
            recording.inputs, recording.pages, recording.tables = numbers, tables, batch.pages
            problem = self._try(self._recorder.warm_up, step, sends=True)
            problem = problem or self._try(self._record, recording, step)
        if self._count_ranks(problem is not None) == [0]:
            # Replayed only now: a rank without a recording would leave the others waiting.
            problem = self._try(self._check, recording, batch, logits, tokens, sends=True)
            # Of NaN alone nothing is learned.
            void = logits.numel() > 0 and not _finite_rows(logits).any()
            failed, nothing = self._count_ranks(problem is not None, void)
            if not failed:
                recording.compared += not nothing
                return logits, tokens
        log.warning(
            "decode steps are not recorded from here on, and slower: %s",
            problem or "another rank could not use its own",
        )
        self.close()
        return logits, tokens

    def _make_room(self, rows: int) -> None:
        """Forget the least recently used recordings until ``rows`` more may be recorded."""
        recorded = self.recorded
        rows += sum(key.sequences for key in recorded)
        for key in recorded:
            if rows > self._recorder.most_rows:
                del self._recordings[key]
                rows -= key.sequences

    def _record(self, recording: _Recording, step: StepFunction) -> None:
        sent = self._comm.bytes_sent.copy()
        recording.replay = self._recorder.record(step)
        # Recording sends nothing, though it went through the communicator; each replay does.
        recording.sent = self._comm.bytes_sent - sent
        self._comm.bytes_sent.subtract(recording.sent)

    def _check(
        self, recording: _Recording, batch: DecodeBatch, logits: Tensor, tokens: Tensor
    ) -> str | None:
        replayed, chosen = self._replay(recording, batch)
        error, most = _difference(replayed, logits), max(recording.noise, self._tolerated)
        self.difference = max(self.difference, error)
        found = f"a replay's logits differ from the eager step's by {error:.1e}, relatively"
        # "not" and "<=", so that NaN is a difference.
        if not error <= most:
            return f"{found}, which may be {most:.1e}"
        if error == 0 and not torch.equal(chosen, tokens):
            return "a replay chooses other tokens than the eager step by the same logits"
        log.info("%s", found)
        return None

    def _try(
        self, attempt: Callable[..., str | None], *args: object, sends: bool = False
    ) -> str | None:
        """Return a sentence about what is wrong, or None.

        With several ranks, the error of an attempt that ``sends`` is raised: the other ranks wait
        in its collectives, which no agreement can end, and end with this rank.
        """
        try:
            return attempt(*args)
        except Exception as error:  # whatever a driver or a kernel raises: eager still works
            if sends and self._comm.size > 1:
                raise
            return f"{type(error).__name__}: {error}"

    def _count_ranks(self, *true: bool) -> list[int]:
        """Count the ranks where each is true."""
        counts = torch.tensor(true, dtype=torch.int64).to(self._caches.pages.k.device)
        found: list[int] = self._comm.all_reduce(counts, "control").wait()[0].tolist()
        return found


def _finite_rows(logits: Tensor) -> Tensor:
    return logits.isfinite().all(-1)


def _difference(found: Tensor, logits: Tensor) -> float:
    """Largest difference of logits, relative to the largest; 0 on ranks that have none.

    Of rows with NaN only where these are is compared: if that differs, it is NaN.
    """
    rows = _finite_rows(logits)
    if not torch.equal(found[~rows].isfinite(), logits[~rows].isfinite()):
        return math.nan
    found, logits = found[rows], logits[rows]
    if not logits.numel():
        return 0.0  # rank 0's depend on this rank's share
    # The needle model without its first token has logits of 0.
    scale = logits.abs().max().clamp(min=torch.finfo(logits.dtype).tiny)
    return ((found - logits).abs().max() / scale).item()
