"""`razor_dist.kernels.decode` by torch's own operations, one sequence after the other.

It is for machines without a C++ compiler. Only what a query sees is read: runs of consecutive pages
and the two parts of a ring are views.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from razor_dist.kernels.alibi import Distance, Places
from razor_dist.kernels.decode import Pages, Turned, Windows
from razor_dist.kernels.dual_chunk import DualChunk
from razor_dist.kernels.fused import rotate
from razor_dist.kernels.partial import Partial, empty_partial, joined, merge, merge_stacked
from razor_dist.kernels.quantized import Codes, KeysOrValues, quantize
from razor_dist.kernels.query import Query

ROTATES = True
# Slots of pages that are not consecutive are copied in parts of this many tokens.
_COPIED = 4096


def store(
    k: Tensor,
    v: Tensor,
    order: Tensor,
    pages: Pages | None,
    windows: Windows | None,
    turned: Turned | None = None,
) -> None:
    """See `razor_dist.kernels.decode`."""
    if turned is not None:
        q, group = turned.q[order].flatten(0, 1), turned.q.shape[1]
        rotated, k = (x[0] for x in rotate(q.unsqueeze(0), k.unsqueeze(0), *turned.rotation))
        turned.out.index_copy_(0, order, rotated.unflatten(0, (len(order), group)))
    split = 0 if pages is None else len(pages.k)
    if pages is not None:
        for cache, scales, new in ((pages.k, pages.k_scale, k), (pages.v, pages.v_scale, v)):
            kept = new[order[:split]]
            if scales is not None:
                rounded = quantize(kept, cache.dtype)
                scales.index_copy_(1, pages.at, rounded.scale)
                kept = rounded.codes
            cache.index_copy_(1, pages.at, kept.to(cache.dtype))
    if windows is not None:
        rows = windows.capacity > 0
        position, room = windows.position[rows], windows.capacity[rows]
        place = torch.where(position < windows.sinks, position, windows.sinks + position % room)
        at = windows.offset[rows] + 1 + place
        for cache, new in ((windows.k, k), (windows.v, v)):
            cache.index_copy_(1, at, new[order[split:]][:, rows].to(cache.dtype))


def attend(
    q: Tensor,
    order: Tensor,
    pages: Pages | None,
    windows: Windows | None,
    out: Tensor,
    *,
    scale: float,
    slopes: Tensor | None = None,
    pack: bool = False,
    places: Tensor | None = None,
    dual: DualChunk | None = None,
) -> Tensor | None:
    """See `razor_dist.kernels.decode`; ``dual`` is known here alone."""
    split, query = 0 if pages is None else len(pages.k), Query(q.float(), scale, slopes, dual=dual)
    if windows is not None:
        of = order[split:]
        mine = query.heads(of)
        found = joined(_see_window(mine.tokens(slice(t, t + 1)), windows, t) for t in _rows(q))
        write(out, of, found.out, places)
    if pages is None:
        return None
    of = order[:split]
    mine = query.heads(of)
    found = joined(_see_shard(mine.tokens(slice(t, t + 1)), pages, t) for t in _rows(q))
    if pack:
        return found.packed()
    write(out, of, found.out, places)
    return None


def merge_ranks(gathered: Tensor, order: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """See `razor_dist.kernels.decode`."""
    merged = merge_stacked(*Partial.unpacked(gathered)).out
    write(out, order[: merged.shape[0]], merged, places)


def rows_of(heads: Tensor, group: int, places: Tensor | None) -> Tensor:
    """The rows of ``out`` for the query heads of KV ``heads``; -1 for a head without a row."""
    rows = heads.unsqueeze(-1) * group + torch.arange(group, device=heads.device)
    return rows.flatten() if places is None else places[rows.flatten()]


def write(out: Tensor, heads: Tensor, found: Tensor, places: Tensor | None) -> None:
    """Write the results of KV ``heads``, ``[len(heads), G, n, D]``, to their rows of ``out``."""
    rows = rows_of(heads, found.shape[1], places)
    results = found.flatten(0, 1).transpose(0, 1).to(out.dtype)
    if places is None:
        out.index_copy_(1, rows, results)
        return
    # Heads without a row go to an extra one: in recorded steps shapes must not depend on numbers.
    count = out.shape[1]
    wider = functional.pad(out, (0, 0, 0, 1))
    wider.index_copy_(1, rows.where(rows >= 0, count), results)
    out.copy_(wider[:, :count])


def _rows(q: Tensor) -> range:
    return range(q.shape[2])


def _see(
    query: Query, k: KeysOrValues, v: KeysOrValues, position: int, places: Tensor | None
) -> Partial:
    """Attention of a query at ``position`` to keys at ``places``, which matter if `by_distance`."""
    where: Places | Distance | None = None
    if query.dual is not None:
        assert places is not None
        where = Places([range(position, position + 1)], places)
    elif query.slopes is not None:
        assert places is not None
        where = Distance.of((places - position).float(), query.q.dtype)
    return query.attend(k, v, where=where)


def _read(store: Tensor, scale: Tensor | None, at: slice | Tensor) -> KeysOrValues:
    return store[:, at] if scale is None else Codes(store[:, at], scale[:, at])


def _see_shard(query: Query, pages: Pages, t: int) -> Partial:
    """One query's attention to the pages of its sequence."""
    stored, position = int(pages.stored[t]), int(pages.position[t])
    if not stored:
        return empty_partial(query.q)
    table = pages.table[t, : -(-stored // pages.page_size)].long()
    first = int(table[0])
    device = table.device
    if torch.equal(table, torch.arange(first, first + len(table), device=device)):
        begin = first * pages.page_size
        spans: list[slice | Tensor] = [slice(begin, begin + stored)]
    else:
        slots = table[:, None] * pages.page_size + torch.arange(pages.page_size, device=device)
        spans = list(slots.flatten()[:stored].split(_COPIED))

    def parts() -> Iterator[Partial]:
        for span in spans:
            k, v = _read(pages.k, pages.k_scale, span), _read(pages.v, pages.v_scale, span)
            places = None if pages.places is None else pages.places[span]
            yield _see(query, k, v, position, places)

    return merge(parts())


def _see_window(query: Query, windows: Windows, t: int) -> Partial:
    """One query's attention to its sequence's slot: compensation token, sinks and window."""
    position, room, sinks = int(windows.position[t]), int(windows.capacity[t]), windows.sinks
    if not room:
        return empty_partial(query.q)
    begin, first = int(windows.offset[t]), max(int(windows.start[t]), sinks)
    ring = begin + 1 + sinks
    # Runs of positions, each with the place of its first token.
    runs = [(0, min(sinks, position + 1), begin + 1)]
    turn = position - position % room  # the position at the ring's beginning, if in view
    runs += [(first, min(turn, position + 1), ring + first % room)]
    runs += [(max(first, turn), position + 1, ring + max(first, turn) % room)]

    def parts() -> Iterator[Partial]:
        for low, high, place in runs:
            if low < high:
                at = slice(place, place + high - low)
                k, v = windows.k[:, at], windows.v[:, at]
                places = None
                if query.by_distance:
                    places = torch.arange(low, high, device=query.q.device)
                yield _see(query, k, v, position, places)
        if windows.compensation and first > sinks:
            # It stands in the middle of the dropped tokens, or in the first of dual chunks.
            away = query.q.new_tensor([(first + sinks - 1) / 2 - position], dtype=torch.float32)
            one = query.seen_by(0, range(position, position + 1))
            k, v = (x[:, begin : begin + 1].float() for x in (windows.k, windows.v))
            yield one.compensate(k, v, torch.full_like(away, first - sinks), away)

    return merge(parts())
