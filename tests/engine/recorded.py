"""Engines whose decode steps are recorded, each beside one that decodes eagerly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from razor_dist.engine.graph import DecodeGraphs, Recorder, batch_bucket
from razor_dist.engine.runner import ModelRunner
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.step_plan import Close, Fork, StepPlan
from tests.cases import Case, answer, make_runner, prefill
from tests.logits import POLICY, tokens_of
from tests.tape import CountingTape

PAD = 16
# The window of 20 to 27 tokens slides in blocks of 8; the ring of 30 grows past PAD, then is full.
# Layers of one kind only, and mixed ones, for the four layers of two KV heads of the tiny Llama.
SPLIT = ((False, False), (True, False), (True, True), (False, True))
ROOM = 60


def case_of(path: Path, **changes: Any) -> Case:
    case = Case(
        str(path), SPLIT, POLICY, (), forced=(0,) * ROOM, chunked_prefill_size=50, page_size=4
    )
    return dataclasses.replace(case, **changes)


def make_pair(
    comm: Communicator, case: Case, recorder: Recorder, sequences: int = 5
) -> tuple[ModelRunner, ModelRunner]:
    """An eager runner, and one that records; what no token has filled is NaN in both."""
    longest = dataclasses.replace(case, prompt=(0,) * 70)
    eager = make_runner(comm, longest, sequences)
    graphs = make_runner(comm, longest, sequences, recorder)
    graphs.graphs = DecodeGraphs(comm, graphs.caches, graphs.decode_logits, recorder)
    for runner in (eager, graphs):
        for store in (runner.caches.pages, *runner.caches.streaming):
            for kept in (
                store.k,
                store.v,
                getattr(store, "k_scale", None),
                getattr(store, "v_scale", None),
            ):
                if kept is not None and kept.is_floating_point():
                    kept.fill_(math.nan)
    return eager, graphs


class Both:
    """Does the same with both runners, and notes how far their logits are apart."""

    def __init__(self, comm: Communicator, case: Case, pad: int = PAD) -> None:
        self.comm, self.case, self.tape = comm, case, CountingTape(comm, pad)
        self.eager, self.graphs = make_pair(comm, case, self.tape)
        self.errors: list[float] = []
        self.agree = True
        self.sent: list[tuple[int, int, int]] = []  # eagerly, by graphs; how often it ran there
        self.next = dict.fromkeys(range(9), 5)

    def open(self, key: int, length: int) -> None:
        case = dataclasses.replace(self.case, prompt=tokens_of(length, key))
        for runner in (self.eager, self.graphs):
            prefill(runner, key, case)

    def execute(self, plan: StepPlan) -> None:
        for runner in (self.eager, self.graphs):
            runner.execute(plan)

    def decode(self, *keys: int) -> None:
        plan = answer(*((key, self.next[key]) for key in keys))
        logits, sent = [], []
        before, replayed, compared = self.tape.recorded, self.tape.replayed, self.compared
        for runner in (self.eager, self.graphs):
            already = self.comm.bytes_sent["merge"]
            logits.append(runner.execute(plan))
            sent.append(self.comm.bytes_sent["merge"] - already)
        # What is replayed, or recorded, is of a padded batch.
        rows = batch_bucket(len(keys)) if self.tape.replayed > replayed else len(keys)
        # Eagerly to compare; twice and to warm up, where it is recorded; and replayed.
        times = 1 + (self.compared > compared) + 2 * (self.tape.recorded > before)
        self.sent.append((sent[0] * rows // len(keys), sent[1], times))
        if logits[0] is None or logits[1] is None:
            return
        want, got = logits
        self.errors.append(((got - want).abs().max() / want.abs().max()).item())
        self.agree &= torch.equal(got.argmax(-1), want.argmax(-1))

    @property
    def compared(self) -> int:
        assert self.graphs.graphs is not None
        return sum(self.graphs.graphs.recorded.values())

    def choose(self, *keys: int) -> None:
        """Feed other tokens, alike on every rank, which know no logits."""
        for key in keys:
            self.next[key] = (self.next[key] * 7 + key) % 180 + 3


def story(comm: Communicator, case: Case) -> tuple[list[float], bool, int, int, list]:
    """Sequences come, grow past every padded length, are forked and go."""
    both = Both(comm, case)
    both.open(0, 41)
    for _ in range(40):  # positions 41..80: three paddings, five blocks
        both.decode(0)
        both.choose(0)
    both.open(1, 9)
    both.open(2, 70)
    for _ in range(24):
        both.decode(1, 0, 2) if both.eager.sequences[0].length < 100 else both.decode(1, 2)
        both.choose(0, 1, 2)
    length = both.eager.sequences[2].length
    both.execute(Fork(3, begin=length, end=length, total=length + 30, source=2))
    both.execute(Close(0))
    for step in range(20):
        # Now with its source, now alone: each has a recording.
        both.decode(2, 3) if step % 3 else both.decode(3)
        both.choose(2, 3)
    both.execute(Close(1))
    both.open(4, 63)  # into pages and a slot that others have left
    for _ in range(10):
        both.decode(4, 3)
        both.choose(3, 4)
    for key in (2, 3, 4):
        both.execute(Close(key))
    assert both.graphs.graphs is not None and both.graphs.graphs.enabled
    assert both.graphs.sequences.kv_bytes == 0
    return both.errors, both.agree, both.tape.recorded, both.tape.replayed, both.sent
