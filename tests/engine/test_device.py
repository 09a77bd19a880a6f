"""A rank's device, dtype and attention backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import device
from razor_dist.engine.device import torch_dtype, wait_for_device


@pytest.mark.parametrize(
    ("capability", "auto"), [((7, 0), torch.float32), ((7, 5), torch.float32),
                             ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)  # fmt: skip
def test_old_gpus_compute_in_fp32(
    capability: tuple[int, int], auto: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    here = torch.device("cuda", 0)
    assert torch_dtype(EngineConfig(), here) == auto
    assert torch_dtype(EngineConfig(dtype="fp32"), here) == torch.float32
    if auto == torch.bfloat16:
        assert torch_dtype(EngineConfig(dtype="bf16"), here) == torch.bfloat16
    else:
        with pytest.raises(ConfigError, match=r"dtype is bf16, for which Tesla T4 has no .* fp32"):
            torch_dtype(EngineConfig(dtype="bf16"), here)


def test_a_gpu_that_is_planned_for_is_not_asked() -> None:
    assert torch_dtype(EngineConfig(), torch.device("cuda")) == torch.bfloat16
    assert torch_dtype(EngineConfig(), torch.device("cpu")) == torch.float32


def test_a_device_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = iter([False, False, True])
    event = SimpleNamespace(record=lambda: None, query=lambda: next(queries, False))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    wait_for_device(torch.device("cpu"), 0.0)
    wait_for_device(torch.device("cuda", 0), 9.0)
    with pytest.raises(RuntimeError, match=r"the device has not answered for 0\.1 s"):
        wait_for_device(torch.device("cuda", 0), 0.1)


@pytest.mark.parametrize(
    ("name", "gpu", "compiles"),
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", False, False)],
)
def test_kernels_are_compiled_ahead_for_ranks_on_cpu(
    name: str, gpu: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on GPUs may be on other hosts, such as Ray's: this process may have no GPU."""
    begun: list[bool] = []
    monkeypatch.setattr(device, "compile_ahead", lambda: begun.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    device.prepare_device(EngineConfig(device=name))
    assert bool(begun) == compiles
