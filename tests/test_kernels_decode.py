"""The kernels of decode steps: what they compute, by Triton's interpreter, and what they become.

No GPU is needed. Triton decides as it is imported whether it interprets, so that one process runs
the kernels on CPU tensors and another compiles them for GPUs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from razor_dist.kernels import decode, decode_torch, fused
from razor_dist.kernels.compiled import operations
from razor_dist.kernels.decode import Pages, Rotation, Turned, Windows
from razor_dist.kernels.dual_chunk import DualChunk
from razor_dist.kernels.partial import Partial, merge
from razor_dist.kernels.quantized import INT4, INT8, Codes, code_width
from tests.test_kernels import threads
from tests.triton_processes import Resources, resources


class Largest(TorchDispatchMode):
    """The numbers of the largest float32 tensor that is made within."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                self.numbers = max(self.numbers, x.numel())
        return found


@pytest.mark.parametrize("kind", ["plain", "alibi", "dual chunk"])
def test_keys_are_converted_in_blocks(kind: str) -> None:
    """A long shard of bfloat16 is never in memory in float32 as well."""
    count, page, dim = 5, 4096, 32
    n = count * page - 100
    k, v, q = torch.randn(3, 2, count * page, dim, generator=torch.manual_seed(0))
    slopes = torch.rand(2, 4) if kind == "alibi" else None
    dual = DualChunk(n // 3, n // 2, 0, torch.rand(dim // 2)) if kind == "dual chunk" else None

    def attended(dtype: torch.dtype) -> Tensor:
        numbers = torch.tensor([[n], [n - 1]])
        pages = Pages(
            k.bfloat16().to(dtype),
            v.bfloat16().to(dtype),
            page,
            torch.arange(count)[None].int(),
            numbers[0],
            numbers[1],
            numbers[1],
            torch.arange(count * page),
        )
        queries, out = q[:, :4, None].bfloat16(), torch.zeros(1, 8, dim)
        given = queries, torch.arange(2), pages, None, out
        decode_torch.attend(*given, scale=0.2, slopes=slopes, dual=dual)
        return out

    want = attended(torch.float32)
    with Largest() as seen:
        found = attended(torch.bfloat16)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)
    assert seen.numbers <= 2 * 4096 * dim


compiled = pytest.mark.skipif(operations() is None, reason="needs a C++ compiler")


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


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_kernels_are_attention(batch: Batch, interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(errors, batch, "decode_triton", "decode_torch").result(120)
    # Codes are drawn larger.
    assert max(found.values()) < (5e-5 if batch.coded else 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_kernels_on_a_gpu_are_attention(batch: Batch, compiler: ProcessPoolExecutor) -> None:
    [error] = compiler.submit(errors, batch, "decode_triton", device="cuda").result(120).values()
    # Weights are rounded to the dtype of the queries; those of float32 are not.
    rounding = 2e-2 if batch.dtype == torch.bfloat16 else 0
    assert error < max(rounding, 5e-5)


@compiled
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_compiled_kernels_are_attention(batch: Batch) -> None:
    [error] = errors(batch, "decode_cpu").values()
    # What is written is rounded to the dtype of the queries.
    rounding = 2e-2 if batch.dtype == torch.bfloat16 else 0
    assert error < max(rounding, 5e-5 if batch.coded else 1e-5)


@pytest.mark.parametrize(
    ("found", "reason"), [(None, "is not installed"), (object(), "Failed to find C compiler")]
)
def test_without_a_triton_that_works_cuda_decodes_by_torch(
    found: object, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=target))
    triton = SimpleNamespace(runtime=SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(decode, "_triton", decode._triton.__wrapped__)
    assert decode.implementation(torch.device("cuda")) is decode_torch
    assert reason in caplog.text


def batch_of(lengths: list[int], behind: int, **fields: Any) -> Batch:
    return Batch(lengths=tuple(lengths), positions=tuple(n + behind for n in lengths), **fields)


@compiled
@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        batch_of,
        lengths=st.lists(st.integers(0, 1200), min_size=1, max_size=4),
        behind=st.integers(0, 300),
        group=st.integers(1, 9),
        dim=st.integers(1, 40).map(lambda n: 4 * n),
        page=st.sampled_from((1, 7, 64)),
        ring=st.integers(6, 700),
        sinks=st.integers(0, 5),
        slopes=st.booleans(),
        coded=st.sampled_from((None, INT8, INT4)),
    ),
    st.integers(1, 3),
)
def test_compiled_kernels_see_every_key_once(batch: Batch, count: int) -> None:
    with threads(count):
        [error] = errors(batch, "decode_cpu").values()
    # Scores of a thousand and more, by distance, are rounded to 6e-5.
    assert error < (5e-4 if batch.slopes else 5e-5)


