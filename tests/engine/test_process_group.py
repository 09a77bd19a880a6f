"""What the ranks' tensors travel by, which all ranks must decide alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from razor_dist.config.errors import ConfigError
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.process_group import backend_of
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["cpu", "cpu"], "gloo"),
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),
        (["GPU-a", "GPU-b", "GPU-a", "GPU-b"], "gloo"),
        # Another node's ranks have GPUs of their own; nobody may try NCCL for all that.
        (["GPU-a", "GPU-b", "GPU-c", "GPU-c"], "gloo"),
    ],
)
def test_nccl_wants_a_gpu_for_each_rank(devices: list[str], backend: str) -> None:
    assert backend_of(devices) == backend


def test_ranks_without_a_gpu_among_others_are_told() -> None:
    with pytest.raises(ConfigError, match=r"ranks \[1, 3\] see no GPU .* set device: cpu"):
        backend_of(["GPU-a", "cpu", "GPU-b", "cpu"])


def decide(comm: Communicator, devices: list[str]) -> str:
    """What a rank decides that knows its own device only, and hears of the others'."""
    heard = [""] * comm.size
    dist.all_gather_object(heard, devices[comm.rank], group=comm.group)
    return backend_of(heard)


def test_all_ranks_decide_alike(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(decide, ["GPU-a", "GPU-a"]) == ["gloo", "gloo"]
    assert ranks(2).run(decide, ["GPU-a", "GPU-b"]) == ["nccl", "nccl"]
