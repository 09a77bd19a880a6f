"""One step of all ranks, in msgpack, never a pickle.

Rank 0 decides and broadcasts; the others follow. A plan travels in one frame of `FRAME_BYTES`; one
that does not fit follows in a second tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator

FRAME_BYTES = 4096
_LENGTH = 8  # bytes of the plan's length, with which a frame begins
# Bytes, of which the second tensor is a multiple: so it hardly depends on how large the keys are.
_ROUNDED = 256


class BatchEntry(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """The next tokens of one sequence in a step.

    All ranks compute all tokens, unless they are ``sharded``: a chunk of a prompt, of which each
    rank computes its shards.
    """

    sequence: int
    tokens: Tensor  # int64 [n], made of any integers
    sharded: bool = False
    # The prompt ends with them, or is cached up to here: every rank needs the whole window.
    last: bool = True
    # Likeliest tokens to report for each token of a chunk; -1 reports nothing.
    prompt_logprobs: int = -1
    # The prompt's token after the chunk, if log-probabilities are reported; -1 if there is none.
    following: int = -1
    # Report where the strongest heads look (`razor_dist.attention.sources`).
    sources: bool = False
    # The tokens are a run: an answer's last token and a draft of the next ones. Each gives logits,
    # and the next plan says how many of the tokens stay (`StepPlan.kept`).
    run: bool = False

    def __post_init__(self) -> None:
        tokens = torch.as_tensor(self.tokens, dtype=torch.int64)
        msgspec.structs.force_setattr(self, "tokens", tokens)

    @property
    def decoded(self) -> bool:
        """True for one token on every rank, and for a run: a recorded step may have both."""
        return self.run or (len(self.tokens) == 1 and not self.sharded)

    @property
    def samples(self) -> int:
        """The number of last tokens after which a step gives logits."""
        return len(self.tokens) if self.run else int(self.last or not self.sharded)


class StepPlan(msgspec.Struct, frozen=True, eq=False, array_like=True, tag=str.lower, kw_only=True):
    """Base of the plans that rank 0 broadcasts: one thing for all ranks to do next."""

    # Of each run of the step before, in order, how many of its tokens stay in the caches.
    kept: tuple[int, ...] = ()

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
        """Broadcast to the other ranks, which `receive`."""
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
        return _decode(data[:length].numpy().data)


class Open(StepPlan, frozen=True):
    """A new sequence begins."""

    sequence: int  # its key
    end: int  # it is prefilled in chunks up to this position
    total: int  # tokens to reserve, of prompt and answer
    # The most tokens that the model may ever read of it, or of a sequence that is forked from it.
    max_read: int


class Fork(StepPlan, frozen=True):
    """A new sequence begins with the first tokens of another."""

    sequence: int  # its key
    begin: int  # tokens that it copies
    end: int  # it is prefilled in chunks up to this position
    total: int  # tokens to reserve, of prompt and answer
    source: int  # key of the sequence to copy
    instead: bool = False  # the source ends, and has no other user


class Compute(StepPlan, frozen=True):
    """The model computes the next tokens of several sequences."""

    entries: tuple[BatchEntry, ...]

    @classmethod
    def of(cls, entries: Iterable[BatchEntry]) -> Compute:
        """Put the entries into their order: answers' tokens first, sharded entries last."""
        return cls(tuple(sorted(entries, key=lambda entry: (entry.sharded, not entry.decoded))))


class Cache(StepPlan, frozen=True):
    """A sequence is no longer in use: it is cached."""

    sequence: int


class Close(StepPlan, frozen=True):
    """A sequence ends."""

    sequence: int


class Save(StepPlan, frozen=True):
    """The next part of a sequence goes to host memory and disk.

    Ranks answer how far they are (`razor_dist.prefix.transfer`).
    """

    sequence: int
    payload: bytes = b""  # with the first part: a `SaveJob` in msgpack


class Load(StepPlan, frozen=True):
    """The next part of a sequence comes from host memory or disk; answered like `Save`."""

    sequence: int
    payload: bytes = b""  # with the first part: a `LoadJob` in msgpack


class Report(StepPlan, frozen=True):
    """Rank 0 gathers `razor_dist.engine.rank_stats.RankStats` of every rank."""


class Stop(StepPlan, frozen=True):
    """The ranks end."""


def _rounded(length: int) -> int:
    return -(-length // _ROUNDED) * _ROUNDED


def _packed(tokens: Any) -> bytes:
    assert isinstance(tokens, Tensor), f"a plan holds {type(tokens)}"
    return bytes(tokens.to(torch.int32).numpy())


def _unpacked(_: type, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int32).long()


_encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_decode = msgspec.msgpack.Decoder(
    Open | Fork | Compute | Cache | Close | Save | Load | Report | Stop, dec_hook=_unpacked
).decode
