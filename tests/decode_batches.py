"""Caches of sequences that decode, their attention key by key, and how far kernels are from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from razor_dist.kernels.decode import Pages, Windows
from razor_dist.kernels.quantized import INT4, INT8, Codes, code_width


@dataclass(frozen=True)
class Batch:
    """Some sequences' caches in one layer, with NaN wherever no token is."""

    retrieval: int = 1  # KV heads
    streaming: int = 1
    group: int = 8
    dim: int = 64
    # Of this rank's shards. A sequence at -1 is none: it fills the batch up.
    lengths: tuple[int, ...] = (130, 0, 1, 77)
    positions: tuple[int, ...] = (150, 3, 170, 60)
    page: int = 16
    ring: int = 53
    sinks: int = 4
    compensation: bool = True
    dtype: torch.dtype = torch.float32
    coded: torch.dtype | None = None  # pages; windows never are
    slopes: bool = False
    lost: bool = False  # a key of each head is NaN

    def make(self) -> tuple[Tensor, Tensor, Pages | None, Windows | None, Tensor | None]:
        """Return queries, order, caches and slopes."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        count, heads = len(self.lengths), self.retrieval + self.streaming
        most = -(-max(1, *self.lengths) // self.page)
        slots = (count * most + 3) * self.page
        # Every sequence's pages in random order, between those of the others.
        table = torch.randperm(slots // self.page, generator=generator)[: count * most]
        width = 1 + self.sinks + self.ring
        places = count * (width + 2) + 1
        position = torch.tensor(self.positions).clamp(min=0)

        def store(rows: int, size: int, coded: torch.dtype | None = None) -> Tensor:
            if coded is None:
                return torch.full((rows, size, self.dim), math.nan, dtype=self.dtype)
            least, most = (-127, 127) if coded == INT8 else (0, 255)
            shape = rows, size, code_width(self.dim, coded)
            return torch.randint(least, most + 1, shape, generator=generator).to(coded)

        def scales(rows: int, size: int) -> list[Tensor | None]:
            if self.coded is None:
                return [None, None]
            return [torch.rand(rows, size, generator=generator) / 60 + 0.005 for _ in "kv"]

        pages = Pages(
            store(self.retrieval, slots, self.coded),
            store(self.retrieval, slots, self.coded),
            self.page,
            table.view(count, most).int(),
            torch.tensor(self.lengths),
            torch.full((count,), slots - 1),
            position,
            torch.randint(0, 200, (slots,), generator=generator) if self.slopes else None,
            *scales(self.retrieval, slots),
        )
        windows = Windows(
            store(self.streaming, places),
            store(self.streaming, places),
            self.sinks,
            self.compensation,
            width,
            position,
            (position - self.ring + 5).clamp(min=0) // 4 * 4,
            torch.arange(count) * (width + 2) + 1,
            torch.tensor([self.ring if at >= 0 else 0 for at in self.positions]),
        )
        for cache, found in ((pages, pages_of), (windows, slots_of)):
            if cache.k.is_floating_point():
                for b in range(count):
                    for at, *_ in found(cache, b):
                        for kept in (cache.k, cache.v):
                            kept[:, at] = normal(len(kept), self.dim).to(self.dtype)
        if self.lost:
            for cache, found in ((pages, pages_of), (windows, slots_of)):
                cache.k[:, max(at for at, *_ in found(cache, 0))] = math.nan
        return (
            normal(heads, self.group, count, self.dim).to(self.dtype),
            torch.randperm(heads, generator=generator),
            pages if self.retrieval else None,
            windows if self.streaming else None,
            torch.rand(heads, self.group, generator=generator) if self.slopes else None,
        )


def pages_of(pages: Pages, b: int) -> Iterator[tuple[int, float, float]]:
    """Yield place, bias and distance of all that a retrieval head sees of a sequence."""
    for token in range(int(pages.stored[b])):
        index, rest = divmod(token, pages.page_size)
        at = int(pages.table[b, index]) * pages.page_size + rest
        far = 0 if pages.places is None else int(pages.places[at] - pages.position[b])
        yield at, 0.0, far


def slots_of(windows: Windows, b: int) -> Iterator[tuple[int, float, float]]:
    """The same of a streaming head."""
    sinks, position, room = windows.sinks, int(windows.position[b]), int(windows.capacity[b])
    if not room:
        return
    first, at = max(int(windows.start[b]), sinks), int(windows.offset[b])
    if windows.compensation and first > sinks:
        yield at, math.log(first - sinks), (first + sinks - 1) / 2 - position
    at += 1
    for token in range(min(sinks, position + 1)):
        yield at + token, 0.0, token - position
    for token in range(first, position + 1):
        yield at + sinks + token % room, 0.0, token - position


def literal(batch: Batch) -> tuple[Tensor, Tensor]:
    """Out [n, K, G, D] and lse [K, G, n] in float64, key by key."""
    q, order, pages, windows, slopes = batch.make()
    heads, group, count, dim = q.shape
    out = torch.zeros(count, heads, group, dim, dtype=torch.float64)
    lse = torch.full((heads, group, count), -math.inf, dtype=torch.float64)
    for j, head in enumerate(order.tolist()):
        of_pages = j < batch.retrieval
        row = j if of_pages else j - batch.retrieval
        for b in range(count):
            cache: Any = pages if of_pages else windows
            seen = list((pages_of if of_pages else slots_of)(cache, b))
            if not seen:
                continue
            places, bias, far = map(torch.tensor, zip(*seen, strict=True))
            k, v = cache.k[row, places], cache.v[row, places]
            if of_pages and batch.coded is not None:
                k, v = Codes(k, cache.k_scale[row, places]), Codes(v, cache.v_scale[row, places])
            k, v = k.to(torch.float64), v.to(torch.float64)
            scores = q[head, :, b].double() @ k.T * SCALE + bias.double()
            if slopes is not None:
                scores = scores + slopes[head].double().unsqueeze(-1) * far.double()
            lse[head, :, b] = scores.logsumexp(-1)
            out[b, head] = scores.softmax(-1) @ v
    return out, lse


SCALE = 0.125


def attended(
    module: Any, q: Tensor, order: Tensor, pages: Any, windows: Any, out: Tensor, **of: Any
) -> Tensor | None:
    """Attend by one call, or two where a kernel reads keys of one dtype; return what is packed."""
    calls = [(order, pages, windows)]
    mixed = pages is not None and windows is not None and pages.k.dtype != windows.k.dtype
    if mixed and module.__name__.endswith("triton"):
        calls = [(order[: len(pages.k)], pages, None), (order[len(pages.k) :], None, windows)]
    found = [module.attend(q, *call, out, **of) for call in calls]
    packed: Tensor | None = found[0]
    return packed


def kernels(name: str) -> Any:
    module: Any = import_module(f"razor_dist.kernels.{name}")
    if name == "decode_triton":
        # More splits than these lengths would have, of a few tiles each.
        module._SPLITS = (64, 64)
        module.TILES = {2: 32, 4: 32}
    return module


def to(device: str, x: Any) -> Any:
    """A tensor, or a tuple of some, on a device."""
    if isinstance(x, tuple):
        return type(x)(*(to(device, part) for part in x))
    return x.to(device) if isinstance(x, Tensor) else x


def errors(batch: Batch, *names: str, device: str = "cpu") -> dict[str, float]:
    """Largest errors of the kernels of some modules, of one rank or of three merged.

    Results are in another order than the heads, as ranks that share heads want them; of three ranks
    this one does without some of the retrieval heads' results.
    """
    want, lse = (to(device, x) for x in literal(batch))
    q, order, pages, windows, slopes = (to(device, x) for x in batch.make())
    split = order[: batch.retrieval]
    ranks = 3 if pages is not None and len(batch.lengths) > 1 else 1
    want = want.flatten(1, 2)
    places = torch.full((want.shape[1],), -1)
    kept = torch.randperm(want.shape[1], generator=torch.Generator().manual_seed(1))
    if ranks > 1:
        kept = kept[kept != split[0].item() * batch.group]
    places[kept] = torch.arange(len(kept))
    places, kept = to(device, places), to(device, kept)
    found = {}
    for name in names:
        module = kernels(name)
        dtype = torch.float32 if name != "decode_cpu" else q.dtype
        out = torch.full((len(want), len(kept), batch.dim), math.nan, dtype=dtype, device=device)
        of = {"scale": SCALE, "slopes": slopes, "places": places}
        packed = attended(module, q, order, pages, windows, out, pack=ranks > 1, **of)
        if packed is not None:
            # Products of bfloat16 are exact in the interpreter alone, which converts them.
            of_lse = {"atol": 1e-5 if device == "cpu" else 2e-2, "rtol": 1e-6, "equal_nan": True}
            torch.testing.assert_close(packed[..., -1].double(), lse[split], **of_lse)
            nothing = torch.zeros_like(packed)
            nothing[..., -1] = -math.inf
            module.merge_ranks(torch.stack([nothing, packed, packed]), order, out, places)
        else:
            in_order = torch.full_like(out, math.nan)
            attended(module, q, order, pages, windows, in_order, scale=SCALE, slopes=slopes)
            assert torch.equal(in_order[:, kept].nan_to_num(7), out.nan_to_num(7))
        assert torch.equal(out.isnan(), want[:, kept].isnan())
        found[name] = (out.double() - want[:, kept]).nan_to_num().abs().max().item()
    return found


GROUPS_OF_32 = "int4, transformed by 32 dimensions"
BATCHES = {
    "one sequence": Batch(lengths=(140,), positions=(400,)),
    "no groups": Batch(group=1, retrieval=2, streaming=2, lengths=(33, 5), positions=(40, 9)),
    "groups of three": Batch(group=3, dim=96, lengths=(100, 64), positions=(99, 53)),
    "eight sequences": Batch(
        lengths=(1, 64, 65, 0, 80, 17, 3, 0), positions=(0, 4, 52, 53, 57, 120, 1000, -1), group=1
    ),
    "pages of three": Batch(page=3, lengths=(70, 2), positions=(71, 3), sinks=0, group=3),
    "pages of a tile": Batch(page=32, lengths=(130, 32, 1), positions=(131, 40, 9), group=3),
    "pages of two tiles": Batch(
        page=64, lengths=(161, 64, 0), positions=(300, 64, 2), dtype=torch.bfloat16
    ),
    "pages of two tiles, int8": Batch(
        page=64, coded=INT8, slopes=True, lengths=(97, 150), positions=(99, 160), group=3
    ),
    "pages of two tiles, int4": Batch(
        page=64, coded=INT4, slopes=True, lengths=(97, 150), positions=(99, 160), group=3
    ),
    "no compensation": Batch(compensation=False, streaming=2, retrieval=0, group=3),
    "retrieval only": Batch(streaming=0, retrieval=2, lengths=(130,), positions=(140,)),
    "slopes": Batch(slopes=True, group=3, lengths=(9, 77), positions=(150, 260)),
    "a key of NaN": Batch(lost=True),
    "a key of NaN, one sequence": Batch(lost=True, lengths=(140,), positions=(400,)),
    "a million tokens": Batch(
        slopes=True, retrieval=0, group=3, positions=(1 << 20,), lengths=(0,)
    ),
    "bfloat16": Batch(dtype=torch.bfloat16, dim=128, lengths=(90, 0), positions=(150, 20)),
    "int8": Batch(coded=INT8, group=3, lengths=(0, 66), positions=(3, 66)),
    "int8, bfloat16 queries": Batch(
        coded=INT8, dtype=torch.bfloat16, slopes=True, lengths=(70,), positions=(99,)
    ),
    "int4": Batch(coded=INT4, group=3, lengths=(0, 66), positions=(3, 66)),
    GROUPS_OF_32: Batch(coded=INT4, dim=96, page=3, group=5, lengths=(70, 9), positions=(99, 9)),
    "int4, bfloat16 queries": Batch(
        coded=INT4, dtype=torch.bfloat16, dim=20, lengths=(70,), positions=(99,)
    ),
}