def stored(batch: Batch, name: str, width: int = 0, interleaved: bool = False) -> bool:
    """Tell if the kernel stores what its definition does, and nothing else.

    With a ``width``, keys and queries are rotated in so many dimensions meanwhile.
    """
    _, order, pages, windows, _ = batch.make()
    assert pages is not None and windows is not None
    count = len(batch.lengths)
    # The last sequence is kept by another rank.
    pages = pages._replace(at=torch.tensor([*range(3, 3 + count - 1), pages.k.shape[1] - 1]))
    heads = batch.retrieval + batch.streaming
    k = torch.randn(count, heads, batch.dim).to(batch.dtype).transpose(0, 1)
    v = torch.randn(count, heads, 2 * batch.dim).to(batch.dtype)[..., : batch.dim].transpose(0, 1)
    if batch.coded is not None:
        k[0, 0] = 0.0
    left, turned, queries = [], None, []
    if width:
        angles = torch.randn(1, count, width // 2).repeat(1, 1, 2)
        q = torch.randn(count, heads, batch.group, 2 * batch.dim).to(batch.dtype)
        q = q.permute(1, 2, 0, 3)[..., : batch.dim]  # rows of a longer product
        tables = angles.cos().to(batch.dtype), angles.sin().to(batch.dtype)
    for module in (kernels(name), decode_torch):
        if width:
            turned = Turned(q, torch.full_like(q, 7.0), Rotation(*tables, interleaved))
            queries.append(turned.out)
        caches = [
            cache._replace(
                **{
                    name: store.clone()
                    for name in ("k", "v", "k_scale", "v_scale")
                    if (store := getattr(cache, name, None)) is not None
                }
            )
            for cache in (windows, pages)
        ]
        module.store(k, v, order, *caches[::-1], turned)
        left.append([getattr(c, name) for c in caches for name in ("k", "v")])
        if batch.coded is not None:
            left[-1] += [caches[1].k_scale, caches[1].v_scale]
    changed = (left[0][0][0, :, 0] != windows.k[0, :, 0]) & ~left[0][0][0, :, 0].isnan()
    assert changed.sum() == sum(position >= 0 for position in batch.positions)
    if width:
        want = fused.rotate(q.flatten(0, 1)[None], k[None], *tables, interleaved)
        for found in queries:
            close(found, want[0][0].view_as(found))
        # Products are rounded once in one, twice in the other, before they are rounded again.
        if batch.dtype == torch.float32:
            for a, b in zip(*left, strict=True):
                close(a.nan_to_num(7), b.nan_to_num(7))
            return True
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*left, strict=True))


STORED = "eight sequences", "groups of three", "bfloat16", "int8", "int4", GROUPS_OF_32


@pytest.mark.parametrize(
    ("name", "width", "interleaved"),
    [
        *((name, 0, False) for name in STORED),
        ("eight sequences", 64, False),
        ("groups of three", 48, True),
        ("int8", 32, True),
        ("int4", 32, True),
    ],
)
def test_new_keys_go_where_they_belong(
    name: str, width: int, interleaved: bool, interpreter: ProcessPoolExecutor
) -> None:
    """Rotated meanwhile, as their queries are, where there is a width."""
    call = interpreter.submit(stored, BATCHES[name], "decode_triton", width, interleaved)
    assert call.result(120)


@compiled
@pytest.mark.parametrize("name", STORED)
def test_compiled_kernels_put_new_keys_where_they_belong(name: str) -> None:
    assert stored(BATCHES[name], "decode_cpu")


