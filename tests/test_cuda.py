"""Ranks on CUDA give the logits of one rank, and of the CPU.

One GPU is enough: the ranks share it, and what they send each other goes through the host's memory
and gloo. What is tested is the computation of every rank, not the links. The same runs with all
ranks on the CPU, so that the test itself is known to work where there is no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from razor_dist.cache.policy import StreamingPolicy
from razor_dist.parallel.comm import Communicator, HostLinks
from tests.cases import Case, logits_of
from tests.ranks import RankPool

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def logits_over_host(comm: Communicator, case: Case) -> Tensor | None:
    return logits_of(HostLinks(comm), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("exact", "share", "prompt"), [(False, 0.0, 130), (True, 0.0, 130), (False, 1 / 300, 1100)]
)
def test_ranks_on_one_device_give_the_logits_of_one_rank_on_the_cpu(
    device: str,
    exact: bool,
    share: float,
    prompt: int,
    ranks: Callable[[int], RankPool],
    tiny: Callable[[str], Path],
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = tuple(torch.randint(3, 190, (prompt + 20,), generator=generator).tolist())
    case = Case(
        str(tiny("llama")),
        ((False, False), (True, False), (True, True), (False, True)),
        StreamingPolicy(window_min=20, window_ratio=6, sinks=4, block=8),
        tokens[:prompt],
        tokens[prompt:],
        chunked_prefill_size=prompt // 3,
        exact=exact,
        share=share,
    )
    want = ranks(1).run(logits_of, case)[0]
    there = dataclasses.replace(case, device=device)
    for world in (1, 2, 4):
        got = ranks(world).run(logits_over_host, there)[0]
        assert (got - want).abs().max() / want.abs().max() <= 1e-4
        assert torch.equal(got.argmax(-1), want.argmax(-1))
