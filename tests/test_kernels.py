"""Every backend against the definition, and what merging promises."""

from __future__ import annotations

import importlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from razor_dist.kernels import (
    BACKENDS,
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
from razor_dist.kernels.quantized import (
    INT4,
    INT8,
    has_scale,
    quantize,
    row_bytes,
    unpacked,
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch compute by so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(kv_heads: int, group: int, queries: int, keys: int, dim: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(kv_heads, group, queries, dim, generator=generator)
    k = torch.randn(kv_heads, keys, dim, generator=generator)
    v = torch.randn(kv_heads, keys, dim, generator=generator)
    return q, k, v


def assert_close(got: Partial, want: Partial, *, atol: float, rtol: float) -> None:
    torch.testing.assert_close(got.out.to(want.out.dtype), want.out, atol=atol, rtol=rtol)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=atol, rtol=rtol)


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
    got = compensate(q, k[:, 0], v[:, 0], count, scale=0.4)
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


def _plain_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over ``[batch, heads, ...]`` as the fused ops do it: lse is 0 for an empty row."""
    scores = scale * q.float() @ k.float().transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).nan_to_num(0.0) @ v.float(), lse.masked_fill(lse == -math.inf, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 1, 3000), (3, 2, 1, 77), (1, 4, 70, 33), (2, 2, 40, 40)])
@pytest.mark.parametrize("biased", [False, True])
def test_cuda_ops_get_what_they_ask_for(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch_cuda` around stand-ins for its ops that check what the real ones insist on."""
    calls = []

    def flash(q, k, v, dropout, causal, debug, *, scale):
        assert q.dtype == torch.bfloat16
        return efficient(q, k, v, None, True, dropout, causal, scale=scale)

    def efficient(q, k, v, mask, with_lse, dropout, causal, *, scale):
        calls.append(k.shape)
        assert with_lse and not dropout
        assert q.shape[:2] == k.shape[:2] == v.shape[:2]
        rows, keys = q.shape[2], k.shape[2]
        for x in (q, k, v):
            assert x.stride(-1) == 1
        if mask is not None:
            assert mask.dtype == q.dtype
            assert mask.shape == (*q.shape[:2], rows, keys)
            assert mask.stride(-1) == 1 or keys == 1
            assert all(
                s % 8 == 0 for s, n in zip(mask.stride()[:3], mask.shape, strict=False) if n > 1
            )
            assert mask.storage_offset() % 8 == 0
        out, lse = _plain_op(q, k, v, mask, scale, causal)
        # lse comes with its rows padded.
        return out.to(q.dtype), torch.nn.functional.pad(lse, (0, -rows % 32)), None, None

    from razor_dist.kernels import torch_cuda

    monkeypatch.setattr(torch_cuda, "_flash", flash)
    monkeypatch.setattr(torch_cuda, "_efficient", efficient)
    monkeypatch.setattr(torch_cuda, "multiprocessors", lambda device: 5)
    q, k, v = (x.to(dtype) for x in draw(*shape))
    heads, _, queries, keys = shape
    bias = torch.linspace(-1.0, 1.0, keys) if biased else None
    causal = queries == keys and not biased
    got = torch_cuda.attend(q, k, v, 0.3, causal, bias)
    want = attend(q, k, v, scale=0.3, causal=causal, bias=bias, backend="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close(got, want, atol=tolerance, rtol=tolerance)
    if queries == 1 and keys == 3000 and (biased or dtype == torch.float32):
        assert calls[0] == (heads, 5, 600, 16)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (300, 700), (260, 512), (64, 700)])
def test_long_queries_are_cudnns_in_few_shapes(
    there: bool, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from razor_dist.kernels import torch_cuda

    calls = []

    def op(q, k, v, causal, scale):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out, lse = _plain_op(q, k, v, None, scale, causal)
        return out.to(q.dtype), lse

    def cudnn(q, k, v, mask, with_lse, dropout, causal, debug, *, scale):
        calls.append("cuDNN")
        assert q.shape == (2, 3, 64, 16) and k.shape == v.shape == (2, 1, 128, 16)
        assert mask is None and with_lse and not dropout and not causal and not debug
        out, lse = op(q, k, v, False, scale)
        return out, lse.unsqueeze(-1), None, None

    def flash(q, k, v, dropout, causal, debug, *, scale):
        calls.append("flash")
        return *op(q, k, v, causal, scale), None

    monkeypatch.setattr(torch_cuda, "_cudnn", cudnn)
    monkeypatch.setattr(torch_cuda, "_flash", flash)
    monkeypatch.setattr(torch_cuda, "_takes_cudnn", lambda *given: there)
    monkeypatch.setattr(torch_cuda, "_QUERIES", 3 * 64)
    monkeypatch.setattr(torch_cuda, "_KEYS", 256)
    monkeypatch.setattr(torch_cuda, "_SPLITS", 2)
    q, k, v = (x.bfloat16() for x in draw(2, 3, queries, keys))
    causal = keys == queries
    got = torch_cuda.attend(q, k, v, 0.3, causal, None)
    want = attend(q, k, v, scale=0.3, causal=causal, backend="reference")
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=1e-4, rtol=1e-4)
    # 64 queries a block, of each head; a last block of fewer than 32 is flash attention's.
    blocks = ["cuDNN"] * (2 * ((queries + 32) // 64) * (keys // 256)) + ["flash"] * (keys % 256 > 0)
    blocks += ["flash"] * (0 < queries % 64 < 32)
    assert calls == (blocks if there and not causal else ["flash"])


def test_keys_of_eight_bits_are_read_in_cudnns_blocks_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from razor_dist import kernels
    from razor_dist.kernels import torch_cuda

    assert kernels._CONVERTED_KEYS["cuda"] == torch_cuda._KEYS
    blocks = []

    def op(q, k, v, scale, causal, bias):
        blocks.append(k.shape[1])
        return empty_partial(q)

    monkeypatch.setitem(kernels._CONVERTED_KEYS, "meta", torch_cuda._KEYS)
    monkeypatch.setattr(kernels._backend("meta"), "attend", op)
    q = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, 70_000, 128, dtype=torch.float32, device="meta")
    attend(q, keys, keys, scale=0.1)
    assert blocks == [32768, 32768, 70_000 - 2 * 32768]


@pytest.mark.parametrize("causal", [True, False])
def test_head_dimensions_that_the_ops_do_not_take_are_filled_up(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from razor_dist.kernels import torch_cuda

    def flash(q, k, v, dropout, causal, debug, *, scale):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 104
        out, lse = _plain_op(q, k, v, None, scale, causal)
        return out.to(q.dtype), lse, None

    monkeypatch.setattr(torch_cuda, "_flash", flash)
    q, k, v = (x.bfloat16() for x in draw(2, 3, 40, 40, dim=100))
    got = torch_cuda.attend(q, k, v, 0.1, causal, None)
    want = attend(q, k, v, scale=0.1, causal=causal, backend="reference")
    assert got.out.shape == q.shape
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=1e-4, rtol=1e-4)


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
    if not module.supports(q, causal, bias):
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


def test_backends_are_listed_in_order_of_preference() -> None:
    assert BACKENDS == ("flash_attn", "torch_cuda", "many_cpu", "torch_cpu", "meta", "reference")


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
