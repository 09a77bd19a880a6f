"""The model whose heads are to be found, and the samples that two methods give it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.commands.identification.options import IdentifyOptions
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.heads.passkeys import Passkeys, PasskeySettings, open_passkeys
from razor_dist.models.loader import load_model, read_config
from razor_dist.models.registry import display_name, resolve_model
from razor_dist.models.shape import ModelShape


@dataclass(frozen=True)
class Model:
    """A model that is not loaded yet.

    Attributes
    ----------
    name : str
        As people know the model.
    path : Path
        Its folder.
    device : torch.device
    dtype : torch.dtype
    trust_remote_code : bool
    """

    name: str
    path: Path
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool

    @classmethod
    def of(cls, options: IdentifyOptions) -> Self:
        """The one that is asked for, downloaded if it has to be.

        Raises
        ------
        ConfigError, ModelError
            If there is no such device or no such model.
        """
        trust = options.trust_remote_code
        config = EngineConfig(model=options.model, device=options.device, dtype=options.dtype)
        device = torch_device(config, int(os.environ.get("LOCAL_RANK", "0")))
        path = resolve_model(options.model, trust_remote_code=trust)
        return cls(display_name(options.model), path, device, torch_dtype(config, device), trust)

    @cached_property
    def config(self) -> PretrainedConfig:
        """What its folder says of it."""
        return read_config(self.path, trust_remote_code=self.trust_remote_code)

    def load(self, device: torch.device | None = None) -> PreTrainedModel:
        """The model with our attention; on its own device if no other is named."""
        return load_model(
            self.path,
            device=device or self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )

    def passkey_settings(self, options: IdentifyOptions) -> PasskeySettings:
        """Samples as long as the model's context, or as the paper's if those are shorter."""
        longest = options.max_tokens
        if longest is None:
            context = ModelShape.from_config(self.config).max_positions
            longest = min(context, PasskeySettings.max_tokens)
        return PasskeySettings(passkeys=options.passkeys, max_tokens=longest, seed=options.seed)

    def passkeys(self, settings: PasskeySettings, haystack: Path | None) -> Passkeys:
        """The samples; see `razor_dist.heads.passkeys.open_passkeys`."""
        return open_passkeys(
            self.path, settings, haystack, trust_remote_code=self.trust_remote_code
        )
