"""Warming up records what comes first, and leaves nothing else behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from razor_dist.engine.warm_up import warm_up
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.step_plan import StepPlan
from tests.cases import Case, answer, make_runner, prefill
from tests.engine.test_core import make_core
from tests.engine.test_graph import case_of, tokens_of
from tests.ranks import RankPool
from tests.tape import CountingTape
from tests.test_kernels_linear import needs_compiler

Ranks = Callable[[int], RankPool]
Tiny = Callable[[str], Path]


def decoded(
    comm: Communicator, case: Case, warm: bool
) -> tuple[list[tuple[int, int]], int, int, list[Tensor | None]]:
    """Recordings by sequences and steps compared, what is left in use, bytes sent, and logits."""
    longest = dataclasses.replace(case, prompt=(0,) * 70)
    runner, before = make_runner(comm, longest, 5, CountingTape(comm)), comm.bytes_sent.copy()
    if warm:
        warm_up(runner, (1, 2, 4))
    assert runner.graphs is not None and not runner.sequences
    kept = runner.graphs._recordings.items()
    found = [(key.sequences, recording.compared) for key, recording in kept]
    left = runner.kv_bytes + runner.sequences.peak_kv_bytes
    sent = sum((comm.bytes_sent - before).values())
    prefill(runner, 0, dataclasses.replace(case, prompt=tokens_of(41, 0)))
    return found, left, sent, [runner.execute(answer((0, token))) for token in (5, 6, 7)]


@needs_compiler
@pytest.mark.parametrize(("world", "tensor"), [(1, False), (2, False), (2, True)])
def test_batches_are_recorded_and_nothing_else_is_left(
    world: int, tensor: bool, ranks: Ranks, tiny: Tiny
) -> None:
    case = case_of(tiny("llama"), tensor=tensor)
    cold = ranks(world).run(decoded, case, False)
    warm = ranks(world).run(decoded, case, True)
    for (*_, wanted), (found, left, sent, logits) in zip(cold, warm, strict=True):
        assert found == [(1, 2), (2, 2), (4, 2)]
        assert left == sent == 0
        for want, got in zip(wanted, logits, strict=True):
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_num_seqs": 1}, 1),
        ({"max_num_seqs": 5}, 4),
        ({"max_num_seqs": 4, "attention": "full", "kv_tokens": 8}, 2),  # five pages, two for each
        ({"prefill": "exact"}, 8),
    ],
)
def test_batches_without_room_are_left_out(
    settings: dict[str, Any], most: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny("llama"), **{"max_num_seqs": 8, **settings})
    opened: list[int] = []
    execute = core.runner.execute

    def counted(plan: StepPlan) -> Tensor | None:
        opened.append(len(core.runner.sequences))
        return execute(plan)

    monkeypatch.setattr(core.runner, "execute", counted)
    warm_up(core.runner)
    assert max(opened) == most
    core.idle()
