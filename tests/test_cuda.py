"""Ranks on CUDA give the logits of one rank, and of the CPU.

One GPU is enough: the ranks share it, and what they send each other goes through the host's memory
and gloo. What is tested is the computation of every rank, not the links. The same runs with all
ranks on the CPU, so that the test itself is known to work where there is no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from razor_dist.parallel.comm import Communicator, Pending, Purpose
from razor_dist.policy import LocalPolicy
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


@dataclass
class Landing(Pending):
    """Receives into the host's memory that end on the device."""

    inner: Pending | None = None
    buffers: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        assert self.inner is not None
        for buffer, arrived in zip(self.buffers, self.inner.wait(), strict=True):
            buffer.copy_(arrived)
        return super().wait()


class HostLinks(Communicator):
    """A communicator whose data travels through the host's memory."""

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        purpose: Purpose,
    ) -> Pending:
        buffers = [buffer for _, buffer in receives]
        inner = super().exchange(
            [(peer, tensor.cpu()) for peer, tensor in sends],
            [(peer, torch.empty_like(buffer, device="cpu")) for peer, buffer in receives],
            purpose,
        )
        return Landing(buffers, inner=inner, buffers=buffers)

    def broadcast(self, tensor: Tensor, source: int, purpose: Purpose) -> None:
        host = tensor.cpu()
        super().broadcast(host, source, purpose)
        tensor.copy_(host)

    def all_gather(self, tensor: Tensor, purpose: Purpose) -> Tensor:
        return super().all_gather(tensor.cpu(), purpose).to(tensor.device)

    def all_reduce(self, tensor: Tensor, purpose: Purpose) -> Pending:
        return Landing([tensor], inner=super().all_reduce(tensor.cpu(), purpose), buffers=[tensor])


def logits_over_host(comm: Communicator, case: Case) -> Tensor | None:
    return logits_of(HostLinks(comm.group), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [False, True])
def test_ranks_on_one_device_give_the_logits_of_one_rank_on_the_cpu(
    device: str,
    exact: bool,
    ranks: Callable[[int], RankPool],
    tiny: Callable[[str], Path],
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = tuple(torch.randint(3, 190, (150,), generator=generator).tolist())
    case = Case(
        str(tiny("llama")),
        ((False, False), (True, False), (True, True), (False, True)),
        LocalPolicy(window_min=20, window_ratio=6, sinks=4, block=8),
        tokens[:130],
        tokens[130:],
        wave_tokens=64,
        exact=exact,
    )
    want = ranks(1).run(logits_of, case)[0]
    there = dataclasses.replace(case, device=device)
    for world in (1, 2, 4):
        got = ranks(world).run(logits_over_host, there)[0]
        assert (got - want).abs().max() / want.abs().max() <= 1e-4
        assert torch.equal(got.argmax(-1), want.argmax(-1))
