"""``razor-dist plan``: memory, time and bytes of a deployment, and what defeats itself in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import tokens
from razor_dist.engine.advice import about_heads, about_window
from razor_dist.models.loader import dtype_name
from razor_dist.plan.compute import Estimate, Operations, decode_time, operations, prefill_time
from razor_dist.plan.deployment import Deployment, Weights
from razor_dist.plan.devices import Device
from razor_dist.plan.memory import LONGEST, Memory, MemoryPlanner
from razor_dist.plan.traffic import Traffic, full_attention, traffic


@dataclass(frozen=True)
class Links:
    """Bytes sent by all ranks together, by purpose.

    Attributes
    ----------
    prefill, decode : mapping of str to int
        For the whole prompt; for one token after it.
    full_prefill, full_decode : int
        All purposes, if every head were a retrieval head.
    busiest_prefill, busiest_decode : int
        What the busiest rank sends of it.
    """

    prefill: Mapping[str, int]
    decode: Mapping[str, int]
    full_prefill: int
    full_decode: int
    busiest_prefill: int
    busiest_decode: int


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes
    ----------
    model, device : str
        As they were named.
    world_size, context, max_model_len, chunked_prefill_size, chunks : int
        ``context`` is the prompt's length, and what decoding then sees.
    dtype, kv_dtype, prefill : str
    heads : str
        Which KV heads are taken for retrieval heads, and who says so.
    kv_fraction : float
    parameters : Weights
    memory : Memory
        Per rank.
    budget : float
        Bytes that a rank may use.
    longest : int
        The longest context that fits, 0 if none does.
    full_kv_per_rank : float
        Bytes of keys and values of one sequence if every head were sharded.
    work : Operations
    prefill_time, decode_time : Estimate
    links : Links
    warnings : list of str
    sources : tuple of str
        Of the device's numbers.
    """

    model: str
    device: str
    world_size: int
    context: int
    max_model_len: int
    chunked_prefill_size: int
    chunks: int
    dtype: str
    kv_dtype: str
    prefill: str
    heads: str
    kv_fraction: float
    parameters: Weights
    memory: Memory
    budget: float
    longest: int
    full_kv_per_rank: float
    work: Operations
    prefill_time: Estimate
    decode_time: Estimate
    links: Links
    warnings: list[str]
    sources: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits into a rank's memory."""
        return self.memory.total <= self.budget

    def as_json(self) -> dict[str, Any]:
        """Everything, with what the tables derive."""
        found = dataclasses.asdict(self)
        found["memory"] |= {"total": self.memory.total, "fits": self.fits}
        found["work"] |= {"total": self.work.total}
        for name in ("prefill_time", "decode_time"):
            time: Estimate = getattr(self, name)
            found[name] |= {
                "seconds_at_peak": time.at_peak, "seconds": time.seconds, "limit": time.limit
            }  # fmt: skip
        return found


