"""Every backend against the definition, and what merging promises."""

from __future__ import annotations

import importlib
import itertools
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from razor_dist.kernels import (
    HIDDEN,
    Partial,
    attend,
    compensate,
    empty_partial,
    flash_attn,
    merge,
    merge_stacked,
    partial,
)
from razor_dist.kernels.partial import attend_folded, over_keys
from razor_dist.kernels.quantized import INT4, INT8, has_scale, quantize, row_bytes, unpacked
from tests.partials import _plain_op, assert_close, draw


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 1, 5000), (3, 2, 7, 7), (1, 4, 70, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_cpu_flash_is_the_reference(shape: tuple[int, int, int, int], biased: bool) -> None:
    q, k, v = draw(*shape)
    bias = None
    if biased:
        bias = torch.randn(shape[3], generator=torch.Generator().manual_seed(1))
        bias[1::2] = HIDDEN
    for causal in {False, shape[2] == shape[3] and not biased}:
        got = attend(q, k, v, scale=0.3, causal=causal, bias=bias, backend="torch_cpu")
        want = attend(q, k, v, scale=0.3, causal=causal, bias=bias, backend="reference")
        assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_flash_attn_that_cannot_be_imported_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A package that fails as one built for another torch does."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    flash_attn._installed.cache_clear()
    assert not flash_attn._installed()
    flash_attn._installed.cache_clear()
    assert "not used, for it cannot be imported: undefined symbol" in caplog.text


def test_no_keys_means_minus_infinity_not_zero() -> None:
    q, k, v = draw(2, 2, 3, 0)
    partial = attend(q, k, v, scale=1.0)
    assert (partial.lse == -math.inf).all()
    assert (partial.out == 0).all()


def without_compiled() -> AbstractContextManager[object]:
    return mock.patch.object(partial, "operations", lambda: None)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), min_size=0, max_size=5), seed=st.integers(0, 1000),
    queries=st.integers(1, 5),
)  # fmt: skip
def test_merge_of_any_cut_is_the_whole(cuts: list[int], seed: int, queries: int) -> None:
    q, k, v = draw(2, 2, queries, 40, seed=seed)
    edges = [0, *sorted(cuts), 40]
    parts = [attend(q, k[:, a:b], v[:, a:b], scale=0.5) for a, b in itertools.pairwise(edges)]
    want = attend(q, k, v, scale=0.5, backend="reference")
    stacked = merge_stacked(
        torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])
    )
    # Views of other memory, as the ring's and the compensation token's are.
    packed = [torch.cat([p.out, p.lse.unsqueeze(-1)], -1).transpose(1, 2) for p in parts]
    views = [Partial(x[..., :-1].transpose(1, 2), x[..., -1].mT) for x in packed]
    found = [stacked]
    for without in (nullcontext(), without_compiled()):
        with without:
            found += [merge(parts), merge(parts[::-1]), merge(views)]
    for got in found:
        assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_results_of_many_segments_take_the_memory_of_few() -> None:
    made: list[weakref.ref[Tensor]] = []

    def segment(alive: int) -> Partial:
        assert sum(ref() is not None for ref in made) <= alive
        out = torch.ones(1, 2, 3, 16)
        made.append(weakref.ref(out))
        return Partial(out, torch.zeros(1, 2, 3))

    merge(segment(1) for _ in range(9))
    over_keys(lambda _: segment(1), 90, 10)
    assert len(made) == 18


@pytest.mark.parametrize("without", [nullcontext, without_compiled])
def test_merge_of_nothing_is_nothing_and_huge_scores_do_not_overflow(
    without: Callable[[], AbstractContextManager[object]],
) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with without():
        nothing = merge([empty_partial(q), empty_partial(q)])
        assert (nothing.lse == -math.inf).all()
        assert not nothing.out.any()
        huge = Partial(torch.ones(1, 1, 2, 4), torch.full((1, 1, 2), 1e4))
        assert torch.equal(merge([huge, empty_partial(q)]).out, huge.out)
        assert merge([huge, huge]).lse[0, 0, 0].item() == pytest.approx(1e4 + math.log(2))
        wrong = Partial(huge.out, torch.full((1, 1, 2), math.nan))
        for parts in ([huge, wrong], [wrong, empty_partial(q)]):
            assert merge(parts).out.isnan().all() and merge(parts).lse.isnan().all()


def test_compensation_token_is_that_many_equal_keys() -> None:
    q, k, v = draw(2, 3, 4, 1)
    count = 17
    got = compensate(q, k, v, torch.tensor([count]), scale=0.4)
    want = attend(q, k.repeat(1, count, 1), v.repeat(1, count, 1), scale=0.4, backend="reference")
    torch.testing.assert_close(got.out, want.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=1e-5, rtol=1e-6)


def test_misuse_is_refused() -> None:
    q, k, v = draw(1, 1, 2, 3)
    with pytest.raises(ValueError, match="as many queries as keys, got 2 and 3"):
        attend(q, k, v, scale=1.0, causal=True)
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        attend(q, k, v, scale=1.0, backend="fast")


@pytest.mark.parametrize("keys", [1, 255, 1000, 4096])
@pytest.mark.parametrize(("parts", "align"), [(1, 1), (3, 1), (3, 8), (200, 8)])
@pytest.mark.parametrize("seen", ["all", "few", "last"])
def test_keys_cut_into_any_parts_are_the_whole(
    keys: int, parts: int, align: int, seen: str
) -> None:
    q, k, v = draw(2, 3, 2, keys)
    bias = None
    if seen != "all":  # most parts are hidden altogether
        bias = torch.full((keys,), HIDDEN)
        bias[:5] = torch.arange(float(min(keys, 5)))
        if seen == "last":
            bias = bias.flip(0)

    def op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return _plain_op(q, k, v, mask, 0.3)

    got = attend_folded(op, q, k, v, bias, parts, align)
    want = attend(q, k, v, scale=0.3, bias=bias, backend="reference")
    assert_close(got, want, atol=2e-6, rtol=1e-5)


