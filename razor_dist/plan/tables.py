"""A plan as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from razor_dist.config.sizes import tokens
from razor_dist.plan.compute import Estimate
from razor_dist.plan.planner import Plan, longest_text


def tables(plan: Plan) -> RenderableType:
    """Everything, to print."""
    return Group(
        _setting(plan), "", _memory(plan), "", _work(plan), "", _times(plan), "", _links(plan)
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f}"


def _setting(plan: Plan) -> str:
    size = tokens(plan.chunked_prefill_size)
    prompt = f"{tokens(plan.context)} tokens in {plan.chunks} chunks of {size}"
    return (
        f"{plan.model} on {plan.world_size} x {plan.device}, {plan.dtype}, keys and values in "
        f"{plan.kv_dtype}\n"
        f"prompt: {prompt}, prefill: {plan.prefill}\n"
        f"heads:  {plan.kv_fraction:.1%} of the KV heads keep everything ({plan.heads})"
    )


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = _table("memory per rank, GB (10⁹ bytes)", "", "GB", "of it, one sequence")
    table.add_row("weights", _gb(memory.weights), "")
    table.add_row(
        "retrieval KV (page pool)", _gb(memory.retrieval_kv), _gb(memory.sequence_retrieval_kv)
    )
    table.add_row(
        "streaming caches (slots)",
        _gb(memory.streaming_cache),
        _gb(memory.sequence_streaming_cache),
    )
    if memory.scratch:
        table.add_row("exact prefill's pool", _gb(memory.scratch), "")
    table.add_row("window between chunks", _gb(memory.window_between_chunks), "")
    what = {
        "ring": "ring blocks and results",
        "halo": "halo, sinks, sums",
        "chunk": "chunk activations",
    }
    for name, nbytes in memory.activations.items():
        table.add_row(f"prefill: {what[name]}", _gb(nbytes), "")
    table.add_row("decode: logits (instead)", _gb(memory.logits), "")
    table.add_section()
    verdict = "fits" if plan.fits else "does not fit"
    table.add_row("all", _gb(memory.total), f"{verdict} {_gb(plan.budget)}")
    full = _gb(plan.full_kv_per_rank)
    table.add_row("KV of one sequence, full attention", full, "sharded")
    table.add_row("longest context that fits", longest_text(plan.longest), "tokens")
    return table


def _work(plan: Plan) -> Table:
    table = _table("operations of the prefill", "", "PFLOP")
    work = plan.work
    for name, count in (
        ("projections, MLPs", work.linear),
        ("attention, retrieval heads", work.retrieval),
        ("attention, streaming heads", work.streaming),
    ):
        table.add_row(name, f"{count / 1e15:,.3f}")
    table.add_section()
    table.add_row("all", f"{work.total / 1e15:,.3f}")
    table.add_row("with full attention", f"{(work.linear + work.full) / 1e15:,.3f}")
    return table


def _times(plan: Plan) -> Table:
    table = _table("time", "", "prefill, s", "expected", "decode, ms/token", "expected")
    first, then = plan.prefill_time, plan.decode_time
    for term in first.floor:
        table.add_row(term, *_pair(first, term, 1.0), *_pair(then, term, 1e3))
    table.add_section()
    table.add_row(
        "all",
        f"{first.at_peak:,.2f}",
        f"{first.seconds:,.2f}",
        f"{1e3 * then.at_peak:,.2f}",
        f"{1e3 * then.seconds:,.2f}",
    )
    table.add_row("limited by", "", first.limit, "", then.limit)
    return table


def _pair(time: Estimate, term: str, unit: float) -> tuple[str, str]:
    return f"{unit * time.floor[term]:,.2f}", f"{unit * time.expected[term]:,.2f}"


def _links(plan: Plan) -> Table:
    links = plan.links
    table = _table("bytes sent, all ranks together", "", "prefill, GB", "decode, KB/token")
    for purpose in sorted({*links.prefill, *links.decode}):
        table.add_row(
            purpose,
            _gb(links.prefill.get(purpose, 0)),
            f"{links.decode.get(purpose, 0) / 1e3:,.1f}",
        )
    table.add_section()
    prefill, decode = sum(links.prefill.values()), sum(links.decode.values())
    table.add_row("all", _gb(prefill), f"{decode / 1e3:,.1f}")
    table.add_row("busiest rank", _gb(links.busiest_prefill), f"{links.busiest_decode / 1e3:,.1f}")
    table.add_row("full attention", _gb(links.full_prefill), f"{links.full_decode / 1e3:,.1f}")
    return table
