"""Attention of a decode step: one token of each of several sequences, all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from razor_dist.attention.chosen import HeldKeys, attend_together
from razor_dist.attention.step import BlockReader, BlockTables, StepInputs
from razor_dist.cache.caches import Caches
from razor_dist.heads.layout import ShortHeads, StreamingGroup
from razor_dist.kernels import decode_torch
from razor_dist.kernels.decode import Pages, Turned, Windows, implementation
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator


def rotates(device: torch.device) -> bool:
    """True if a decode step's attention can rotate queries and keys on this device."""
    found: bool = implementation(device).ROTATES
    return found


class DecodeContext:
    """`AttentionContext` of the next token of n sequences, by the kernels for block tables.

    Streaming heads read the rank's own cache, without traffic: all heads on every rank, or with
    tensor-parallel decode the rank's share of them. Retrieval heads attend to each rank's shard;
    one all-gather per layer carries ``out`` and ``lse``, packed together.

    The sequences are described by ``inputs`` and ``tables`` alone; nothing is read back from the
    device, here or in `attend`, so that a CUDA graph can capture both. There are two exceptions:
    ``beyond_chunk``, if a token is beyond the first chunk of dual chunk attention, and ``readers``,
    with which retrieval heads read the blocks that tokens choose.
    """

    def __init__(
        self,
        comm: Communicator,
        caches: Caches,
        inputs: StepInputs,
        tables: BlockTables,
        *,
        beyond_chunk: bool = False,
        readers: Sequence[BlockReader] = (),
    ) -> None:
        self.comm, self.caches, self._inputs, self._tables = comm, caches, inputs, tables
        self.tokens = len(inputs.token)
        self._beyond_chunk, self._readers = beyond_chunk, readers
        self._kernels = decode_torch if beyond_chunk else implementation(inputs.token.device)
        if caches.pages.positions is not None:
            caches.pages.positions.index_copy_(0, inputs.at, inputs.position)

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        heads, q = self.caches.layout.short[layer], query.q
        kv_heads, group, tokens, dim = q.shape
        count = kv_heads * group if heads.places is None else len(heads.outputs)
        out = q.new_empty(tokens, count, dim)
        turned = None
        if query.rotation is not None:
            turned = Turned(q, torch.empty_like(q), query.rotation)
            q = turned.out
        pages = self._pages(heads) if heads.retrieval else None
        pack = pages is not None and self.comm.size > 1
        found = None
        for order, windows in self._windows(heads):
            self._kernels.store(k, v, order, pages, windows, turned)
            if pages is not None and self._readers:
                found = self._by_blocks(heads, query._replace(q=q[order]))
                decode_torch.write(out, order, found, heads.places)
                pages, pack = None, False
                continue
            options: dict[str, Any] = {
                "scale": query.scale,
                "slopes": query.slopes,
                "places": heads.places,
            }
            if self._beyond_chunk:
                options["dual"] = self.caches.dual
            found = self._kernels.attend(q, order, pages, windows, out, pack=pack, **options)
            if found is not None:
                gathered = self.comm.all_gather(found, "merge")
                self._kernels.merge_ranks(gathered, order, out, heads.places)
            pages, pack = None, False  # the first launch has computed the retrieval heads
        return out

    def _by_blocks(self, heads: ShortHeads, query: Query) -> Tensor:
        """Attention of the retrieval heads to the blocks they choose, float32 ``[K, G, n, D]``."""
        pages, choice = self.caches.pages, self.caches.choice
        assert choice is not None
        readers = [HeldKeys(pages, heads.retrieval_rows, reader) for reader in self._readers]
        return attend_together(self.comm, choice, query, readers)

    def _pages(self, heads: ShortHeads) -> Pages:
        pool, inputs, rows = self.caches.pages, self._inputs, heads.retrieval_rows
        return Pages(
            pool.k[rows],
            pool.v[rows],
            pool.page_size,
            self._tables.pages,
            inputs.stored,
            inputs.at,
            inputs.position,
            pool.positions,
            pool.k_scale if pool.k_scale is None else pool.k_scale[rows],
            pool.v_scale if pool.v_scale is None else pool.v_scale[rows],
        )

    def _windows(self, heads: ShortHeads) -> Iterator[tuple[Tensor, Windows | None]]:
        """Yield KV heads and their windows: streaming heads of one window in each launch.

        Retrieval heads are in the first launch. They have it alone if they choose blocks, or if
        they are codes and the device is CUDA, whose kernel reads keys of one dtype.
        """
        split, pages = len(heads.retrieval), self.caches.pages
        apart = pages.k_scale is not None and pages.k.device.type == "cuda"
        alone = split > 0 and (not heads.groups or apart or len(self._readers) > 0)
        if alone:
            yield heads.order[:split], None
        for number, group in enumerate(heads.groups):
            begin = split + group.part.start if number or alone else 0
            yield heads.order[begin : split + group.part.stop], self._window(group)

    def _window(self, group: StreamingGroup) -> Windows:
        cache, inputs, index = self.caches.streaming[group.index], self._inputs, group.index
        return Windows(
            cache.k[group.rows],
            cache.v[group.rows],
            cache.policy.sinks,
            cache.policy.compensation,
            self._tables.widths[index],
            inputs.position,
            inputs.start[index],
            inputs.offset[index],
            inputs.capacity[index],
        )