def cuda_tensors(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return [x.to("cuda", dtype) for x in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash_attn", "torch_cuda", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        *[(2, 4, 1, 3000), (1, 8, 1, 70001), (2, 4, 200, 200), (1, 8, 130, 700), (2, 4, 600, 600)],
        (1, 2, 2100, 33000),
    ],
)
@pytest.mark.parametrize("seen", ["all", "half", "few"])
def test_cuda_backends_are_the_reference(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int], seen: str
) -> None:
    q, k, v = cuda_tensors(*draw(*shape, dim=64), dtype=dtype)
    bias = None
    if seen != "all":
        # Whole parts of the keys are hidden by "few".
        bias = torch.full((shape[3],), HIDDEN, device="cuda")
        bias[: shape[3] // 2 : 2 if seen == "half" else 500] = 0.5
    causal = shape[2] == shape[3] and bias is None
    module = importlib.import_module(f"razor_dist.kernels.{backend}")
    if not module.supports(q, k, v, causal, bias is not None):
        pytest.skip(f"{backend} is not installed, or not for this input")
    got = attend(q, k, v, scale=0.125, causal=causal, bias=bias, backend=backend)
    exact = (x.cpu().float() for x in (q, k, v))
    seen_bias = None if bias is None else bias.cpu()
    want = attend(*exact, scale=0.125, causal=causal, bias=seen_bias, backend="reference")
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.out.cpu().float(), want.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.lse.cpu(), want.lse, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merges_on_cuda_are_the_whole(dtype: torch.dtype) -> None:
    q, k, v = cuda_tensors(*draw(2, 4, 1, 900, dim=64), dtype=dtype)
    edges = [0, 1, 300, 301, 900]
    parts = [attend(q, k[:, a:b], v[:, a:b], scale=0.125) for a, b in itertools.pairwise(edges)]
    parts.append(empty_partial(q))
    want = attend(q, k, v, scale=0.125, backend="reference")
    stacked = merge_stacked(
        torch.stack([p.out.float() for p in parts]), torch.stack([p.lse for p in parts])
    )
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for got in (merge(parts), merge(parts[::-1]), stacked):
        assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kept", [torch.bfloat16, INT8, INT4])
@pytest.mark.parametrize("queries", [1, 40])
def test_keys_of_another_dtype_are_converted(queries: int, kept: torch.dtype) -> None:
    """In blocks, of which a bias may hide whole ones."""
    q, k, v = draw(2, 3, queries, 9000)
    k, v = (quantize(x, kept) if has_scale(kept) else x.to(kept) for x in (k, v))
    wide_k, wide_v = (x.to(torch.float32) for x in (k, v))
    bias = torch.zeros(9000)
    bias[100:8500] = HIDDEN
    for hiding in (None, bias):
        got = attend(q, k, v, scale=0.25, bias=hiding)
        want = attend(q, wide_k, wide_v, scale=0.25, bias=hiding, backend="reference")
        assert_close(got, want, atol=1e-5, rtol=0)
    own = slice(0, queries)
    got = attend(q, k[:, own], v[:, own], scale=0.25, causal=True)
    want = attend(q, wide_k[:, own], wide_v[:, own], scale=0.25, causal=True)
    torch.testing.assert_close(got.out, want.out, atol=1e-6, rtol=0)
    # The other way round, the narrower dtype is the queries'.
    got = attend(q.bfloat16(), wide_k, wide_v, scale=0.25)
    want = attend(q.bfloat16(), wide_k, wide_v, scale=0.25, backend="reference")
    assert got.out.dtype == torch.float32
    torch.testing.assert_close(got.out, want.out, atol=4e-3, rtol=0)


@pytest.mark.parametrize(("kept", "steps", "width"), [(INT8, 127, 16), (INT4, 7.5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_off_by_half_a_step(
    dtype: torch.dtype, kept: torch.dtype, steps: float, width: int
) -> None:
    x = (torch.randn(3, 50, 16) * 10 ** torch.linspace(-30, 30, 16)).to(dtype)
    x[1, 7] = 0.0
    x[2, 3, 0] = torch.inf
    codes = quantize(x, kept)
    packed = codes.packed()
    assert codes.shape == x.shape
    assert packed.nbytes == 3 * 50 * row_bytes(16, kept) == 3 * 50 * (width + 4)
    found = unpacked(packed[:, ::7]).to(torch.float32)
    wide = x[:, ::7].float()
    finite = wide.isfinite().all(-1)
    rounded, want = codes.transform(found), codes.transform(wide)
    step = want.abs().amax(-1, keepdim=True) / steps
    assert ((rounded - want).abs() <= 0.501 * step)[finite].all()
    assert found[~finite].isnan().any(-1).all(), "what is not finite does not go unnoticed"
    again = quantize(found[finite], kept).to(torch.float32)
    torch.testing.assert_close(again, found[finite], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kept", [INT8, INT4])
def test_codes_are_divided_by_tensors(kept: torch.dtype) -> None:
    """CUDA multiplies by the rounded reciprocal of a host's number, and kernels divide."""

    class Divisors(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.div.Tensor:
                divisors.append(args[1])
            return func(*args, **kwargs or {})

    divisors: list[Tensor] = []
    with Divisors():
        quantize(torch.randn(3, 16, device="meta"), kept)
    # By a power of 2 both are the same.
    assert [getattr(x, "device", x) for x in divisors[:2]] == [torch.device("meta")] * 2
