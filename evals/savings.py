"""What splitting the heads saves, measured against what full attention would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table


def full_kv_bytes(model: str, itemsize: int = 4) -> int:
    """Bytes per token of the keys and values of all heads of a model.

    ``2 · layers · kv_heads · head_dim · itemsize``.

    Parameters
    ----------
    model : str
        As `razor_dist.models.registry.resolve_model` takes it.
    itemsize : int
        Bytes of one number; float32, the dtype on CPU, has 4.
    """
    from razor_dist.models.loader import read_config
    from razor_dist.models.registry import resolve_model
    from razor_dist.models.shape import ModelShape

    shape = ModelShape.from_config(read_config(resolve_model(model)))
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize


@dataclass(frozen=True)
class Savings:
    """One request's memory and traffic.

    Attributes
    ----------
    world_size : int
    tokens, prompt_tokens : int
        Prompt and answer together; the prompt alone.
    kv_bytes_per_rank : int
        Measured: the most that any rank held.
    bytes_sent : dict
        Measured: bytes between ranks by purpose, all ranks together.
    retrieval_fraction : float
        Of the KV heads.
    full_kv_bytes_per_token : int
        Keys and values of all heads.
    """

    world_size: int
    tokens: int
    prompt_tokens: int
    kv_bytes_per_rank: int
    bytes_sent: dict[str, int]
    retrieval_fraction: float
    full_kv_bytes_per_token: int

    @classmethod
    def between(
        cls,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        *,
        tokens: int,
        prompt_tokens: int,
        full_kv_bytes_per_token: int,
    ) -> Savings:
        """From the engine's counters (``GET /stats``) around one request.

        The peak of KV bytes is the highest since the start: the request must be the largest yet.
        """
        return cls(
            world_size=after["world_size"],
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            kv_bytes_per_rank=max(after["peak_kv_bytes_per_rank"]),
            bytes_sent={
                purpose: sent - before["bytes_sent"][purpose]
                for purpose, sent in after["bytes_sent"].items()
            },
            retrieval_fraction=after["retrieval_fraction"],
            full_kv_bytes_per_token=full_kv_bytes_per_token,
        )

    @property
    def full_on_one_rank(self) -> int:
        """Bytes of full attention's keys and values, all on one rank."""
        return self.tokens * self.full_kv_bytes_per_token

    @property
    def full_per_rank(self) -> float:
        """The same, sharded over the ranks."""
        return self.full_on_one_rank / self.world_size

    @property
    def full_ring_bytes(self) -> int:
        """Bytes that a ring of all heads moves: every key and value past P-1 ranks."""
        return (self.world_size - 1) * self.prompt_tokens * self.full_kv_bytes_per_token

    def table(self) -> RenderableType:
        """Both comparisons, to print."""
        parts: list[RenderableType] = [self._memory(), self._traffic()]
        if self.kv_bytes_per_rank > self.full_per_rank:
            parts.insert(
                1,
                "At this length the streaming heads' window, whole on every rank, outweighs "
                f"what {self.world_size} shards save; it pays for longer contexts, and with "
                "--window-max.\n",
            )
        return Group(*parts)

    def _memory(self) -> Table:
        table = Table(title="keys and values, MB", title_justify="left")
        for heading in ("", "MB", "razor / it"):
            table.add_column(heading, justify="left" if not heading else "right")
        kept = self.kv_bytes_per_rank
        table.add_row("razor, most on one rank (measured)", _mb(kept), "")
        for name, full in (
            ("full attention, on one rank", self.full_on_one_rank),
            (f"full attention, over {self.world_size} ranks", self.full_per_rank),
        ):
            table.add_row(name, _mb(full), f"{kept / full:.2f}")
        return table

    def _traffic(self) -> Table:
        table = Table(title="sent between ranks, MB", title_justify="left")
        for heading in ("", "MB", "bytes / prompt token"):
            table.add_column(heading, justify="left" if not heading else "right")
        for purpose, sent in self.bytes_sent.items():
            table.add_row(purpose, _mb(sent), f"{sent / self.prompt_tokens:,.0f}")
        table.add_section()
        total = sum(self.bytes_sent.values())
        table.add_row("all (measured)", _mb(total), f"{total / self.prompt_tokens:,.0f}")
        full = self.full_ring_bytes
        table.add_row(
            "ring of all heads, full attention", _mb(full), f"{full / self.prompt_tokens:,.0f}"
        )
        return table


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"
