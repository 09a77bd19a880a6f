"""One step of all ranks: a fixed-layout tensor of integers, never a pickle.

Rank 0 decides and broadcasts; the others follow. A plan is one int64 frame of `FRAME` numbers,
``HEADER`` of them fields; a payload that does not fit follows in a second tensor.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator

FRAME = 256
HEADER = 16


class Op(IntEnum):
    OPEN = 1
    LONG = 2  # a chunk of a prompt, its tokens sharded over the ranks
    SHORT = 3  # tokens of several sequences, all of them on every rank
    CLOSE = 4
    FORK = 5
    STATS = 6
    STOP = 7


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step. Fields say which operations use them; the others ignore them."""

    op: Op
    sequence: int = 0  # OPEN, LONG, CLOSE, FORK: its key
    # LONG: the chunk's positions. OPEN and FORK: ``end`` is the position up to which long steps
    # will read, counted from the beginning of what FORK copies.
    begin: int = 0
    end: int = 0
    total: int = 0  # OPEN and FORK: tokens to reserve, prompt and answer
    # LONG: the prompt ends with this chunk, or goes on in a short step, where every rank needs the
    # whole window.
    last: bool = False
    prompt_logprobs: int = -1  # LONG: -1, or how many likeliest tokens to report per position
    source: int = 0  # FORK: key of the sequence to copy
    # OPEN: the most tokens that the model may ever read of it, or of one that FORK makes of it.
    max_read: int = 0
    # int64 [n], made of any integers. LONG: the chunk's token ids, and the next one if
    # log-probabilities are asked for and there is one. SHORT: pairs (sequence, token id), those of
    # a sequence together; sequences with one token come first.
    payload: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "payload", torch.as_tensor(self.payload, dtype=torch.int64))

    def by_sequence(self) -> list[tuple[int, list[int]]]:
        """SHORT: every sequence and its tokens."""
        pairs = self.payload.view(-1, 2).tolist()
        return [
            (key, [token for _, token in tokens])
            for key, tokens in itertools.groupby(pairs, key=operator.itemgetter(0))
        ]

    def send(self, comm: Communicator, device: torch.device) -> None:
        if comm.size == 1:
            return
        frame = torch.zeros(FRAME, dtype=torch.int64)
        header = [*(int(getattr(self, name)) for name in _NUMBERS), len(self.payload)]
        frame[: len(header)] = torch.tensor(header)
        inline = len(self.payload) <= FRAME - HEADER
        if inline:
            frame[HEADER : HEADER + len(self.payload)] = self.payload
        comm.broadcast(frame.to(device), "control")
        if not inline:
            comm.broadcast(self.payload.to(device), "control")

    @classmethod
    def receive(cls, comm: Communicator, device: torch.device) -> StepPlan:
        """Take part in rank 0's broadcast; blocks until it comes."""
        frame = torch.zeros(FRAME, dtype=torch.int64, device=device)
        comm.broadcast(frame, "control")
        *header, n = frame[: len(_NUMBERS) + 1].tolist()
        if n <= FRAME - HEADER:
            payload = frame[HEADER : HEADER + n]
        else:
            payload = torch.empty(n, dtype=torch.int64, device=device)
            comm.broadcast(payload, "control")
        numbers: dict[str, Any] = dict(zip(_NUMBERS, header, strict=True))
        numbers |= {"op": Op(numbers["op"]), "last": bool(numbers["last"])}
        return cls(**numbers, payload=payload)


_NUMBERS = [field.name for field in fields(StepPlan) if field.name != "payload"]


class StepSeconds:
    """How long steps of one kind took: counts by bounds in seconds, and their sum."""

    BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

    def __init__(self) -> None:
        self._counts = [0] * (len(self.BOUNDS) + 1)
        self._sum = 0.0

    def note(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
        self._sum += seconds

    @property
    def fields(self) -> tuple[tuple[float, ...], list[int], float]:
        """Bounds, the number of steps up to each and above the last, and the sum."""
        return self.BOUNDS, self._counts, self._sum