def overlooked(batch: Batch, name: str) -> int:
    """Count the keys and values with a number that is not finite and a scale that is."""
    _, order, pages, windows, _ = batch.make()
    count = len(batch.lengths)
    assert pages is not None and pages.k_scale is not None and pages.v_scale is not None
    pages = pages._replace(at=torch.arange(3, 3 + count))
    new = torch.randn(2, batch.retrieval + batch.streaming, count, batch.dim)
    new[..., 0, 5], new[..., 1, 6] = math.nan, -math.inf
    kernels(name).store(*new, order, pages, windows)
    scales = torch.cat([pages.k_scale, pages.v_scale])[:, 3 : 3 + count]
    assert scales[:, 2:].isfinite().all()
    return int(scales[:, :2].isfinite().sum())


@pytest.mark.parametrize("name", ["int8", "int4", GROUPS_OF_32])
def test_what_is_not_finite_has_no_finite_scale(
    name: str, interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(overlooked, BATCHES[name], "decode_triton").result(120) == 0


def close(got: Tensor, want: Tensor) -> None:
    """Codes may be rounded to their neighbours."""
    if got.dtype == INT4:
        got, want = (torch.stack([x & 15, x >> 4]) for x in (got, want))
    atol = 1.0 if got.dtype in (INT8, INT4) else 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=1e-5)


def rotated(dtype: torch.dtype, heads: int, dim: int, width: int, interleaved: bool) -> float:
    """Largest error of the rotating kernel against its definition."""
    from razor_dist.kernels import fused_triton

    generator = torch.Generator().manual_seed(0)
    # As models have them: views of what the projections give.
    q, k = (
        torch.randn(1, 5, count, dim, generator=generator).to(dtype).transpose(1, 2)
        for count in (heads, 2)
    )
    angles = torch.randn(1, 5, width // 2, generator=generator).repeat(1, 1, 2)
    given = (q, k, angles.cos().to(dtype), angles.sin().to(dtype), interleaved)
    found = zip(fused_triton.rotate(*given), fused.rotate(*given), strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in found)


def summed(dtype: torch.dtype, dim: int) -> float:
    """The same of the kernel that norms a sum, against float64: of the norm, and of the sum."""
    from razor_dist.kernels.fused_triton import add_rms_norm

    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 1, 3, 2 * dim, generator=generator).to(dtype)[..., :dim]
    assert not x.is_contiguous()  # parts of longer rows
    weight = torch.randn(dim, generator=generator).to(dtype)
    found = add_rms_norm(x, residual, weight, 1e-5)
    total = x.double() + residual.double()
    kept = total.to(dtype).double()
    want = kept / (kept.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    pairs = zip(found, (want, total), strict=True)
    return max(((got - of).abs() / (1 + of.abs())).max().item() for got, of in pairs)


def activated(dtype: torch.dtype, width: int) -> float:
    """The same of the kernel for gated activations, against float64."""
    from razor_dist.kernels.fused_triton import gated

    gate, up = (torch.randn(1, 3, 2 * width) * 5).to(dtype).chunk(2, -1)
    want = gate.double() * gate.double().sigmoid() * up.double()
    return ((gated(gate, up) - want).abs() / (1 + want.abs())).max().item()


def merged(dtype: torch.dtype, tokens: int, dim: int) -> float:
    """The same of the kernel that merges two partial results, against its definition."""
    from razor_dist.kernels.merge_triton import merge_pair

    generator = torch.Generator().manual_seed(0)
    # Views, as a ring has them; some rows see no key in one segment, or in either.
    one, other = (
        Partial(
            torch.randn(3, 2, tokens + 2, dim, generator=generator).to(kind),
            torch.randn(3, 2, tokens + 2, generator=generator) * 9,
        ).tokens(slice(2, None))
        for kind in (torch.float32, dtype)
    )
    one.lse[:, :, :5], other.lse[:, :, 3:7] = -math.inf, -math.inf
    one.lse[0, 0, 8] = math.nan
    want, got = merge([one, other]), Partial(*merge_pair(one, other))
    assert got.out[:, :, 3:5].abs().max() == 0
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-6, equal_nan=True)
    assert torch.equal(got.out.isnan(), want.out.isnan())
    return (got.out - want.out).nan_to_num().abs().max().item()


FP32, BF16 = torch.float32, torch.bfloat16


