"""A plan as tables."""

from __future__ import annotations

import itertools

from rich.console import Group, RenderableType
from rich.table import Table

from razor_dist.config.sizes import tokens
from razor_dist.engine.device import kv_dtype_name
from razor_dist.models.loader import dtype_name
from razor_dist.plan.planner import Plan

# Of `Memory.activations`.
_ACTIVATIONS = {
    "ring": "ring blocks and results",
    "halo": "halo, sinks, sums",
    "chunk": "chunk activations",
}


def tables(plan: Plan) -> RenderableType:
    parts: list[RenderableType] = [_setting(plan), _memory(plan), _work(plan), _times(plan)]
    if len(plan.decode_times) > 1 and plan.decode_is_known:
        parts.append(_decode(plan))
    if plan.deployment.world_size > 1:
        parts.append(_links(plan))
    return Group(*itertools.chain.from_iterable((part, "") for part in parts))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f}"


def _setting(plan: Plan) -> str:
    d, size = plan.deployment, tokens(plan.deployment.chunked_prefill_size)
    verdict = "\n".join(plan.verdict)
    about = f"{plan.device.about}, " if plan.device.about else ""
    return (
        f"{verdict}\n\n{d.config.model} on {d.world_size} x {plan.device.name}, "
        f"{dtype_name(d.dtype)}, keys and values in {kv_dtype_name(d.kv_dtype)}\n"
        f"device: {about}{plan.device.memory_gb:g} GB\n"
        f"prompt: {tokens(plan.context)} tokens in {len(d.chunks(plan.context))} chunks of {size}, "
        f"prefill: {d.config.prefill}, decode: {plan.decode}{_why(plan)}\n"
        f"heads:  {d.head_map.kv_fraction:.1%} of the KV heads keep everything "
        f"({d.source})"
    )


def _why(plan: Plan) -> str:
    if plan.not_shared is not None:
        return "" if plan.deployment.world_size == 1 else f" ({plan.not_shared})"
    if not plan.decode_is_known:
        return ""
    seconds = {mode: time.seconds for mode, time in plan.decode_times.items()}
    best = min(seconds, key=lambda mode: seconds[mode])
    ratio = max(seconds.values()) / seconds[best]
    return f" ({best} is {ratio:.1f} times as fast)"


def _memory(plan: Plan) -> Table:
    memory, activations = plan.memory, plan.memory.activations
    pool, slots = _gb(memory.sequence_retrieval_kv), _gb(memory.sequence_streaming_cache)
    verdict = "fits" if plan.has_memory else "does not fit"
    table = _table("memory per rank, GB (10⁹ bytes)", "", "GB", "of it, one sequence")
    table.add_row("weights", _gb(memory.weights))
    if memory.weight_copies:
        table.add_row("copies of weights' parts", _gb(memory.weight_copies))
    table.add_row("retrieval KV (page pool)", _gb(memory.retrieval_kv), pool)
    table.add_row("streaming caches (slots)", _gb(memory.streaming_cache), slots)
    if memory.scratch:
        table.add_row("exact prefill's pool", _gb(memory.scratch))
    if memory.prefixes:
        table.add_row("prefixes in host memory", _gb(memory.prefixes))
    if memory.recordings:
        table.add_row("recorded decode steps", _gb(memory.recordings))
    table.add_row("window between chunks", _gb(memory.window_between_chunks))
    for name, what in _ACTIVATIONS.items():
        if activations[name]:
            table.add_row(f"prefill: {what}", _gb(activations[name]))
    table.add_row("decode: logits (instead)", _gb(memory.logits))
    table.add_section()
    table.add_row("all", _gb(memory.total), f"{verdict} {_gb(plan.budget)}")
    table.add_row("KV of one sequence, full attention", _gb(plan.full_kv_per_rank), "sharded")
    longest, _, limit = plan.longest_text.partition("; ")
    table.add_row("longest context that fits, tokens", longest, limit)
    return table


def _work(plan: Plan) -> Table:
    table, work = _table("operations of the prefill", "", "PFLOP"), plan.work
    table.add_row("projections, MLPs", f"{work.linear / 1e15:,.3f}")
    table.add_row("attention, retrieval heads", f"{work.retrieval / 1e15:,.3f}")
    table.add_row("attention, streaming heads", f"{work.streaming / 1e15:,.3f}")
    table.add_section()
    table.add_row("all", f"{work.total / 1e15:,.3f}")
    table.add_row("with full attention", f"{(work.linear + work.full) / 1e15:,.3f}")
    return table


def _times(plan: Plan) -> Table:
    estimates, headings = [(plan.prefill_time, 1.0)], ["prefill, s", "expected"]
    if plan.decode_is_known:
        estimates.append((plan.decode_time, 1e3))
        headings += ["decode, ms/token", "expected"]
    table = _table("time", "", *headings)

    def row(name: str, *times: float) -> None:
        table.add_row(name, *(f"{time:,.2f}" for time in times))

    last = estimates[-1][0]
    for t in last.expected:
        if last.expected[t] and (t != "links" or plan.deployment.world_size > 1):
            row(t, *(k * of[t] for one, k in estimates for of in (one.floor, one.expected)))
    table.add_section()
    row("all", *(k * at for one, k in estimates for at in (one.seconds_at_peak, one.seconds)))
    if plan.device.ranges:
        ends = ((k * one.seconds_best, k * one.seconds_worst) for one, k in estimates)
        cells = (f"{best:,.2f} to {worst:,.2f}" for best, worst in ends)
        table.add_row("best to worst", *(text for cell in cells for text in ("", cell)))
    table.add_row("limited by", *(text for one, _ in estimates for text in ("", one.limit)))
    return table


def _decode(plan: Plan) -> Table:
    table = _table(
        "a token, ms: every rank computes all of it, or its share", "", *plan.decode_times
    )
    times = list(plan.decode_times.values())

    def row(name: str, *seconds: float) -> None:
        table.add_row(name, *(f"{1e3 * each:,.2f}" for each in seconds))

    for term in times[0].expected:
        if times[0].expected[term]:
            row(term, *(time.expected[term] for time in times))
    table.add_section()
    row("all, expected", *(time.seconds for time in times))
    row("all, at the peaks", *(time.seconds_at_peak for time in times))
    return table


def _links(plan: Plan) -> Table:
    links = plan.links
    prefill, decode = links["prefill"], links["decode"]
    table = _table("bytes sent, all ranks together", "", "prefill, GB", "decode, KB/token")

    def row(name: str, prefill: int, decode: int) -> None:
        table.add_row(name, _gb(prefill), f"{decode / 1e3:,.1f}")

    for purpose in sorted({*prefill, *decode}):
        row(purpose, prefill.get(purpose, 0), decode.get(purpose, 0))
    table.add_section()
    row("all", sum(prefill.values()), sum(decode.values()))
    row("busiest rank", links["busiest_prefill"], links["busiest_decode"])
    row("full attention", links["full_prefill"], links["full_decode"])
    return table
