"""``razor-dist plan``: memory, time and bytes of a deployment, and what defeats itself in it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import tokens
from razor_dist.engine.advice import about_heads, about_window
from razor_dist.models.loader import dtype_name
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

# Caches this many times as large as a sequence's belong to several, and can be made smaller.
_SEVERAL = 1.1


@dataclass(frozen=True)
class Plan:
    deployment: Deployment
    device: Device
    context: int  # tokens of the prompt, which decoding then sees
    memory: Memory  # per rank
    longest: int  # the longest context that fits, 0 if none does
    asked: int  # the longest that was asked about
    work: Operations
    prefill_time: Estimate
    decode_times: dict[str, Estimate]  # by mode, as many as there can be; the planned one is first
    not_shared: str | None  # why tensor mode cannot be
    # Bytes sent: by purpose, for the prompt and for one token after it, and in sum.
    links: dict[str, Any]

    @property
    def decode(self) -> str:
        return next(iter(self.decode_times))

    @property
    def decode_time(self) -> Estimate:
        return self.decode_times[self.decode]

    @property
    def budget(self) -> float:
        return self.device.memory(self.deployment.world_size)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.budget

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
    def warnings(self) -> list[str]:
        d = self.deployment
        said: list[str] = []
        if d.missing is not None:
            said.append(f"the head map {d.missing} does not exist: {d.source}")
        if d.config.attention != "full":
            selected = d.head_map.selected_fraction if d.head_map.selected else None
            said += about_heads(d.head_map.kv_fraction, selected)
        said += _about_windows(self)
        if self.context > d.shape.max_positions:
            verdict = "warns of" if d.shape.alibi else "refuses"
            said.append(
                f"the model was made for {tokens(d.shape.max_positions)} positions; the engine "
                f"{verdict} a context of {tokens(self.context)}"
            )
        if not self.fits:
            over = (self.memory.total - self.budget) / 1e9
            fits = f"{tokens(self.longest)} tokens fit"
            said.append(
                f"it does not fit: {over:.1f} GB too much per rank, and "
                f"{fits if self.longest else 'no context at all fits'}; "
                + ", or ".join(_remedies(self))
            )
        held = self.memory.sequence_retrieval_kv + self.memory.sequence_streaming_cache
        if d.streaming and held >= self.full_kv_per_rank:
            said.append(
                f"keys and values take {held / 1e9:.2f} GB per rank and sequence, where full "
                f"attention over {d.world_size} ranks would take "
                f"{self.full_kv_per_rank / 1e9:.2f}: nothing is saved"
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
            "kv_dtype": dtype_name(d.kv_dtype),
            "prefill": d.config.prefill,
            "heads": d.source,
            "kv_fraction": d.head_map.kv_fraction,
            "parameters": dataclasses.asdict(d.weights),
            "memory": memory | {"total": self.memory.total, "fits": self.fits},
            "budget": self.budget,
            "longest": self.longest,
            "full_kv_per_rank": self.full_kv_per_rank,
            "work": dataclasses.asdict(self.work) | {"total": self.work.total},
            "prefill_time": dataclasses.asdict(self.prefill_time),
            "decode": self.decode,
            "decode_time": dataclasses.asdict(self.decode_time),
            "decode_times": {
                mode: dataclasses.asdict(time) for mode, time in self.decode_times.items()
            },
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
    limit; ``retrieval`` a fraction of KV heads to take for retrieval heads, instead of a head map.
    Raises `ConfigError`, `ModelError` or `HeadMapError` if settings, model or head map are wrong.
    """
    d = Deployment.of(config, device.kind, retrieval)
    context = context or config.max_model_len or d.shape.max_positions
    max_model_len = config.max_model_len or context
    if context > max_model_len:
        raise ConfigError(f"context is {context}, above max_model_len, {max_model_len}")
    # As the engine's settings will say: the default chunk's length follows from it.
    config = config.model_copy(update={"max_model_len": max_model_len})
    d = dataclasses.replace(d, config=config)
    d, decode_times = _choose_decode(d, device, context)
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
    )


def _choose_decode(
    d: Deployment, device: Device, context: int
) -> tuple[Deployment, dict[str, Estimate]]:
    """The deployment in the mode of its settings, and how long a token takes in each, that first.

    ``decode: auto`` is planned as the faster one; the engine measures it.
    """
    modes = {"replicated": dataclasses.replace(d, shared=False)}
    if d.not_shared is None:
        modes["tensor"] = dataclasses.replace(d, shared=True)
    times = {
        mode: decode_time(one, device, context, traffic(one, context))
        for mode, one in modes.items()
    }
    chosen = d.config.decode
    if chosen == "auto":
        first = min(times, key=lambda mode: times[mode].seconds)
    else:
        first = chosen if chosen in modes else "replicated"
    return modes[first], {first: times[first], **times}


def _remedies(plan: Plan) -> list[str]:
    """Return what makes a plan smaller that does not fit; the last of them always can."""
    d, memory, config = plan.deployment, plan.memory, plan.deployment.config
    fit = memory.weights < plan.budget
    more = "take a device with more memory"
    if not fit:
        more += f" (weights, whole on every rank, take {memory.weights / 1e9:.1f} GB)"
    caches = memory.retrieval_kv + memory.streaming_cache
    held = memory.sequence_retrieval_kv + memory.sequence_streaming_cache
    large = memory.sequence_retrieval_kv > memory.sequence_streaming_cache
    chunked = memory.working > memory.logits and d.chunked_prefill_size > d.world_size
    helps = {
        "lower max_num_seqs": fit and config.max_num_seqs > 1 and caches > _SEVERAL * held,
        "lower kv_tokens": fit and (config.kv_tokens or 0) > plan.context,
        "lower chunked_prefill_size": fit and chunked,
        "add ranks": fit and not plan.device.shared,
        "set dtype: bf16": d.dtype == torch.float32,
        "set kv_dtype: bf16": d.dtype != torch.float32 and d.kv_dtype == torch.float32,
        "set kv_dtype: int8": fit and large and d.kv_dtype != torch.int8,
        more: True,
    }
    return [remedy for remedy in helps if helps[remedy]]


def _about_windows(plan: Plan) -> list[str]:
    d, said, size = plan.deployment, [], plan.deployment.world_size
    chunk = min(d.chunked_prefill_size, plan.context)
    for heads in d.streaming:
        window = heads.policy.window(plan.context - 1)
        said += [] if d.shared else about_window(heads.policy, plan.context, size)
        if size > 1 and not d.exact and chunk <= 2 * size * window and chunk < plan.context:
            whole = heads.rows * d.streaming_kv_bytes * plan.context
            moved = plan.links["prefill"]["halo"] / whole
            said.append(
                f"a chunk of {tokens(chunk)} tokens is no longer than 2P windows "
                f"({tokens(2 * size * window)}): the halo moves {moved:.1f} x all streaming keys "
                "and values; raise chunked_prefill_size or lower window_max"
            )
    return said
