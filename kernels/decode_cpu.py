"""`razor_dist.kernels.decode` on CPU, by the compiled operations: `razor_dist.kernels.compiled`.

All heads and sequences of a layer are one call. Keys and values are read once, in the dtype that
they are stored in, and computed with in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from razor_dist.kernels import decode_torch
from razor_dist.kernels.compiled import operations
from razor_dist.kernels.decode import Pages, Turned, Windows

__all__ = ["ROTATES", "attend", "merge_ranks", "store"]

ROTATES = False  # a rotation of its own costs little here: a call, not a launch


def store(
    k: Tensor,
    v: Tensor,
    order: Tensor,
    pages: Pages | None,
    windows: Windows | None,
    turned: Turned | None = None,
) -> None:
    """See `razor_dist.kernels.decode`."""
    assert turned is None
    of_pages, of_windows, sinks = [], [], 0
    if pages is not None:
        of_pages = [pages.k, pages.v, pages.at]
        if pages.k_scale is not None and pages.v_scale is not None:
            of_pages += [pages.k_scale, pages.v_scale]
    if windows is not None:
        of_windows = [windows.k, windows.v, windows.position, windows.offset, windows.capacity]
        sinks = windows.sinks
    operations().store(_rows(k), _rows(v), order, of_pages, of_windows, sinks)


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
) -> Tensor | None:
    """See `razor_dist.kernels.decode`."""
    packed = None
    if pages is not None and pack:
        _, group, tokens, dim = q.shape
        packed = torch.empty(len(pages.k), group, tokens, dim + 1)
    found = out if out.dtype == torch.float32 else torch.empty(out.shape)
    page_size = 0 if pages is None else pages.page_size
    sizes = (0, False, 0)
    if windows is not None:
        sizes = (windows.sinks, windows.compensation, windows.width)
    fields = _of_pages(pages), page_size, _of_windows(windows)
    operations().attend(_rows(q), order, *fields, *sizes, found, scale, slopes, packed, places)
    if found is not out:
        of = order if packed is None else order[len(packed) :]
        rows = decode_torch.rows_of(of, q.shape[1], places)
        out[:, rows] = found[:, rows].to(out.dtype)
    return packed


def merge_ranks(gathered: Tensor, order: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """See `razor_dist.kernels.decode`."""
    if out.dtype == torch.float32:
        operations().merge_ranks(gathered, order, out, places)
    else:
        decode_torch.merge_ranks(gathered, order, out, places)


def _rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_pages(pages: Pages | None) -> list[Tensor | None]:
    """The tensors that ``pages_of`` in ``cpu/attention.h`` reads, in its order."""
    if pages is None:
        return []
    seen = [pages.table, pages.stored, pages.position, pages.places]
    return [pages.k, pages.v, *seen, pages.k_scale, pages.v_scale]


def _of_windows(windows: Windows | None) -> list[Tensor | None]:
    """The tensors that ``windows_of`` in ``cpu/attention.h`` reads, in its order."""
    if windows is None:
        return []
    seen = [windows.position, windows.start, windows.offset, windows.capacity]
    return [windows.k, windows.v, *seen]
