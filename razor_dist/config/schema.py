"""Settings of the engine and of the server.

`razor_dist.config.sources` gathers their values from flags, the environment and YAML files. Every
mistake is one `ConfigError` that names the setting, the value and where it was found.
"""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import Size
from razor_dist.config.validation import explain

# Old names of settings, which are taken with a warning.
RENAMED = {"wave_tokens": "chunked_prefill_size"}


def setting(group: str, default: Any, description: str, **limits: Any) -> Any:
    """Declare a setting: its heading in ``--help``, its default, one line about it, its range."""
    extra: Any = {"group": group}
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


class EngineConfig(BaseModel):
    """The settings of the ranks; frozen.

    Attributes
    ----------
    group : str
        Heading in ``--help`` of the fields that a subclass adds with a plain `pydantic.Field`.

    Raises
    ------
    ConfigError
        On construction, if a value is wrong or a name unknown; one sentence names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    group: ClassVar[str] = "Options"

    model: str = setting("Model", "smollm2", "Embedded model, folder or hub id.", min_length=1)
    attention: Literal["razor", "full", "streaming"] = setting(
        "Model", "razor", "razor: by head map; full: all retrieval; streaming: all streaming."
    )
    head_map: str | None = setting(
        "Model", None, "Path of a head map; none: the model folder's own, else the shipped one."
    )
    prefill: Literal["local", "exact"] = setting(
        "Model", "local", "Streaming heads at prefill: windowed (local) or in full (exact)."
    )
    world_size: int = setting("Ranks", 1, "Number of ranks.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = setting("Ranks", "auto", "Where the ranks compute.")
    dtype: Literal["auto", "fp32", "bf16"] = setting(
        "Ranks", "auto", "Of weights and computing; auto: fp32 on cpu, bf16 on cuda."
    )
    kv_dtype: Literal["auto", "fp32", "bf16"] = setting(
        "Memory", "auto", "Of cached and travelling keys and values; auto: as dtype."
    )
    weights: Literal["replicated", "zero3", "zero3-offload"] = setting(
        "Ranks",
        "replicated",
        "zero3: sharded over the ranks (DeepSpeed); -offload: in CPU memory.",
    )
    max_model_len: Size | None = setting(
        "Model", None, "Tokens of prompt and answer together; none: the model's own.", ge=1
    )
    max_num_seqs: int = setting("Memory", 4, "Sequences whose caches fit at once.", ge=1)
    kv_tokens: Size | None = setting(
        "Memory", None, "Tokens in the retrieval KV pool, over all ranks; none: computed.", ge=1
    )
    page_size: Size = setting("Memory", 64, "Tokens per page of retrieval KV.", ge=1)
    chunked_prefill_size: Size | None = setting(
        "Memory",
        None,
        "Prompt tokens per prefill chunk; none: per rank 2048 on cpu, on cuda 8192 to 32768, by "
        "the windows.",
        ge=1,
    )
    window_min: Size = setting(
        "Streaming heads", 4000, "Least window of a streaming head, in tokens.", ge=1
    )
    window_ratio: int | None = setting(
        "Streaming heads",
        5,
        "The window is at least 1/ratio of the context; none: constant.",
        ge=1,
    )
    window_max: Size | None = setting(
        "Streaming heads", None, "Cap on the window, in tokens.", ge=1
    )
    sink_tokens: Size = setting(
        "Streaming heads", 4, "First tokens that a streaming head keeps.", ge=0
    )
    block: Size = setting("Streaming heads", 128, "The window starts at a multiple of this.", ge=1)
    compensation: bool = setting(
        "Streaming heads", True, "Keep the mean of what streaming heads drop."
    )
    ring: Literal["own", "ring_flash_attn"] = setting(
        "Ranks", "own", "Ring attention code; ring_flash_attn is CUDA's."
    )
    cuda_graphs: bool = setting("Ranks", True, "Decode in CUDA graphs where that is possible.")
    threads: int | None = setting(
        "Ranks", None, "Threads per rank; none: cores divided by the host's ranks.", ge=1
    )
    trust_remote_code: bool = setting("Model", False, "Run Python code that the model ships.")
    collective_timeout: float = setting(
        "Ranks", 120.0, "Seconds until a collective with a stuck rank fails.", gt=0
    )
    heartbeat_timeout: float = setting(
        "Ranks",
        30.0,
        "Seconds of rank 0's silence after which the ranks are killed and restarted.",
        gt=0,
    )
    seed: int | None = setting(
        "Model",
        None,
        "Seed of the draws of requests that bring none; none: another at each start.",
        ge=0,
        lt=2**63,
    )
    generation_config: Literal["auto", "none"] = setting(
        "Model",
        "auto",
        "Sampling defaults: the model's generation_config.json (auto), or OpenAI's (none).",
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self).model_fields) from None
        if self.window_max is not None and self.window_max < self.window_min:
            raise ConfigError(
                f"window_max ({self.window_max}) must not be below window_min ({self.window_min})"
            )

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_no_number(cls, value: Any, info: Any) -> Any:
        # pydantic would take True for 1; `max_num_seqs: yes` in YAML is a mistake, not a 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("true and false are no values for it")
        return value

    def threads_per_rank(self, local_ranks: int) -> int:
        """Threads of each of the ``local_ranks`` ranks on this host, at least 1."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // local_ranks)

    def engine_json(self) -> str:
        """The engine's settings alone, for a rank to read back with `from_json`."""
        return self.model_dump_json(include=set(EngineConfig.model_fields))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `engine_json`."""
        return cls(**json.loads(text))


class ServerConfig(EngineConfig):
    """The engine's settings and the HTTP server's; frozen."""

    group: ClassVar[str] = "HTTP server"

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one."
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the model in the API; none: that of --model.",
    )
    max_queue: int = Field(
        default=64, ge=1, description="Requests in flight or waiting before a 429."
    )
    max_body_mb: float = Field(default=64.0, gt=0, description="Largest request body, in MiB.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="How much the server logs."
    )

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model


class JobConfig(EngineConfig):
    """The engine's settings and the job's; frozen. Evaluations derive theirs from it."""

    group: ClassVar[str] = "Job"

    ray: bool = Field(
        default=True, description="Engines of Ray actors; otherwise processes of this host."
    )
    ray_address: str | None = Field(
        default=None,
        min_length=1,
        description="Cluster, as ray.init takes it; none: RAY_ADDRESS, else a local one.",
    )
    engines: int | None = Field(
        default=None, ge=1, description="Engines at once; none: as many as the cluster holds."
    )
    cpus_per_rank: float = Field(
        default=1.0, gt=0, description="CPUs reserved for a rank; below 1 ranks share one."
    )
    placement: Literal["STRICT_PACK", "PACK"] = Field(
        default="STRICT_PACK", description="An engine's ranks on one node, or rather on one."
    )
    cluster_timeout: float = Field(
        default=600.0, gt=0, description="Seconds to wait until the cluster has room."
    )
    attempts: int = Field(
        default=3, ge=1, description="How often an item is tried while engines fail under it."
    )
    new_folder: bool = Field(
        default=False, description="Begin FOLDER-2 if FOLDER holds results of other settings."
    )
    retry_failed: bool = Field(
        default=False, description="Try again what an earlier run recorded as failed."
    )