# The interpreter cuts bfloat16 off where a GPU rounds it.
@pytest.mark.parametrize(
    ("error", "given", "most"),
    [
        (rotated, (FP32, 3, 64, 64, False), 1e-6),
        (rotated, (FP32, 8, 128, 64, True), 1e-6),
        (rotated, (BF16, 2, 96, 72, False), 2e-2),
        (summed, (FP32, 96), 1e-6),
        (summed, (BF16, 576), 1e-2),
        (activated, (FP32, 1500), 1e-6),
        (activated, (BF16, 64), 1e-2),
        (merged, (FP32, 37, 64), 1e-5),
        (merged, (BF16, 16, 96), 1e-5),
        (merged, (BF16, 9, 128), 1e-5),
    ],
)
def test_small_kernels_are_their_definitions(
    error: Callable[..., float],
    given: tuple[Any, ...],
    most: float,
    interpreter: ProcessPoolExecutor,
) -> None:
    assert interpreter.submit(error, *given).result(120) < most


POINTERS = {
    **dict.fromkeys(
        ["order", "stored", "places", "position", "start", "offset", "capacity", "at"], "*i64"
    ),
    "table": "*i32",
    **dict.fromkeys(["scale", "eps"], "fp32"),
    **dict.fromkeys(["slopes", "lse", "parts", "packed", "gathered"], "*fp32"),
    **dict.fromkeys(["a", "a_lse", "b_lse"], "*fp32"),
    "b": "*bf16",
    **{f"page_{part}_scale": "*fp32" for part in "kv"},
}


def pointers(queries: str, keys: str, out: str) -> dict[str, str]:
    stores = {f"{store}_{part}": f"*{keys}" for store in ("page", "ring") for part in "kv"}
    new = dict.fromkeys(
        [
            *("k", "v", "cos", "sin", "out_q", "out_k", "turned"),
            *("x", "residual", "weight", "normed", "total", "gate", "up"),
        ],
        f"*{out}",
    )
    return {**POINTERS, **stores, **new, "q": f"*{queries}", "out": f"*{out}"}


def attending(
    capability: int, queries: str, keys: str, group: int, dim: int, slopes: bool
) -> Resources:
    from razor_dist.kernels import decode_triton

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "i8": INT8, "u8": INT4}
    constants = {
        **decode_triton.tile(group, dim, dtypes[queries], dtypes[keys], slopes=slopes),
        **{"SINKS": 4, "COMPENSATION": True, "PAGE": 64, "UPCAST": False},
        **{"BITS": decode_triton.bits_of(dtypes[keys]), "SLOPES": slopes},
    }
    types = pointers(queries, keys, "fp32")
    return resources("attend_kernel", capability, types, constants)


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "queries", "keys", "group", "dim", "slopes"),
    [
        (80, "bf16", "bf16", 8, 128, False),
        (90, "bf16", "bf16", 8, 128, False),
        (90, "bf16", "bf16", 1, 128, True),
        (90, "bf16", "i8", 8, 128, True),
        (80, "bf16", "i8", 8, 128, False),
        (86, "bf16", "bf16", 8, 128, False),
        (86, "bf16", "i8", 8, 128, False),
        (89, "bf16", "bf16", 8, 128, False),
        (89, "bf16", "i8", 8, 128, False),
        (89, "bf16", "bf16", 4, 256, False),
        (90, "bf16", "i8", 8, 128, False),
        (80, "bf16", "u8", 8, 128, True),
        (89, "bf16", "u8", 4, 256, False),
        (90, "bf16", "u8", 8, 128, False),
        (90, "fp32", "u8", 3, 64, False),
        (80, "fp32", "fp32", 3, 64, False),
        (80, "bf16", "fp32", 8, 128, False),
        (80, "bf16", "bf16", 2, 8, False),
    ],
)
def test_attending_compiles_without_spills(
    capability: int, queries: str, keys: str, group: int, dim: int, slopes: bool,
    compiler: ProcessPoolExecutor,
) -> None:  # fmt: skip
    call = compiler.submit(attending, capability, queries, keys, group, dim, slopes)
    made = call.result(120)
    assert made.spilled == 0
    assert made.registers <= 255
    # Two programs fit a multiprocessor of an A100 (164 KB), three of an H100 (228 KB), and one of
    # GPUs with 100 KB.
    assert made.shared <= 75 << 10


