"""Ranks on CUDA give the logits of one rank, and of the CPU.

One GPU is enough: the ranks share it, and what they send each other goes through the host's memory
and gloo. What is tested is the computation of every rank, not the links. The same runs with all
ranks on the CPU, so that the test itself is known to work where there is no GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator, HostLinks
from tests.cases import Case, logits_of
from tests.logits import POLICY, assert_same, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny

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


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("exact", "share", "prompt"), [(False, 0.0, 130), (True, 0.0, 130), (False, 1 / 300, 1100)]
)
def test_ranks_on_one_device_give_the_logits_of_one_rank_on_the_cpu(
    device: str,
    exact: bool,
    share: float,
    prompt: int,
    ranks: Ranks,
    tiny: Tiny,
) -> None:
    tokens = tokens_of(prompt + 20)
    case = Case(
        str(tiny("llama")),
        ((False, False), (True, False), (True, True), (False, True)),
        POLICY,
        tokens[:prompt],
        tokens[prompt:],
        chunked_prefill_size=prompt // 3,
        exact=exact,
        share=share,
    )
    want = ranks(1).run(logits_of, case)[0]
    there = dataclasses.replace(case, device=device)
    for world in (1, 2, 4):
        assert_same(ranks(world).run(logits_over_host, there)[0], want)
