"""Settings of the engine and of the server, and where they come from.

A setting is looked up on the command line, then in the environment (``RAZOR_<FIELD>``), then in
the user's YAML file, then in the defaults shipped for the model (``configs/models/<name>.yaml``),
and last in the class. Every mistake is one `ConfigError` that names the setting, the value and
where it was found.
"""

from __future__ import annotations

import json
import os
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from razor_dist.config.sizes import size_or_itself
from razor_dist.config.validation import explain
from razor_dist.heads.policy import StreamingPolicy


class EngineConfig(BaseModel):
    """What the ranks need to know; frozen.

    Raises
    ------
    ConfigError
        On construction, if a value is wrong or a name unknown; one sentence names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(
        default="smollm2", min_length=1, description="Embedded model, folder or hub id."
    )
    attention: Literal["razor", "full", "streaming"] = Field(
        default="razor",
        description="razor: by head map; full: all retrieval; streaming: all local.",
    )
    head_map: str | None = Field(
        default=None, description="Path of a head map; none takes the one shipped for the model."
    )
    prefill: Literal["local", "exact"] = Field(
        default="local",
        description="streaming heads at prefill: windowed (local) or in full (exact).",
    )
    world_size: int = Field(default=1, ge=1, description="Number of ranks.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the ranks compute."
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Of weights and computing; auto: fp32 on cpu, bf16 on cuda."
    )
    kv_dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Of cached and travelling keys and values; auto: as dtype."
    )
    weights: Literal["replicated", "zero3", "zero3-offload"] = Field(
        default="replicated",
        description="zero3: sharded over the ranks (DeepSpeed); -offload: in CPU memory.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompt and answer together; none: the model's own.",
    )
    max_num_seqs: int = Field(default=4, ge=1, description="Sequences whose caches fit at once.")
    kv_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in the retrieval KV pool, over all ranks; none: computed.",
    )
    page_size: int = Field(default=64, ge=1, description="Tokens per page of retrieval KV.")
    chunked_prefill_size: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens per prefill chunk; none: per rank 2048 on cpu, on cuda 8192 to "
        "32768, by the windows.",
    )
    window_min: int = Field(
        default=4000, ge=1, description="Least window of a streaming head, in tokens."
    )
    window_ratio: int | None = Field(
        default=5,
        ge=1,
        description="The window is at least 1/ratio of the context; none: constant.",
    )
    window_max: int | None = Field(default=None, ge=1, description="Cap on the window, in tokens.")
    sink_tokens: int = Field(
        default=4, ge=0, description="First tokens that a streaming head keeps."
    )
    block: int = Field(default=128, ge=1, description="The window starts at a multiple of this.")
    compensation: bool = Field(
        default=True, description="Keep the mean of what streaming heads drop."
    )
    ring: Literal["own", "ring_flash_attn"] = Field(
        default="own", description="Ring attention code; ring_flash_attn is CUDA's."
    )
    cuda_graphs: bool = Field(
        default=True, description="Decode in CUDA graphs where that is possible."
    )
    threads: int | None = Field(
        default=None, ge=1, description="Threads per rank; none: cores divided by the host's ranks."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that the model ships."
    )
    collective_timeout: float = Field(
        default=120.0, gt=0, description="Seconds until a collective with a stuck rank fails."
    )
    heartbeat_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds of rank 0's silence after which the ranks are killed and restarted.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the draws of requests that bring none."
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self).model_fields) from None
        _ = self.policy  # window_max below window_min is the policy's to refuse

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_no_number(cls, value: Any, info: Any) -> Any:
        # pydantic would take True for 1; `max_num_seqs: yes` in YAML is a mistake, not a 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("true and false are no values for it")
        return value

    @field_validator(
        "max_model_len",
        "kv_tokens",
        "chunked_prefill_size",
        "window_min",
        "window_max",
        mode="before",
    )
    @classmethod
    def _sizes_may_have_units(cls, value: Any) -> Any:
        return size_or_itself(value)

    @property
    def policy(self) -> StreamingPolicy:
        """What a streaming head sees (DESIGN.md §5)."""
        return StreamingPolicy(
            window_min=self.window_min,
            window_ratio=self.window_ratio,
            window_max=self.window_max,
            sinks=self.sink_tokens,
            block=self.block,
            compensation=self.compensation,
        )

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
