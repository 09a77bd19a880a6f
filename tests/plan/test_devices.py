"""The device table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from razor_dist.config.errors import ConfigError
from razor_dist.plan.devices import device_names, load_device


def test_the_table_is_whole() -> None:
    assert {"h200", "h100", "a100", "l40s", "4090", "cpu"} <= set(device_names())
    for name in device_names():
        device = load_device(name)
        assert device.memory(1) < device.memory_gb * 1e9
        assert device.flops(torch.bfloat16, 1) > device.flops(torch.float32, 1)
        assert device.sources


def test_a_hosts_ranks_share_it() -> None:
    cpu, h200 = load_device("cpu"), load_device("h200")
    assert cpu.memory(4) == cpu.memory(1) / 4
    assert cpu.bandwidth(4) == cpu.bandwidth(1) / 4
    assert h200.memory(4) == h200.memory(1) == 139e9


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "devices" / "h200.yaml"
    own = tmp_path / "mine.yaml"
    own.write_text(shipped.read_text().replace("memory_gb: 141", "memory_gb: 96"))
    assert load_device(str(own)).memory(1) == 94e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_gb: 1", "kind is missing"),
        ("- 1", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("memory_gbs: 1", "kind is missing|did you mean 'memory_gb'"),
    ],
)
def test_mistakes_in_it_are_named(tmp_path: Path, text: str, message: str) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_device(str(own))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown device 'h20'; did you mean 'h200'"):
        load_device("h20")
    with pytest.raises(ConfigError, match="cannot read the device file"):
        load_device("none.yaml")


def test_the_ends_of_ranges() -> None:
    h200 = load_device("h200")
    worst, best = h200.at("worst"), h200.at("best")
    assert worst.efficiency.bandwidth < h200.efficiency.bandwidth < best.efficiency.bandwidth
    assert worst.host_us > h200.host_us > best.host_us
    assert load_device("a100").at("worst") == load_device("a100")


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("{bandwith: [0.7, 0.8]}", "unknown number with a range 'bandwith'; did you mean"),
        ("{bandwidth: [0.8, 0.7]}", "bandwidth: the worst comes first"),
        ("{host_us: [100, 700]}", "host_us: the worst comes first"),
        ("{bandwidth: [0, 0.9]}", "bandwidth: both ends must be above 0 and at most 1, got"),
        ("{bandwidth: [0.7, 1.4]}", "bandwidth: both ends must be above 0 and at most 1, got"),
        ("{host_us: [600, -50]}", "host_us: both ends must be at least 0, got"),
    ],
)
def test_wrong_ranges_are_named(ranges: str, message: str, tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "devices" / "a100.yaml"
    own = tmp_path / "mine.yaml"
    own.write_text(f"{shipped.read_text()}ranges: {ranges}\n")
    with pytest.raises(ConfigError, match=message):
        load_device(str(own))
