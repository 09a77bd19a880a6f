"""The definition of `razor_dist.kernels.decode` in plain torch.

Shapes depend on nothing that is in a tensor, and nothing is read back from one: so steps can be
recorded. Whole shards are copied, which is for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels.decode import Pages, Windows
from razor_dist.kernels.partial import merge_stacked
from razor_dist.kernels.quantized import quantize


def store(
    k: Tensor, v: Tensor, order: Tensor, pages: Pages | None, windows: Windows | None
) -> None:
    """See `razor_dist.kernels.decode`."""
    split = 0 if pages is None else len(pages.k)
    if pages is not None:
        for cache, scales, new in ((pages.k, pages.k_scale, k), (pages.v, pages.v_scale, v)):
            kept = new[order[:split]]
            if scales is not None:
                rounded = quantize(kept)
                scales.index_copy_(1, pages.at, rounded.scale)
                kept = rounded.codes
            cache.index_copy_(1, pages.at, kept.to(cache.dtype))
    if windows is not None:
        room, position = windows.capacity, windows.position
        ring = windows.sinks + position % room.clamp(min=1)
        slot = windows.entries + torch.where(position < windows.sinks, position, ring)
        # A row without a sequence stores what the first one does.
        row = torch.where(room > 0, torch.arange(len(room), device=room.device), 0)
        at = (windows.offset + slot)[row]
        for cache, new in ((windows.k, k), (windows.v, v)):
            cache.index_copy_(1, at, new[order[split:]][:, row].to(cache.dtype))


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
) -> Tensor | None:
    """See `razor_dist.kernels.decode`."""
    split = 0 if pages is None else len(pages.k)
    packed = None
    if windows is not None:
        of = order[split:]
        bias, far, place = _window(windows)
        found, _ = _attend(q[of], windows, place, bias, far, scale, _rows(slopes, of))
        out.index_copy_(1, of, found.permute(2, 0, 1, 3).to(out.dtype))
    if pages is not None:
        of = order[:split]
        page = torch.arange(pages.page_size, device=q.device)
        place = (pages.table.long().unsqueeze(-1) * pages.page_size + page).flatten(1)
        seen = torch.arange(place.shape[1], device=q.device) < pages.stored.unsqueeze(-1)
        bias = torch.zeros(place.shape, device=q.device).masked_fill_(~seen, -torch.inf)
        away = None
        if slopes is not None:
            assert pages.places is not None
            away = (pages.places[place] - pages.position.unsqueeze(-1)).float()
        found, lse = _attend(q[of], pages, place, bias, away, scale, _rows(slopes, of))
        if pack:
            packed = torch.cat([found, lse.unsqueeze(-1)], -1)
        else:
            out.index_copy_(1, of, found.permute(2, 0, 1, 3).to(out.dtype))
    return packed


def merge_ranks(gathered: Tensor, order: Tensor, out: Tensor) -> None:
    """See `razor_dist.kernels.decode`."""
    merged = merge_stacked(gathered[..., :-1], gathered[..., -1]).out
    out.index_copy_(1, order[: merged.shape[0]], merged.permute(2, 0, 1, 3).to(out.dtype))


def _rows(slopes: Tensor | None, of: Tensor) -> Tensor | None:
    return None if slopes is None else slopes[of]


def _window(windows: Windows) -> tuple[Tensor, Tensor, Tensor]:
    """Return bias, distance from the query, and place in the cache of all that is read ``[n, w]``.

    See `razor_dist.cache.streaming.StreamingCache.visibility` and ``distance``.
    """
    entries, sinks = windows.entries, windows.sinks
    position, room = windows.position.unsqueeze(-1), windows.capacity.unsqueeze(-1)
    first = windows.start.unsqueeze(-1).clamp(min=sinks)
    i = torch.arange(windows.width, device=position.device)
    ring = i - entries - sinks
    held = position - (position - ring) % room.clamp(min=1)
    seen = torch.where(ring < 0, i - entries <= position, held >= first) & (i >= entries)
    seen &= (room > 0) & (ring < room)
    bias = torch.zeros(seen.shape, device=i.device).masked_fill_(~seen, -torch.inf)
    if windows.compensation:
        # The logarithm of 0 is -inf: nothing was dropped.
        count = torch.where(room > 0, first - sinks, 0)
        bias[:, :1] = torch.log(count.float())
    stands = torch.where(ring < 0, i - entries, held).float()
    stands[:, :entries] = (first + sinks - 1) / 2
    return (
        bias,
        stands - position,
        (windows.offset.unsqueeze(-1) + i).clamp(max=windows.k.shape[1] - 1),
    )


def _attend(
    q: Tensor,
    cache: Pages | Windows,
    place: Tensor,
    bias: Tensor,
    away: Tensor | None,
    scale: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend to places ``[n, S]`` of a cache: out ``[K, G, n, D]`` and lse, float32."""
    hidden = bias == -torch.inf

    def read(store: Tensor, factor: Tensor | None) -> Tensor:
        rows = store[:, place].float()
        if factor is not None:
            rows = rows * factor[:, place].unsqueeze(-1)
        # What no token has filled may be NaN.
        return rows.masked_fill(hidden.unsqueeze(-1), 0.0)

    k, v = read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)
    scores = torch.einsum("kgnd,knsd->kgns", q.float(), k) * scale + bias
    if slopes is not None:
        assert away is not None
        scores = scores + slopes[..., None, None] * away
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return torch.einsum("kgns,knsd->kgnd", weights, v), lse
