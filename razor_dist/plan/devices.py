"""The device table: what one rank's device can hold, read, compute and send."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from razor_dist.config.errors import ConfigError
from razor_dist.config.sources import read_mapping, read_text
from razor_dist.config.validation import explain, unknown

_GB = 1e9


class Efficiency(BaseModel):
    """Fractions of the peaks that are reached in practice."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    matmul: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    bandwidth: float = Field(gt=0, le=1)
    link: float = Field(gt=0, le=1)


class Device(BaseModel):
    """One device, in the units of its file; GB are 10⁹ bytes.

    Attributes
    ----------
    kind : str
        ``cuda`` or ``cpu``: chooses the engine's defaults.
    shared : bool
        Whether all ranks run on this one device and share its memory, bandwidth and peaks.
    memory_gb, bandwidth_gb_s : float
        Its memory, and how fast that is read.
    bf16_tflops, fp32_tflops : float
        Dense peaks.
    link_gb_s, link_latency_us : float
        What a rank sends per second at most, and how long a collective takes at least.
    reserve_gb : float
        Memory that is gone before anything of ours is allocated.
    efficiency : Efficiency
    sources : tuple of str
        Where the numbers are from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["cuda", "cpu"]
    shared: bool = False
    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    bf16_tflops: float = Field(gt=0)
    fp32_tflops: float = Field(gt=0)
    link_gb_s: float = Field(gt=0)
    link_latency_us: float = Field(ge=0)
    reserve_gb: float = Field(ge=0)
    efficiency: Efficiency
    sources: tuple[str, ...] = Field(min_length=1)

    def _share(self, world_size: int) -> float:
        return 1 / world_size if self.shared else 1.0

    def memory(self, world_size: int) -> float:
        """Bytes that a rank may use, the reserve taken off."""
        return (self.memory_gb - self.reserve_gb) * _GB * self._share(world_size)

    def bandwidth(self, world_size: int) -> float:
        """Bytes per second that a rank reads at peak."""
        return self.bandwidth_gb_s * _GB * self._share(world_size)

    def flops(self, dtype: torch.dtype, world_size: int) -> float:
        """Operations per second of a rank at peak, in float32 or in half of its bytes."""
        peak = self.fp32_tflops if dtype.itemsize == 4 else self.bf16_tflops
        return peak * 1e12 * self._share(world_size)

    @property
    def link(self) -> float:
        """Bytes per second that a rank sends at peak."""
        return self.link_gb_s * _GB

    @property
    def link_latency(self) -> float:
        """Seconds that a collective takes at least."""
        return self.link_latency_us * 1e-6


def device_names() -> list[str]:
    """Return the devices that come with razor_dist."""
    folder = resources.files("razor_dist.configs") / "devices"
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_device(name: str) -> Device:
    """Return a device by its name in the table, or by the path of a file of the same form.

    Raises
    ------
    ConfigError
        If there is none, or a field is missing or wrong.
    """
    if name in device_names():
        text = (resources.files("razor_dist.configs") / "devices" / f"{name}.yaml").read_text()
        return _parse(text, f"configs/devices/{name}.yaml")
    if Path(name).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{unknown(name, device_names(), 'device')}; or give a YAML file")
    return _parse(read_text(Path(name), "the device file"), name)


def _parse(text: str, source: str) -> Device:
    try:
        return Device(**read_mapping(text, source))
    except ValidationError as error:
        fields = Device.model_fields | Efficiency.model_fields
        raise ConfigError(f"{source}: {explain(error, fields)}") from None
