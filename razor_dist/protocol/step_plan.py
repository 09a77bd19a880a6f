"""One step of all ranks: a fixed-layout tensor of integers, never a pickle.

Rank 0 decides and broadcasts; the others follow. A plan is one int64 frame of `FRAME` numbers,
``HEADER`` of them fields; a payload that does not fit follows in a second tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator

FRAME = 512
HEADER = 16
_ROW = 5  # numbers that describe an entry beside its tokens


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


@dataclass(frozen=True, eq=False)
class BatchEntry:
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
        object.__setattr__(self, "tokens", torch.as_tensor(self.tokens, dtype=torch.int64))

    @property
    def decoded(self) -> bool:
        """True for one token on every rank, or a run: these may be part of a recorded step."""
        return self.run or (len(self.tokens) == 1 and not self.sharded)

    @property
    def flags(self) -> int:
        return self.sharded | self.last << 1 | self.sources << 2 | self.run << 3

    @property
    def samples(self) -> int:
        """How many of the tokens a step gives logits after: the last ones."""
        return len(self.tokens) if self.run else int(self.last or not self.sharded)


def payload_length(entries: int, tokens: int) -> int:
    """Return how many numbers describe a step."""
    return 1 + _ROW * entries + tokens


@dataclass(frozen=True, eq=False)
class StepPlan:
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
    # STEP: its entries; SAVE and LOAD: with the first part, what to do.
    payload: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def step(cls, entries: Sequence[BatchEntry]) -> StepPlan:
        """Return the plan of a step: answers' tokens first, sharded entries last."""
        ordered = sorted(entries, key=lambda entry: (entry.sharded, not entry.decoded))
        # The number of entries, a row of numbers for each, and the tokens of all.
        rows = [
            (p.sequence, len(p.tokens), p.flags, p.prompt_logprobs, p.following) for p in ordered
        ]
        table = torch.tensor(rows, dtype=torch.int64).flatten()
        tokens = [entry.tokens for entry in ordered]
        return cls(Op.STEP, payload=torch.cat([torch.tensor([len(rows)]), table, *tokens]))

    @cached_property
    def entries(self) -> list[BatchEntry]:
        """STEP: the entries, in their order in the step."""
        count = int(self.payload[0])
        tokens = payload_length(count, 0)
        rows = self.payload[1:tokens].view(count, _ROW).tolist()
        of_each = self.payload[tokens:].split([row[1] for row in rows])
        return [
            BatchEntry(
                *(key, of, bool(flags & 1), bool(flags & 2), logprobs, following),
                *(bool(flags & 4), bool(flags & 8)),
            )
            for (key, _, flags, logprobs, following), of in zip(rows, of_each, strict=True)
        ]

    def send(self, comm: Communicator) -> None:
        """Tell the other ranks, who `receive` it."""
        if comm.size == 1:
            return
        frame = torch.zeros(FRAME, dtype=torch.int64)
        body = torch.cat([torch.tensor(self.kept, dtype=torch.int64), self.payload])
        numbers = (int(getattr(self, name)) for name in _NUMBERS)
        header = [*numbers, len(self.kept), len(body)]
        frame[: len(header)] = torch.tensor(header)
        inline = len(body) <= FRAME - HEADER
        if inline:
            frame[HEADER : HEADER + len(body)] = body
        comm.host.broadcast(frame, "control")
        if not inline:
            comm.host.broadcast(body, "control")

    @classmethod
    def receive(cls, comm: Communicator) -> StepPlan:
        """Take part in rank 0's broadcast; blocks until it comes."""
        frame = torch.zeros(FRAME, dtype=torch.int64)
        comm.host.broadcast(frame, "control")
        *header, kept, n = frame[: len(_NUMBERS) + 2].tolist()
        if n <= FRAME - HEADER:
            body = frame[HEADER : HEADER + n]
        else:
            body = torch.empty(n, dtype=torch.int64)
            comm.host.broadcast(body, "control")
        numbers: dict[str, Any] = dict(zip(_NUMBERS, header, strict=True))
        numbers |= {"op": Op(numbers["op"]), "instead": bool(numbers["instead"])}
        return cls(**numbers, kept=tuple(body[:kept].tolist()), payload=body[kept:])


_NUMBERS = [field.name for field in fields(StepPlan) if field.name not in ("kept", "payload")]
