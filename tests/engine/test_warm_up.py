"""Warming up records what comes first, and leaves nothing else behind."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor

from razor_dist.attention import chosen
from razor_dist.engine.warm_up import merge_as_ranks_do, warm_up
from razor_dist.kernels import Partial, partial
from razor_dist.parallel import ring
from razor_dist.parallel.comm import Communicator
from tests.cases import Case, answer, make_runner, prefill
from tests.engine.recorded import case_of
from tests.logits import tokens_of
from tests.ranks import Ranks
from tests.tape import CountingTape
from tests.test_kernels_linear import needs_compiler
from tests.tiny_models import Tiny


def decoded(
    comm: Communicator, case: Case, warm: bool
) -> tuple[list[tuple[int, int]], int, int, list[Tensor | None]]:
    """Recordings by sequences and steps compared, what is left in use, bytes sent, and logits."""
    longest = dataclasses.replace(case, prompt=(0,) * 70)
    runner, before = make_runner(comm, longest, 5, CountingTape(comm)), comm.bytes_sent.copy()
    if warm:
        warm_up(runner, (1, 2, 4))
    assert runner.graphs is not None and not runner.sequences
    found = [(key.sequences, compared) for key, compared in runner.graphs.recorded.items()]
    left = runner.sequences.kv_bytes + runner.sequences.peak_kv_bytes
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


@needs_compiler
@pytest.mark.parametrize(
    ("sequences", "prompt", "recorded"), [(1, 70, [1]), (3, 70, [1, 2]), (5, 2, [])]
)
def test_only_batches_that_fit_are_recorded(
    sequences: int, prompt: int, recorded: list[int], ranks: Ranks, tiny: Tiny
) -> None:
    """An engine of one sequence starts as well, and so does one of the shortest contexts."""
    case = dataclasses.replace(case_of(tiny("llama")), prompt=(0,) * prompt, forced=(0,) * 3)
    assert ranks(1).run(batches, case, sequences)[0] == recorded


@needs_compiler
@pytest.mark.parametrize(
    ("world", "prompt", "chooses"), [(1, 1100, True), (2, 1100, True), (1, 70, False)]
)
def test_heads_that_choose_blocks_have_chosen(
    world: int, prompt: int, chooses: bool, ranks: Ranks, tiny: Tiny
) -> None:
    case = dataclasses.replace(case_of(tiny("llama"), share=0.01), prompt=(0,) * prompt)
    assert ranks(world).run(choices, case) == [(chooses, [1, 2], 0)] * world


def choices(comm: Communicator, case: Case) -> tuple[bool, list[int], int]:
    """Warm up; return whether blocks were chosen, the recorded batches, and the bytes in use."""
    runner = make_runner(comm, case, 2, CountingTape(comm))
    with mock.patch.object(chosen, "choose", wraps=chosen.choose) as choose:
        warm_up(runner, (1, 2))
    assert runner.graphs is not None
    recorded = [key.sequences for key in runner.graphs.recorded]
    return choose.called, recorded, runner.sequences.kv_bytes


def batches(comm: Communicator, case: Case, sequences: int) -> list[int]:
    """The sizes of the batches that warming up records in an engine of ``sequences``."""
    runner = make_runner(comm, case, sequences, CountingTape(comm))
    warm_up(runner)
    assert runner.graphs is not None and not runner.sequences
    return [key.sequences for key in runner.graphs.recorded]


def passes(comm: Communicator, case: Case) -> int:
    """Count the forward passes that warm up an engine without recordings."""
    runner, done = make_runner(comm, case, 8), list[object]()
    runner.model.register_forward_hook(lambda model, *_: done.append(model))
    warm_up(runner)
    assert runner.graphs is None and not runner.sequences
    return len(done)


def test_without_recordings_four_passes_warm_up(ranks: Ranks, tiny: Tiny) -> None:
    """Two prompts, a step of one answer, a step of both: few, as each may gather all weights."""
    case = dataclasses.replace(case_of(tiny("llama")), prompt=(0,) * 70)
    assert ranks(2).run(passes, case) == [4, 4]


Kind = tuple[tuple[bool, ...], ...]


def kinds_of_merges(comm: Communicator, case: Case, short: int) -> tuple[set[Kind], set[Kind]]:
    """Return which strides 16 divides: in a prompt's merges, and in those that warm up."""
    found: tuple[set[Kind], set[Kind]] = (set(), set())
    own = partial._merge
    runner = make_runner(comm, case)
    for kinds, run in zip(
        found, (lambda: prefill(runner, 0, case), lambda: merge_as_ranks_do(runner)), strict=True
    ):

        def noted(one: Partial, other: Partial, kinds: set[Kind] = kinds) -> Partial:
            strides = (x.out.stride()[:3] for x in (one, other))
            kinds.add(tuple(tuple(n % 16 == 0 for n in each) for each in strides))
            return own(one, other)

        travel = mock.patch.multiple(ring, _SHORT=short, queries_travel=lambda *_: True)
        with travel, mock.patch.object(partial, "_merge", noted), torch.inference_mode():
            run()
    return found


@pytest.mark.parametrize("short", [0, 256], ids=["ring", "gather"])
@pytest.mark.parametrize("chunk", [64, 68, 72])
def test_a_prompt_merges_nothing_that_has_not_been_compiled(
    chunk: int, short: int, ranks: Ranks, tiny: Tiny
) -> None:
    """Triton compiles a kernel for each of these kinds; a prompt of two chunks on CUDA has them."""
    case = dataclasses.replace(
        case_of(tiny("llama")), prompt=(0,) * (3 * chunk), chunked_prefill_size=chunk
    )
    for of_prompt, warmed in ranks(2).run(kinds_of_merges, case, short):
        assert of_prompt <= warmed
        assert any(not all(other) for _, other in of_prompt)
