"""``razor-dist plan``: memory, time and bytes of a deployment, and advice on its settings."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import tokens
from razor_dist.engine.advice import about_given_windows, about_heads, about_window
from razor_dist.engine.decode_mode import SHARING_IS_WORTH
from razor_dist.engine.device import kv_dtype_name
from razor_dist.models.loader import dtype_name
from razor_dist.plan.advice import faster_windows, fewest_ranks, remedies
from razor_dist.plan.compute import (
    Estimate,
    Operations,
    busiest,
    decode_time,
    full_attention,
    operations,
    prefill_time,
    traffic,
)
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import Device
from razor_dist.plan.memory import Memory, MemoryPlanner

# Memory and traffic are counted rank by rank, which takes about a minute for 256 ranks.
_MOST_RANKS = 256


@dataclass(frozen=True)
class Plan:
    deployment: Deployment
    device: Device
    context: int  # tokens of the prompt, which decoding then sees
    memory: Memory  # per rank
    longest: int  # the longest context that fits, 0 if none does
    asked: int  # the longest context that was tried
    work: Operations
    prefill_time: Estimate
    decode_times: dict[str, Estimate]  # by possible mode, the planned one first
    not_shared: str | None  # why tensor-parallel decode is impossible
    # Bytes sent, by purpose and in sum, for the prompt and for one token after it.
    links: dict[str, Any]
    retrieval: float | None  # fraction of KV heads, if given instead of a head map
    limited: bool  # the settings have a max_model_len; if not, it is the context

    @property
    def decode(self) -> str:
        return next(iter(self.decode_times))

    @property
    def decode_time(self) -> Estimate:
        return self.decode_times[self.decode]

    @property
    def decode_is_known(self) -> bool:
        """False if a token comes after the first chunk of dual chunk attention."""
        chunk = self.deployment.shape.dual_chunk
        return chunk is None or self.context < chunk

    @property
    def budget(self) -> float:
        return self.device.memory(self.deployment.world_size)

    @property
    def fits(self) -> bool:
        """True if the engine takes the settings and has the memory."""
        return self.refusal is None and self.has_memory

    @property
    def has_memory(self) -> bool:
        return self.memory.total <= self.budget

    @property
    def refusal(self) -> str | None:
        """`Deployment.refusal`."""
        return self.deployment.refusal

    @property
    def full_kv_per_rank(self) -> float:
        return self.deployment.full_kv_bytes * self.context / self.deployment.world_size

    @property
    def longest_text(self) -> str:
        text = f"{self.longest:,}" if self.longest else "none"
        if self.longest == self.asked:
            text = f"more than {text}"
        limit = self.deployment.shape.max_positions
        return f"{text}; the model's own is {tokens(limit)}" if self.longest > limit else text

    @cached_property
    def verdict(self) -> list[str]:
        """Lines of text: a refusal if any; that it fits, or advice; the fewest ranks that fit."""
        memory = f"{self.memory.total / 1e9:.1f} GB per rank of {self.budget / 1e9:.1f}"
        found = None
        if self.has_memory:
            said = [f"fits: {memory}"]
            if not self.limited and self.context != self.deployment.shape.max_positions:
                said[0] += f", with max_model_len: {self.context}"
        else:
            found = remedies(
                self.deployment, self.context, self.memory.total, self.budget, self._bytes
            )
            most = "no context fits"
            if self.longest:
                most = f"{tokens(self.longest)} tokens fit, with max_model_len: {self.longest}"
            said = [f"does not fit: {memory}; {most}; {found}"]
        if self.memory.weights > self.budget:
            said[0] += f" (weights, whole on every rank, take {self.memory.weights / 1e9:.1f} GB)"
        if not self.device.shared:
            said.append(fewest_ranks(self.deployment, self._fits, found))
        return said if self.refusal is None else [f"the engine refuses it: {self.refusal}", *said]

    def _bytes(self, changes: dict[str, Any]) -> int:
        """Bytes per rank with some settings changed."""
        planner = MemoryPlanner(self._with(changes), self.device)
        return planner.at(self._max_model_len, self.context).total

    def _fits(self, changes: dict[str, Any]) -> bool:
        """True if it fits with some settings changed."""
        planner = MemoryPlanner(self._with(changes), self.device)
        return planner.fits(self._max_model_len, self.context)

    @property
    def _max_model_len(self) -> int:
        return self.deployment.config.max_model_len or self.context

    def _prefill_seconds(self, changes: dict[str, Any]) -> float:
        d = self._with(changes)
        return prefill_time(d, self.device, self.context, traffic(d, self.context)).seconds

    def _with(self, changes: dict[str, Any]) -> Deployment:
        """The deployment with some settings changed; another number of ranks shares if it can."""
        config = self.deployment.config.model_copy(update=changes)
        d = Deployment.of(config, self.device.kind, self.retrieval)
        same = "world_size" not in changes
        shared = self.deployment.shared if same else config.decode != "replicated"
        return dataclasses.replace(d, shared=shared and d.not_shared is None)

    @cached_property
    def warnings(self) -> list[str]:
        d = self.deployment
        said: list[str] = []
        if d.missing is not None:
            said.append(f"the head map {d.missing} does not exist: {d.source}")
        if d.config.attention != "full":
            selected = d.head_map.selected_fraction if d.head_map.selected else None
            said += about_heads(d.head_map.kv_fraction, selected)
        said += _about_windows(self)
        if d.shape.alibi and self.context > d.shape.max_positions:
            said.append(
                f"the model was made for {tokens(d.shape.max_positions)} positions; the engine "
                f"warns of a context of {tokens(self.context)}"
            )
        said += faster_windows(d, self.context, self.prefill_time.seconds, self._prefill_seconds)
        held = self.memory.sequence_retrieval_kv + self.memory.sequence_streaming_cache
        if d.streaming and held >= self.full_kv_per_rank:
            said.append(
                f"keys and values take {held / 1e9:.2f} GB per rank and sequence, where full "
                f"attention over {d.world_size} ranks would take "
                f"{self.full_kv_per_rank / 1e9:.2f}: nothing is saved"
            )
        if d.config.retrieval_share:
            said.append(
                "with retrieval_share, attention of retrieval heads is the estimates and what "
                "each query reads; blocks that a text makes them choose come on top"
            )
            if d.kind == "cuda":
                said.append(
                    "with retrieval_share, decode steps are not replayed from CUDA graphs, and "
                    "the time of a token here is that of a replay"
                )
        if d.shape.dual_chunk is not None and not self.decode_is_known:
            said.append(
                f"answers beyond {tokens(d.shape.dual_chunk)} tokens are not recorded, and their "
                "time is not estimated"
            )
        if d.exact:
            said.append(
                "prefill is exact: every head rides the ring and keeps everything until the prompt "
                "ends, so that prefill saves neither time, nor bytes, nor memory"
            )
        return said

    def as_json(self) -> dict[str, Any]:
        d = self.deployment
        memory = dataclasses.asdict(self.memory)
        known = self.decode_times if self.decode_is_known else {}
        times = {mode: dataclasses.asdict(time) for mode, time in known.items()}
        return {
            "model": d.config.model,
            "device": self.device.name,
            "world_size": d.world_size,
            "context": self.context,
            "max_model_len": d.config.max_model_len,
            "model_limit": d.shape.max_positions,
            "chunked_prefill_size": d.chunked_prefill_size,
            "chunks": len(d.chunks(self.context)),
            "dtype": dtype_name(d.dtype),
            "kv_dtype": kv_dtype_name(d.kv_dtype),
            "prefill": d.config.prefill,
            "heads": d.source,
            "kv_fraction": d.head_map.kv_fraction,
            "parameters": dataclasses.asdict(d.weights),
            "memory": memory | {"total": self.memory.total, "fits": self.fits},
            "refusal": self.refusal,
            "budget": self.budget,
            "longest": self.longest,
            "verdict": self.verdict,
            "full_kv_per_rank": self.full_kv_per_rank,
            "work": dataclasses.asdict(self.work) | {"total": self.work.total},
            "prefill_time": dataclasses.asdict(self.prefill_time),
            "decode": self.decode,
            "decode_time": times.get(self.decode),
            "decode_times": times,
            "not_shared": self.not_shared,
            "links": self.links,
            "warnings": self.warnings,
            "sources": self.device.sources,
        }


def plan(
    config: EngineConfig,
    device: Device,
    *,
    context: int | None = None,
    retrieval: float | None = None,
) -> Plan:
    """Plan a deployment from ``config.json`` and the head map alone.

    ``context`` is the prompt's length in tokens, by default ``max_model_len`` or the model's own
    limit; ``retrieval`` is a fraction of KV heads to plan as retrieval heads, without a head map.
    Raises `ConfigError`, `ModelError` or `HeadMapError` if settings, model or head map are wrong.
    """
    if config.world_size > _MOST_RANKS:
        raise ConfigError(
            f"world_size is {config.world_size}, but plan counts up to {_MOST_RANKS} ranks"
        )
    if context is None:
        context = config.max_model_len or Deployment.of(config, device.kind).shape.max_positions
    max_model_len = config.max_model_len or context
    if context < 1:
        raise ConfigError(f"context must be at least 1, got {context}")
    if context > max_model_len:
        raise ConfigError(f"context is {context}, above max_model_len, {max_model_len}")
    # The default chunk length depends on max_model_len.
    limited = config.max_model_len is not None
    config = config.model_copy(update={"max_model_len": max_model_len})
    d, decode_times = _deploy(config, device, context, retrieval)
    planner = MemoryPlanner(d, device)
    sent, full = traffic(d, context), traffic(full_attention(d), context)
    return Plan(
        deployment=d,
        device=device,
        context=context,
        memory=planner.at(max_model_len, context),
        longest=planner.longest_context(context),
        asked=planner.limit,
        work=operations(d, context),
        prefill_time=prefill_time(d, device, context, sent),
        decode_times=decode_times,
        not_shared=d.not_shared,
        links={
            "prefill": dict(sum(sent.prefill, Counter[str]())),
            "decode": dict(sum(sent.decode, Counter[str]())),
            "full_prefill": sum(full.prefill, Counter[str]()).total(),
            "full_decode": sum(full.decode, Counter[str]()).total(),
            "busiest_prefill": busiest(sent.prefill),
            "busiest_decode": busiest(sent.decode),
        },
        retrieval=retrieval,
        limited=limited,
    )


def _deploy(
    config: EngineConfig, device: Device, context: int, retrieval: float | None
) -> tuple[Deployment, dict[str, Estimate]]:
    """The deployment in its decode mode, and times of a token in all modes, this one first.

    ``decode: auto`` is planned as tensor-parallel decode if that takes less than `SHARING_IS_WORTH`
    times as long as replicated decode; the engine measures it.
    """
    d = Deployment.of(config, device.kind, retrieval)
    modes = {"replicated": dataclasses.replace(d, shared=False)}
    if d.not_shared is None:
        modes["tensor"] = dataclasses.replace(d, shared=True)
    times = {
        mode: decode_time(one, device, context, traffic(one, context))
        for mode, one in modes.items()
    }
    worth = {"auto": SHARING_IS_WORTH, "tensor": math.inf, "replicated": 0.0}[d.config.decode]
    first = "replicated"
    if "tensor" in times and times["tensor"].seconds < worth * times["replicated"].seconds:
        first = "tensor"
    return modes[first], {first: times[first], **times}


def _about_windows(plan: Plan) -> list[str]:
    d, said, size = plan.deployment, [], plan.deployment.world_size
    chunk = min(d.chunked_prefill_size, plan.context)
    by_settings = d.head_map.windows is None  # else the head map has them
    if not by_settings:
        said += about_given_windows(d.config)
    elif not d.shared:
        for heads in d.streaming:
            said += about_window(heads.policy, plan.context, size)
    window = max((heads.policy.window(plan.context - 1) for heads in d.streaming), default=0)
    if window and size > 1 and not d.exact and chunk <= 2 * size * window and chunk < plan.context:
        whole = sum(heads.rows for heads in d.streaming) * d.streaming_kv_bytes * plan.context
        moved = plan.links["prefill"]["halo"] / whole
        said.append(
            f"a chunk of {tokens(chunk)} tokens is no longer than 2P windows "
            f"({tokens(2 * size * window)}): the halo moves {moved:.1f} x all streaming keys "
            "and values; raise chunked_prefill_size" + " or lower window_max" * by_settings
        )
    return said
