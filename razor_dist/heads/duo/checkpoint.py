"""The state of gate training: a small safetensors file, replaced as a whole.

DeepSpeed's own checkpoints would hold the same few thousand numbers as pickles in a folder for each
rank, which only the same number of ranks can read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from razor_dist.config.errors import ConfigError
from razor_dist.files import replacing


def state_file(folder: Path) -> Path:
    """Where a run's state is in the folder that it was given."""
    return folder / "gates.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """All that changes while gates are trained; data and learning rate follow from the step.

    Attributes
    ----------
    step : int
        Steps done.
    gates : Tensor
        float32 ``[layers, KV heads]``.
    mean, square : Tensor
        Of the same shape: AdamW's running means of the gradient and of its square.
    """

    step: int
    gates: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    def of(cls, step: int, gates: Tensor, optimizer: torch.optim.Optimizer) -> TrainingState:
        """The state after ``step`` steps."""
        adam = optimizer.state[gates]
        return cls(
            step,
            *(x.detach().cpu().clone() for x in (gates, adam["exp_avg"], adam["exp_avg_sq"])),
        )

    def restore(
        self,
        gates: Tensor,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
    ) -> None:
        """Put gates, optimiser and learning rate where they were."""
        with torch.no_grad():
            gates.copy_(self.gates)
        optimizer.state[gates] = {
            "step": torch.tensor(float(self.step)),
            "exp_avg": self.mean.to(gates.device),
            "exp_avg_sq": self.square.to(gates.device),
        }
        rates = [
            base * factor(self.step)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler.load_state_dict(
            {"last_epoch": self.step, "_step_count": self.step + 1, "_last_lr": rates}
            | {"base_lrs": scheduler.base_lrs, "lr_lambdas": [None] * len(rates)}
        )
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Write the state; a kill at any time leaves the old file or the new one.

        Parameters
        ----------
        path : Path
            Its folder must be there.
        settings : dict
            JSON data that `load` compares.
        """
        with replacing(path) as draft:
            save_file(
                {"gates": self.gates, "mean": self.mean, "square": self.square},
                draft,
                metadata={"step": str(self.step), "settings": json.dumps(settings)},
            )

    @classmethod
    def load(cls, path: Path, settings: dict[str, Any]) -> TrainingState:
        """Read a state.

        Raises
        ------
        ConfigError
            If there is none, or the run that wrote it had other settings; names the first one.
        """
        if not path.is_file():
            raise ConfigError(f"there is no run to resume: {path} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in ("gates", "mean", "square")}
            step, theirs = int(metadata["step"]), json.loads(metadata["settings"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no state of gate training: {error}") from error
        for key, value in settings.items():
            if theirs.get(key) != value:
                raise ConfigError(
                    f"the run in {path.parent} has {key} {theirs.get(key)!r}, this one {value!r}; "
                    "a run is resumed with the settings it began with"
                )
        return cls(step, **tensors)