def plan(
    config: EngineConfig,
    device_name: str,
    device: Device,
    *,
    context: int | None = None,
    retrieval: float | None = None,
) -> Plan:
    """Plan a deployment from ``config.json`` and the head map alone.

    Parameters
    ----------
    config : EngineConfig
        Its device must be ``auto`` or the kind of ``device``.
    device_name : str
        For the report.
    device : Device
    context : int, optional
        Tokens of the prompt; by default ``max_model_len``, or the model's own limit.
    retrieval : float, optional
        Fraction of KV heads to take for retrieval heads, instead of a head map.

    Raises
    ------
    ConfigError, ModelError, HeadMapError
        If settings, model or head map are wrong.
    """
    d = Deployment.of(config, device.kind, retrieval)
    context = context or config.max_model_len or d.shape.max_positions
    max_model_len = config.max_model_len or context
    if context > max_model_len:
        raise ConfigError(f"context is {context}, above max_model_len, {max_model_len}")
    # As the engine will be told: the default chunk's length follows from it.
    config = config.model_copy(update={"max_model_len": max_model_len})
    d = dataclasses.replace(d, config=config)
    planner = MemoryPlanner(d, device)
    memory = planner.at(max_model_len, context)
    sent, full = traffic(d, context), traffic(full_attention(d), context)
    links = Links(
        prefill=dict(Traffic.total(sent.prefill)),
        decode=dict(Traffic.total(sent.decode)),
        full_prefill=Traffic.total(full.prefill).total(),
        full_decode=Traffic.total(full.decode).total(),
        busiest_prefill=Traffic.most(sent.prefill),
        busiest_decode=Traffic.most(sent.decode),
    )
    found = Plan(
        model=config.model,
        device=device_name,
        world_size=d.world_size,
        context=context,
        max_model_len=max_model_len,
        chunked_prefill_size=d.chunked_prefill_size,
        chunks=len(d.chunks(context)),
        dtype=dtype_name(d.dtype),
        kv_dtype=dtype_name(d.kv_dtype),
        prefill=config.prefill,
        heads=d.decision.source,
        kv_fraction=d.decision.kv_fraction,
        parameters=d.weights,
        memory=memory,
        budget=planner.budget,
        longest=planner.longest_context(context),
        full_kv_per_rank=d.full_kv_bytes * context / d.world_size,
        work=operations(d, context),
        prefill_time=prefill_time(d, device, context, sent),
        decode_time=decode_time(d, device, context, sent),
        links=links,
        warnings=[],
        sources=device.sources,
    )
    return dataclasses.replace(found, warnings=warnings(d, found))


def warnings(d: Deployment, plan: Plan) -> list[str]:
    """Where a setting defeats itself, one sentence each."""
    said = _about_windows(d, plan)
    if d.config.attention != "full":
        said = about_heads(d.decision.kv_fraction, d.decision.selected_fraction) + said
    if plan.context > d.shape.max_positions:
        verdict = "warns of" if d.shape.alibi else "refuses"
        said.append(
            f"the model was made for {tokens(d.shape.max_positions)} positions; the engine "
            f"{verdict} a context of {tokens(plan.context)}"
        )
    if not plan.fits:
        over = (plan.memory.total - plan.budget) / 1e9
        longest = tokens(plan.longest) if plan.longest else "no context at all"
        said.append(
            f"it does not fit: {over:.1f} GB too much per rank; {longest} fits with max_num_seqs "
            f"{d.config.max_num_seqs}: lower max_num_seqs or chunked_prefill_size, add ranks, or "
            "kv_dtype: bf16"
        )
    held = plan.memory.sequence_retrieval_kv + plan.memory.sequence_streaming_cache
    if d.streaming and held >= plan.full_kv_per_rank:
        said.append(
            f"keys and values take {held / 1e9:.2f} GB per rank and sequence, where full attention "
            f"over {d.world_size} ranks would take {plan.full_kv_per_rank / 1e9:.2f}: nothing is "
            "saved"
        )
    if d.exact:
        said.append(
            "prefill is exact: every head rides the ring and keeps everything until the prompt "
            "ends, so that prefill saves neither time, nor bytes, nor memory"
        )
    return said


def _about_windows(d: Deployment, plan: Plan) -> list[str]:
    said, size = [], d.world_size
    for heads in d.streaming:
        window = heads.policy.window(plan.context - 1)
        said += about_window(heads.policy, plan.context, size)
        chunk = min(plan.chunked_prefill_size, plan.context)
        if size > 1 and not d.exact and chunk <= 2 * size * window and plan.chunks > 1:
            moved = plan.links.prefill["halo"] / (heads.rows * d.kv_bytes * plan.context)
            said.append(
                f"a chunk of {tokens(chunk)} tokens is no longer than 2P windows "
                f"({tokens(2 * size * window)}): the halo moves {moved:.1f} x all streaming keys "
                "and values; raise chunked_prefill_size or lower window_max"
            )
    return said


def longest_text(longest: int) -> str:
    """`Plan.longest` for people."""
    if longest >= LONGEST:
        return f"more than {tokens(LONGEST)}"
    return f"{longest:,}" if longest else "none"
