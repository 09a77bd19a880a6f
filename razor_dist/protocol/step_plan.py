"""One step of all ranks, in msgpack, never a pickle.

Rank 0 decides and broadcasts; the others follow. A plan travels in one frame of `FRAME_BYTES`; one
that does not fit follows in a second tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import msgspec
import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator

FRAME_BYTES = 4096
_LENGTH = 8  # bytes of the plan's length, with which a frame begins
# Bytes, of which the second tensor is a multiple: so it hardly depends on how large the keys are.
_ROUNDED = 256


class Op(IntEnum):
    OPEN = 1
    STEP = 2  # the model reads tokens of several sequences
    CLOSE = 3
    FORK = 4
    STATS = 5
    STOP = 6
    CACHE = 7  # a sequence is no longer in use: it is cached
    # A sequence's next part goes to host memory and disk, or comes from there. Ranks answer how far
    # they are (`razor_dist.prefix.transfer`).
    SAVE = 8
    LOAD = 9


class BatchEntry(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """The next tokens of one sequence in a step.

    All ranks compute all of them, or, if it is ``sharded``, they are a chunk of a prompt of which
    each rank computes its shards.
    """

    sequence: int
    tokens: Tensor  # int64 [n], made of any integers
    sharded: bool = False
    # The prompt ends with them, or is cached up to here: every rank needs the whole window.
    last: bool = True
    # Of a chunk: -1, or how many likeliest tokens to report for each of its tokens.
    prompt_logprobs: int = -1
    # The prompt's token after them, if log-probabilities are asked for and there is one.
    following: int = -1
    # Of an answer's tokens: tell where the strongest heads look (`razor_dist.attention.sources`).
    sources: bool = False
    # A run: an answer's last token and a draft of those that may follow. Logits are wanted after
    # each, and the next plan says how many of these tokens stay (`StepPlan.kept`).
    run: bool = False

    def __post_init__(self) -> None:
        tokens = torch.as_tensor(self.tokens, dtype=torch.int64)
        msgspec.structs.force_setattr(self, "tokens", tokens)

    @property
    def decoded(self) -> bool:
        """True for one token on every rank, or a run: these may be part of a recorded step."""
        return self.run or (len(self.tokens) == 1 and not self.sharded)

    @property
    def samples(self) -> int:
        """The number of last tokens after which a step gives logits."""
        return len(self.tokens) if self.run else int(self.last or not self.sharded)


class StepPlan(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """One step. Fields say which operations use them; the others ignore them."""

    op: Op
    sequence: int = 0  # OPEN, CLOSE, FORK, CACHE, SAVE, LOAD: its key
    begin: int = 0  # FORK: how many of its source's tokens it copies
    # OPEN and FORK: the position up to which it is read in chunks, counted from the beginning of
    # what FORK copies.
    end: int = 0
    total: int = 0  # OPEN, FORK, LOAD: tokens to reserve, prompt and answer
    source: int = 0  # FORK: key of the sequence to copy
    instead: bool = False  # FORK: its source ends, and has no other user
    # OPEN: the most tokens that the model may ever read of it, or of one that FORK makes of it.
    max_read: int = 0
    # All: of each run of the step before, in order, how many of its tokens stay in the caches.
    kept: tuple[int, ...] = ()
    entries: tuple[BatchEntry, ...] = ()  # STEP
    payload: bytes = b""  # SAVE and LOAD: with the first part, what to do, in msgpack

    @classmethod
    def step(cls, entries: Iterable[BatchEntry]) -> StepPlan:
        """Return the plan of a step: answers' tokens first, sharded entries last."""
        ordered = sorted(entries, key=lambda entry: (entry.sharded, not entry.decoded))
        return cls(Op.STEP, entries=tuple(ordered))

    def frames(self) -> list[Tensor]:
        """Return what is sent: one tensor of `FRAME_BYTES`, or two."""
        data = _encode(self)
        length = len(data).to_bytes(_LENGTH, "little")
        if len(data) <= FRAME_BYTES - _LENGTH:
            parts = [(length + data).ljust(FRAME_BYTES, b"\0")]
        else:
            parts = [length.ljust(FRAME_BYTES, b"\0"), data.ljust(_rounded(len(data)), b"\0")]
        return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]

    def send(self, comm: Communicator) -> None:
        """Tell the other ranks, who `receive` it."""
        if comm.size > 1:
            for frame in self.frames():
                comm.host.broadcast(frame, "control")

    @classmethod
    def receive(cls, comm: Communicator) -> StepPlan:
        """Take part in rank 0's broadcast; blocks until it comes."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        comm.host.broadcast(frame, "control")
        length = int.from_bytes(frame[:_LENGTH].numpy().tobytes(), "little")
        data = frame[_LENGTH:]
        if length > len(data):
            data = torch.empty(_rounded(length), dtype=torch.uint8)
            comm.host.broadcast(data, "control")
        return _decoder.decode(data[:length].numpy().data)


def _rounded(length: int) -> int:
    return -(-length // _ROUNDED) * _ROUNDED


def _packed(tokens: Any) -> bytes:
    assert isinstance(tokens, Tensor), f"a plan holds {type(tokens)}"
    return bytes(tokens.to(torch.int32).numpy())


def _unpacked(_: type, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int32).long()


_encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_decoder = msgspec.msgpack.Decoder(StepPlan, dec_hook=_unpacked)