# What a multiprocessor has one pipe for, half as wide as the one that issues.
INTEGER = ("IMAD", "IADD3", "VIADD", "LEA", "LOP3", "SHF", "ISETP", "SEL", "PRMT", "IMNMX")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("keys", "most", "most_integer"), [("bf16", 300, 75), ("i8", 820, 425), ("u8", 820, 500)]
)
def test_a_tile_of_keys_is_few_instructions(
    keys: str, most: int, most_integer: int, capability: int, compiler: ProcessPoolExecutor
) -> None:  # fmt: skip
    """A multiprocessor of an H200 reads 64 keys of bfloat16 in 1 us, of 8 bits in 0.5 us."""
    call = compiler.submit(attending, capability, "bf16", keys, 8, 128, False)
    loops = call.result(120).loops
    # Over pages; and, where these are no codes, over the two runs of a window in its ring.
    assert len(loops) == (3 if keys == "bf16" else 1)
    for loop in loops:
        assert loop.count("HMMA") == 32  # 64 keys of 128 numbers: 2 products, by 4 warps
        assert len(loop) <= most
        assert sum(name in INTEGER for name in loop) <= most_integer
        # While a tile is computed, the next comes into shared memory by itself.
        assert "LDGSTS" in loop and "LDG" not in loop


def test_codes_are_the_mantissa_of_a_bfloat16() -> None:
    """As `razor_dist.kernels.codes_triton.levels` makes halves of levels of them."""
    codes = torch.arange(16, dtype=torch.int16)
    halves = (codes << 3 | 0x4180).view(torch.bfloat16) - 23.5
    assert (2 * halves).tolist() == list(range(-15, 16, 2))


def programs_of_one(sequences: int) -> int:
    """Count the programs of a head's 131,072 keys, the longest of a batch, on an H200."""
    module = import_module("razor_dist.kernels.decode_triton")
    keys = 1 << 17
    with mock.patch.object(module, "multiprocessors", lambda device: 132):
        return -(-keys // module.split_length(sequences * keys, torch.device("cuda", 0)))


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_long_sequence_keeps_the_device_busy_beside_short_ones(
    sequences: int, compiler: ProcessPoolExecutor
) -> None:
    assert compiler.submit(programs_of_one, sequences).result(120) >= 128


STORE = {"SINKS": 4, "D": 128, "WIDTH": 128, "num_warps": 1, "G": 8, "GROUP": 8}
STORE |= {"R": 64, "INTERLEAVED": True}
SMALL: dict[str, dict[str, Any]] = {
    "store_kernel": STORE | {"BITS": 0},
    "store_kernel, i8": STORE | {"BITS": 8},
    "store_kernel, u8": STORE | {"BITS": 4},
    "merge_splits_kernel": {
        "G": 8, "D": 128, "WIDTH": 32, "SPLITS": 64, "PACKED": True,
        "PLACED": True,
    },
    "merge_pair_kernel": {"D": 128, "WIDTH": 128, "ROWS": 16},
    "merge_ranks_kernel": {"RANKS": 8, "PARTS": 8, "G": 8, "D": 128, "WIDTH": 128, "PLACED": True},
    "rotate_kernel": {
        "H": 32, "K": 4, "R": 64, "D": 128, "INTERLEAVED": True, "WIDTH": 128, "num_warps": 1,
    },
    "add_rms_norm_kernel": {"D": 4096, "WIDTH": 4096, "num_warps": 8},
    "gated_kernel": {"BLOCK": 1024},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kernel", SMALL)
def test_small_kernels_compile_without_spills(kernel: str, compiler: ProcessPoolExecutor) -> None:
    name, _, keys = kernel.partition(", ")
    types = pointers("bf16", keys or "bf16", "bf16")
    call = compiler.submit(resources, name, 90, types, SMALL[kernel])
    made = call.result(120)
    assert made.spilled == 0
    assert made.registers <= 72  # rounded division takes 66 with Triton 3.6, fewer with 3.7
    assert made.shared <= 4 << 10
    assert not (keys and made.rough), "codes are those of `quantize`"
