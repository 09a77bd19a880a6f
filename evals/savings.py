"""Keys and values and traffic of one request, measured against what full attention would take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table


def full_kv_bytes(folder: Path) -> int:
    """Return the bytes of a token's keys and values in all heads of a model, in float32.

    The model is of Llama's form: ``2 · layers · kv_heads · head_dim · 4``.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4)


@dataclass(frozen=True)
class Savings:
    """Memory and traffic of one request."""

    world_size: int
    tokens: int  # of prompt and answer
    prompt_tokens: int
    token_bytes: int  # of a token's keys and values in all heads
    kv_bytes_per_rank: int  # measured: the most that any rank held
    bytes_sent: dict[str, int]  # measured: between ranks by purpose, all ranks together
    retrieval_fraction: float  # of the KV heads

    @classmethod
    def between(
        cls, before: Mapping[str, Any], after: Mapping[str, Any], **counted: int
    ) -> Savings:
        """Subtract the engine's counters (``GET /stats``) before a request from those after it.

        The peak of KV bytes is the highest since the start: the request must be the largest yet.
        """
        sent = {p: n - before["bytes_sent"][p] for p, n in after["bytes_sent"].items()}
        return cls(
            world_size=after["world_size"],
            kv_bytes_per_rank=max(after["peak_kv_bytes_per_rank"]),
            bytes_sent={purpose: n for purpose, n in sent.items() if n},
            retrieval_fraction=after["retrieval_fraction"],
            **counted,
        )

    @property
    def full_per_rank(self) -> float:
        """Bytes of full attention's keys and values, sharded over the ranks."""
        return self.tokens * self.token_bytes / self.world_size

    @property
    def full_ring_bytes(self) -> float:
        """Bytes of a ring of all heads over the same prefill chunks: each head sends the same."""
        return self.bytes_sent.get("ring", 0) / self.retrieval_fraction

    @property
    def window_tokens(self) -> float:
        """Tokens that each rank holds of the streaming heads, their window above all."""
        streaming = self.kv_bytes_per_rank - self.retrieval_fraction * self.full_per_rank
        return streaming / ((1 - self.retrieval_fraction) * self.token_bytes)

    def tables(self) -> RenderableType:
        """Both comparisons, to print."""
        parts: list[RenderableType] = [self._memory()]
        if self.retrieval_fraction < 1 and self.kv_bytes_per_rank >= self.full_per_rank:
            parts.append(
                f"Every rank holds the streaming heads' window whole, {self.window_tokens:,.0f} "
                f"tokens; a share of full attention's is {self.tokens / self.world_size:,.0f}. "
                f"With a window of this size, {self.world_size} ranks keep less than full "
                f"attention from about {self.window_tokens * self.world_size:,.0f} tokens on.\n"
            )
        return Group(*parts, *([self._traffic()] if self.world_size > 1 else []))

    def _memory(self) -> Table:
        held, share = self.kv_bytes_per_rank, self.full_per_rank
        table = _table("keys and values", "MB", "razor / it")
        table.add_row("razor, most on one rank (measured)", _mb(held), "")
        full = {"all on one rank": share * self.world_size}
        if self.world_size > 1:
            full = {f"a rank's share of {self.world_size}": share, **full}
        for name, nbytes in full.items():
            table.add_row(f"full attention, {name}", _mb(nbytes), f"{held / nbytes:.2f}")
        return table

    def _traffic(self) -> Table:
        rows: dict[str, float] = {**self.bytes_sent}
        rows["razor, all (measured)"] = sum(self.bytes_sent.values())
        if self.retrieval_fraction:
            rows["full attention, its ring alone"] = self.full_ring_bytes
        table = _table("sent between ranks", "MB", "bytes / prompt token")
        for number, (name, sent) in enumerate(rows.items(), 1):
            last = number == len(self.bytes_sent)
            table.add_row(name, _mb(sent), f"{sent / self.prompt_tokens:,.0f}", end_section=last)
        return table


def _table(name: str, *numbers: str) -> Table:
    return Table(name, *(Column(number, justify="right") for number in numbers))


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"
