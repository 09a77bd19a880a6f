"""The device table: what one rank's device can hold, read, compute and send."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from razor_dist.config.errors import ConfigError
from razor_dist.config.sources import read_mapping, read_text
from razor_dist.config.validation import SettingError, explain, unknown

_GB = 1e9
_FOLDER = resources.files("razor_dist.configs") / "devices"


class Efficiency(BaseModel):
    """Fractions of the peaks that are reached in practice."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    matmul: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    # Of attention to whole blocks of earlier keys, which other kernels compute; by default as
    # `attention`.
    long_attention: float | None = Field(default=None, gt=0, le=1)
    bandwidth: float = Field(gt=0, le=1)
    link: float = Field(gt=0, le=1)

    @property
    def long(self) -> float:
        return self.attention if self.long_attention is None else self.long_attention


_TIMES = ("link_latency_us", "kernel_us", "host_us")
_RANGED = (*_TIMES, *Efficiency.model_fields)


class Device(BaseModel):
    """One device, in the units of its file; GB are 10⁹ bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = ""
    about: str = ""  # the machine, in words
    kind: Literal["cuda", "cpu"]  # chooses the engine's defaults
    shared: bool = False  # all ranks run on one device and share its memory, bandwidth and peaks
    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    bf16_tflops: float = Field(gt=0)  # dense peaks
    fp32_tflops: float = Field(gt=0)
    link_gb_s: float = Field(gt=0)  # the most that a rank sends
    link_latency_us: float = Field(ge=0)  # the least time of a collective
    kernel_us: float = Field(default=0, ge=0)  # time of a small kernel in a recorded step
    host_us: float = Field(default=0, ge=0)  # time of the host between two steps
    reserve_gb: float = Field(ge=0)  # memory that is taken before the engine allocates any
    efficiency: Efficiency
    # The worst and the best to expect of efficiencies, latencies and times above, by name.
    ranges: dict[str, tuple[float, float]] = {}
    sources: tuple[str, ...] = Field(min_length=1)  # of the numbers

    @field_validator("ranges")
    @classmethod
    def _known(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (worst, best) in ranges.items():
            if name not in _RANGED:
                raise SettingError(unknown(name, _RANGED, "number with a range"), "ranges")
            is_time, low, high = name in _TIMES, min(worst, best), max(worst, best)
            if low < 0 or not (is_time or 0 < low <= high <= 1):
                what = "at least 0" if is_time else "above 0 and at most 1"
                said = f"{name}: both ends must be {what}, got [{worst:g}, {best:g}]"
                raise SettingError(said, "ranges")
            if worst < best if is_time else worst > best:
                said = f"{name}: the worst comes first, got [{worst:g}, {best:g}]"
                raise SettingError(said, "ranges")
        return ranges

    def at(self, end: Literal["worst", "best"]) -> Device:
        """The device with every number at one end of its range."""
        ends = {name: pair[end == "best"] for name, pair in self.ranges.items()}
        times = {name: value for name, value in ends.items() if name in _TIMES}
        rates = {name: value for name, value in ends.items() if name not in _TIMES}
        efficiency = self.efficiency.model_copy(update=rates)
        return self.model_copy(update={**times, "efficiency": efficiency})

    def _share(self, world_size: int) -> float:
        return 1 / world_size if self.shared else 1.0

    def memory(self, world_size: int) -> float:
        """Bytes that a rank may use, without the reserve."""
        return (self.memory_gb - self.reserve_gb) * _GB * self._share(world_size)

    def bandwidth(self, world_size: int) -> float:
        return self.bandwidth_gb_s * _GB * self._share(world_size)

    def flops(self, dtype: torch.dtype, world_size: int) -> float:
        """Operations per second of a rank at peak, in float32 or in 16 bits."""
        peak = self.fp32_tflops if dtype.itemsize == 4 else self.bf16_tflops
        return peak * 1e12 * self._share(world_size)


def device_names() -> list[str]:
    return sorted(Path(file.name).stem for file in _FOLDER.iterdir() if file.name.endswith(".yaml"))


def load_device(name: str) -> Device:
    """Read a device by its name in the table, or by the path of a file of the same form."""
    source = name
    if name in device_names():
        source = f"configs/devices/{name}.yaml"
        text = (_FOLDER / f"{name}.yaml").read_text()
    elif Path(name).suffix in (".yaml", ".yml"):
        text = read_text(Path(name), "the device file")
    else:
        raise ConfigError(f"{unknown(name, device_names(), 'device')}; or give a YAML file")
    try:
        return Device(**({"name": name} | read_mapping(text, source)))
    except ValidationError as error:
        fields = Device.model_fields | Efficiency.model_fields
        raise ConfigError(f"{source}: {explain(error, fields)}") from None
