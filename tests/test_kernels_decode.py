"""The kernels of decode steps: what they compute, by Triton's interpreter and on CPUs.

No GPU is needed. Triton decides as it is imported whether it interprets, so that one process runs
the kernels on CPU tensors and another compiles them for GPUs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
from razor_dist.kernels.decode import Pages, Rotation, Turned
from razor_dist.kernels.dual_chunk import DualChunk
from razor_dist.kernels.partial import Partial, merge
from razor_dist.kernels.quantized import INT4, INT8
from tests.decode_batches import BATCHES, GROUPS_OF_32, Batch, errors, kernels
from tests.partials import threads


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


@pytest.mark.long
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


@pytest.mark.long
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


def packs(batch: Batch, name: str) -> bool:
    """Tell if a call without retrieval heads returns something for other ranks."""
    q, order, _, windows, _ = batch.make()
    out = torch.zeros(len(batch.lengths), q.shape[0] * q.shape[1], batch.dim)
    found = kernels(name).attend(q, order, None, windows, out, scale=0.1, pack=True)
    return found is not None


@pytest.mark.parametrize("name", ["decode_triton", "decode_torch"])
def test_windows_alone_are_sent_to_no_rank(name: str, interpreter: ProcessPoolExecutor) -> None:
    assert not interpreter.submit(packs, BATCHES["no compensation"], name).result(120)


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
