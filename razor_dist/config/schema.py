"""Settings of the engine and of the server.

`razor_dist.config.sources` gathers their values from flags, the environment and YAML files. Every
mistake is one `ConfigError` that names the setting, the value and where it was found.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from razor_dist.config.cores import usable_cores
from razor_dist.config.errors import ConfigError
from razor_dist.config.rope_scaling import RopeScaling
from razor_dist.config.sizes import Size
from razor_dist.config.speculative import SpeculativeConfig
from razor_dist.config.validation import Hosts, Keys, Origins, SettingError, Share, explain

# Settings of all commands that name a file or a folder, perhaps in the home (~).
_PATHS = [
    "head_map",
    "duo_head_map",
    "prefix_store",
    "url_file",
    "api_key_file",
    "ssl_certfile",
    "ssl_keyfile",
]
# Old names of settings, which are taken with a warning.
RENAMED = {"wave_tokens": "chunked_prefill_size"}


def _setting(group: str, default: Any, description: str, **limits: Any) -> Any:
    """Declare a setting: its heading in ``--help``, its default, one line about it, its range."""
    extra: Any = {"group": group}
    return Field(default=default, description=description, json_schema_extra=extra, **limits)


_model = partial(_setting, "Model")
_ranks = partial(_setting, "Ranks")
_memory = partial(_setting, "Memory")
_streaming = partial(_setting, "Streaming heads")
_server = partial(_setting, "HTTP server")
_access = partial(_setting, "Access")
_job = partial(_setting, "Job")


class EngineConfig(BaseModel):
    """The settings of the ranks; frozen. `ConfigError` if a value is wrong or a name unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    # Heading in --help of the fields that a subclass adds with a plain pydantic.Field.
    group: ClassVar[str] = "Options"
    makes_store: ClassVar[bool] = False  # a store of its own, which prefix_store_gb bounds

    model: str = _model("smollm2", "Embedded model, folder or hub id.", min_length=1)
    attention: Literal["razor", "full", "streaming"] = _model(
        "razor", "razor: by head map; full: all retrieval; streaming: all streaming."
    )
    head_map: str | None = _model(
        None, "Path of a head map; none: the model folder's own, else the shipped one."
    )
    prefill: Literal["local", "exact"] = _model(
        "local", "Streaming heads at prefill: windowed (local) or in full (exact)."
    )
    retrieval_share: Share = _model(
        0.0,
        "Retrieval heads leave out blocks of 128 keys that have less than this of a query's "
        "attention, such as 1/128; 0: they read all.",
    )
    world_size: int = _ranks(1, "Number of ranks.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = _ranks("auto", "Where the ranks compute.")
    dtype: Literal["auto", "fp32", "bf16"] = _ranks(
        "auto", "Of weights and computing; auto: fp32 on cpu, bf16 on cuda."
    )
    weight_dtype: Literal["auto", "int8"] = _ranks(
        "auto", "Of linear layers on cpu; int8: 8-bit weights and products; auto: as dtype."
    )
    kv_dtype: Literal["auto", "fp32", "bf16", "int8", "int4"] = _memory(
        "auto",
        "Of cached and travelling keys and values; auto: as dtype; int8, int4: retrieval heads' in "
        "8 or 4 bits, others as dtype.",
    )
    weights: Literal["replicated", "zero3", "zero3-offload"] = _ranks(
        "replicated", "zero3: sharded over the ranks (DeepSpeed); -offload: in CPU memory."
    )
    decode: Literal["replicated", "tensor", "auto"] = _ranks(
        "auto",
        "Answers and short prompts: every rank computes all of them, or its share (tensor); auto: "
        "its share, unless that is much slower as the engine starts.",
    )
    max_model_len: Size | None = _model(
        None, "Tokens of prompt and answer together; none: the model's own.", ge=1
    )
    rope_scaling: Annotated[RopeScaling | None, BeforeValidator(RopeScaling.of)] = _model(
        None,
        "A longer context by YaRN, as JSON with vLLM's names: rope_type (yarn), factor, "
        "original_max_position_embeddings; none: as config.json says.",
    )
    max_num_seqs: int = _memory(
        64, "Sequences at once at most, if memory holds their caches.", ge=1
    )
    kv_tokens: Size | None = _memory(
        None,
        "Tokens in the retrieval KV pool, over all ranks; none: max_num_seqs sequences of "
        "max_model_len, or as many as memory holds.",
        ge=1,
    )
    prefix_cache: bool = _memory(
        True, "Keep what was read for prompts that begin alike, while there is room."
    )
    prefix_tail_tokens: Size = _memory(
        1024, "Tokens before a window by which streaming heads' caches can be cut back.", ge=0
    )
    prefix_host_gb: float = _memory(
        0.0, "Host memory for prefixes beside the KV caches, over all ranks, in GiB.", ge=0
    )
    prefix_store: str | None = _memory(
        None, "Directory that keeps prefixes, also for later servers; none: nothing.", min_length=1
    )
    prefix_store_gb: float | None = _memory(
        None, "Most that they may take there, in GiB; none: what the disk holds.", gt=0
    )
    page_size: Size = _memory(64, "Tokens per page of retrieval KV.", ge=1)
    chunked_prefill_size: Size | None = _memory(
        None,
        "Prompt tokens per prefill chunk; none: per rank 2048 on cpu, on cuda 8192 to 32768, by "
        "the windows.",
        ge=1,
    )
    max_step_ms: float = _memory(
        250.0, "About how long a prefill chunk may take while other requests wait.", gt=0
    )
    scheduling_policy: Literal["time", "priority"] = _ranks(
        "time", "Order of prompts; priority: by the requests' field priority first."
    )
    window_min: Size = _streaming(4000, "Least window of a streaming head, in tokens.", ge=1)
    window_ratio: int | None = _streaming(
        5, "The window is at least 1/ratio of the context; none: constant.", ge=1
    )
    window_max: Size | None = _streaming(None, "Cap on the window, in tokens.", ge=1)
    sink_tokens: Size = _streaming(4, "First tokens that a streaming head keeps.", ge=0)
    block: Size = _streaming(128, "The window starts at a multiple of this.", ge=1)
    compensation: bool = _streaming(True, "Keep the mean of what streaming heads drop.")
    source_heads: int = _ranks(
        4, "Strongest retrieval heads that requests with return_sources ask.", ge=1
    )
    ring: Literal["own", "ring_flash_attn"] = _ranks(
        "own", "Ring attention code; ring_flash_attn is CUDA's."
    )
    cuda_graphs: bool = _ranks(
        True, "Decode steps are recorded and repeated: in CUDA graphs, and on CPU."
    )
    speculative_config: Annotated[
        SpeculativeConfig | Literal["auto"] | None, BeforeValidator(SpeculativeConfig.of)
    ] = _ranks(
        "auto",
        "Drafts from what the prompt says, as JSON with vLLM's names: method (lookup or ngram), "
        "num_speculative_tokens, prompt_lookup_min and _max; auto: lookup on cpu; none: no drafts.",
    )
    shared_memory: bool = _ranks(
        True, "Ranks of one host talk through memory that they share; off: over gloo."
    )
    threads: int | None = _ranks(
        None,
        "Threads per rank; none: cores divided by the host's ranks, on Ray as many as "
        "cpus_per_rank, at least 1.",
        ge=1,
    )
    trust_remote_code: bool = _model(False, "Run Python code that the model ships.")
    collective_timeout: float = _ranks(
        120.0, "Seconds until a collective with a stuck rank fails.", gt=0
    )
    heartbeat_timeout: float = _ranks(
        30.0, "Seconds of rank 0's silence after which the ranks are killed and restarted.", gt=0
    )
    seed: int | None = _model(
        None,
        "Seed of the draws of requests that bring none; none: another at each start.",
        ge=0,
        lt=2**63,
    )
    generation_config: Literal["auto", "none"] = _model(
        "auto", "Sampling defaults: the model's generation_config.json (auto), or OpenAI's (none)."
    )
    repetition_detection: Literal["auto", "on", "off"] = _model(
        "auto",
        "Answers that repeat themselves end (finish_reason: repetition), unless the request says "
        "otherwise; auto: those of the embedded model.",
    )
    default_max_tokens: Size | None = _model(
        32768,
        "Tokens of an answer if the request names no limit; none: as many as the context holds.",
        ge=1,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self).model_fields) from None
        if self.window_max is not None and self.window_max < self.window_min:
            raise SettingError(
                f"window_max ({self.window_max}) must not be below window_min ({self.window_min})",
                "window_max",
                "window_min",
            )
        for name in ("prefix_store", "prefix_host_gb"):
            if getattr(self, name) and not self.caches_prefixes:
                raise ConfigError(
                    f"{name} is of no use without the prefix cache: leave out prefix_cache: false "
                    "and prefill: exact"
                )
        if self.prefix_store_gb and self.prefix_store is None and not self.makes_store:
            raise ConfigError("prefix_store_gb bounds prefix_store, which is not given")

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: Any) -> Any:
        if info.field_name in _PATHS and isinstance(value, str):
            return os.path.expanduser(value)  # no shell does in a file, a variable, or after "="
        kind = cls.model_fields[info.field_name].annotation
        if not isinstance(value, bool) or kind is bool:
            return value
        if "on" in get_args(kind):  # in YAML on and off are booleans, too
            return "on" if value else "off"
        # pydantic would take True for 1; `max_num_seqs: yes` in YAML is a mistake, not a 1.
        raise ValueError("neither true nor false")

    def threads_per_rank(self, local_ranks: int) -> int:
        """Threads of each of the ``local_ranks`` ranks on this host, at least 1."""
        return self.threads or max(1, usable_cores() // local_ranks)

    @property
    def model_options(self) -> dict[str, Any]:
        """Arguments of `razor_dist.models.loader`'s functions that say how a model is read."""
        return {"trust_remote_code": self.trust_remote_code, "rope_scaling": self.rope_scaling}

    @property
    def caches_prefixes(self) -> bool:
        """True if prompts may reuse cached prefixes; after exact prefill their caches differ."""
        return self.prefix_cache and self.prefill == "local"

    @property
    def keeps_prefixes(self) -> bool:
        """True if prefixes are kept beyond the KV caches."""
        return self.prefix_store is not None or self.prefix_host_gb > 0

    def engine_json(self) -> str:
        """The engine's settings alone, for a rank to read back with `from_json`."""
        return self.model_dump_json(include=set(EngineConfig.model_fields))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


class ServerConfig(EngineConfig):
    """The engine's settings and the HTTP server's; frozen."""

    host: str = _server("127.0.0.1", "Address to listen on.", min_length=1)
    port: int = _server(8000, "Port to listen on; 0 picks a free one.", ge=0, le=65535)
    url_file: str | None = _server(
        None, "File for the server's address, written once it listens.", min_length=1
    )
    served_model_name: str | None = _server(
        None, "Name of the model in the API; none: that of --model.", min_length=1
    )
    unknown_fields: Literal["refuse", "warn"] = _server(
        "refuse", "Fields of requests that are not supported; warn: ignored, and logged once."
    )
    max_queue: int = _server(
        128, "Answers in flight or waiting, n for each prompt, before a 429.", ge=1
    )
    request_timeout: float | None = _server(
        None, "Seconds from a request's arrival to its end, waiting included; none: any.", gt=0
    )
    max_body_mb: float = _server(64.0, "Largest request body, in MiB.", gt=0)
    max_total_body_mb: float = _server(
        256.0, "All bodies in memory, and texts and tokens answered, in MiB; more get a 429.", gt=0
    )
    header_timeout: float = _server(
        10.0, "Seconds that a connection may take to send a request's headers.", gt=0
    )
    body_timeout: float = _server(
        60.0, "Seconds that a body may take to arrive, and one more for each 64 KiB of it.", gt=0
    )
    max_connections: int = _server(
        1024,
        "Open connections; one more closes what has been sending its request for the longest.",
        ge=2,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _server(
        "info", "How much the server logs."
    )
    log_format: Literal["text", "json"] = _server("text", "json: an object on each line.")
    metrics_prefix: Literal["razor", "vllm"] = _server(
        "razor", "Of /metrics; vllm: vLLM's own names and labels for those that it has, too."
    )
    otlp_endpoint: str | None = _server(
        None,
        "OpenTelemetry collector for a trace of each answer, as http://HOST:4318; none: no traces.",
        pattern="^https?://.",
    )
    shutdown_timeout: float = _server(
        30.0, "Seconds that requests get to end at SIGTERM; a second one ends them at once.", ge=0
    )
    api_key: Keys = _access(
        (), "Keys, separated by commas; other processes see a flag, so rather a file."
    )
    api_key_file: str | None = _access(
        None, "File with a key on each line; # begins a comment.", min_length=1
    )
    max_requests_per_key: int | None = _access(
        None, "Requests of one key in flight; more get a 429.", ge=1
    )
    max_tokens_per_key: Size | None = _access(
        None, "Tokens of one key in flight: prompts, and the most that the answers may have.", ge=1
    )
    ssl_certfile: str | None = _access(None, "Certificate chain for TLS (PEM).", min_length=1)
    ssl_keyfile: str | None = _access(None, "Private key of the certificate (PEM).", min_length=1)
    share_prefixes: bool = _access(
        False, "Requests with different keys begin from each other's prefix cache."
    )
    pinned_gb: float = _access(
        0.0,
        "KV cache that the contexts of one key may take, over all ranks, in GiB; 0: cache_control "
        "keeps nothing.",
        ge=0,
    )
    allowed_hosts: Hosts = _access(
        (), "Names by which clients may call a server on loopback, localhost excepted; * is any."
    )
    allowed_origins: Origins = _access(
        (), "Origins whose pages may use the server from a browser (CORS); * is any."
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = sorted(
                ("ssl_certfile", "ssl_keyfile"), key=lambda n: not values.get(n)
            )
            raise ConfigError(f"{given} is given without {missing}: TLS needs both")
        for name in ("max_requests_per_key", "max_tokens_per_key"):
            if getattr(self, name) is not None and not (self.api_key or self.api_key_file):
                raise ConfigError(f"{name} is a limit for each key: it needs api_key_file")

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


class JobConfig(EngineConfig):
    """The engine's settings and the job's; frozen. Evaluations derive theirs from it."""

    group: ClassVar[str] = "Job"

    ray: bool = _job(True, "Engines of Ray actors; otherwise processes of this host.")
    ray_address: str | None = _job(
        None, "Cluster, as HOST:PORT or auto; none: RAY_ADDRESS, else a local one.", min_length=1
    )
    engines: int | None = _job(None, "Engines at once; none: as many as the cluster holds.", ge=1)
    cpus_per_rank: float = _job(
        1.0,
        "CPUs that Ray reserves for a rank, and its threads if threads is none; below 1 ranks "
        "share one.",
        gt=0,
    )
    placement: Literal["STRICT_PACK", "PACK"] = _job(
        "STRICT_PACK", "An engine's ranks on one node, or rather on one."
    )
    cluster_timeout: float = _job(600.0, "Seconds to wait until the cluster has room.", gt=0)
    attempts: int = _job(3, "How often an item is tried while engines fail under it.", ge=1)
    new_folder: bool = _job(False, "Begin FOLDER-2 if FOLDER holds results of other settings.")
    retry_failed: bool = _job(False, "Try again what an earlier run recorded as failed.")

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster that the job joins; None if it needs none or starts one.

        By default ``RAY_ADDRESS``, which Ray sets in submitted jobs; "local" and "" are none.
        """
        address = self.ray_address or os.environ.get("RAY_ADDRESS")
        return address if self.ray and address not in (None, "", "local") else None
