"""Calls of torch's attention for CUDA: stand-ins check the real operations' requirements."""

from __future__ import annotations

import pytest
import torch

from razor_dist import kernels
from razor_dist.kernels import attend, empty_partial, torch_cuda
from tests.partials import CudaOps, _plain_op, assert_close, draw


class OnCuda(torch.Tensor):
    """Says so where there is none."""

    device = torch.device("cuda")


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

    def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale):
        assert q.dtype == torch.bfloat16
        return efficient(q, k, v, None, True, dropout, causal, scale=scale)

    def efficient(q, k, v, mask, with_lse, dropout=0.0, causal=False, *, scale):
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
        return out.to(q.dtype), torch.nn.functional.pad(lse, (0, -rows % 32))

    monkeypatch.setattr(torch_cuda, "multiprocessors", lambda device: 5)
    q, k, v = (x.to(dtype) for x in draw(*shape))
    heads, _, queries, keys = shape
    bias = torch.linspace(-1.0, 1.0, keys) if biased else None
    causal = queries == keys and not biased
    with CudaOps(flash=flash, efficient=efficient):
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
    calls = []

    def op(q, k, v, causal, scale):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out, lse = _plain_op(q, k, v, None, scale, causal)
        return out.to(q.dtype), lse

    def cudnn(q, k, v, mask, with_lse, dropout=0.0, causal=False, debug=False, *, scale):
        calls.append("cuDNN")
        assert q.shape == (2, 3, 64, 16) and k.shape == v.shape == (2, 1, 128, 16)
        assert mask is None and with_lse and not dropout and not causal and not debug
        out, lse = op(q, k, v, False, scale)
        return out, lse.unsqueeze(-1)

    def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale):
        calls.append("flash")
        return op(q, k, v, causal, scale)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: torch_cuda.CUDNN_ON)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: there)
    monkeypatch.setattr(torch_cuda, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(torch_cuda, "PLAN_TILE", 32)
    monkeypatch.setattr(torch_cuda, "PLAN_KEYS", 256)
    monkeypatch.setattr(torch_cuda, "PLAN_SPLITS", 2)
    q, k, v = (x.bfloat16() for x in draw(2, 3, queries, keys))
    causal = keys == queries
    with CudaOps(cudnn=cudnn, flash=flash):
        got = torch_cuda.attend(q, k, v, 0.3, causal, None)
    want = attend(q, k, v, scale=0.3, causal=causal, backend="reference")
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=1e-4, rtol=1e-4)
    # 64 queries a block, two tiles, of each head; a last one of fewer than 32 is flash's.
    blocks = ["cuDNN"] * (2 * ((queries + 32) // 64) * (keys // 256)) + ["flash"] * (keys % 256 > 0)
    blocks += ["flash"] * (0 < queries % 64 < 32)
    assert calls == (blocks if there and not causal else ["flash"])


@pytest.mark.parametrize("count", [114, 132])
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 16, 32])
def test_a_call_of_cudnn_is_computed_at_once(
    group: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the multiprocessors of an H100 for PCIe, and of other H100 and H200."""
    monkeypatch.setattr(torch_cuda, "multiprocessors", lambda device: count)
    tiles, rest = divmod(torch_cuda.plan_rows(torch.device("cuda"), group), torch_cuda.PLAN_TILE)
    tiles *= group * torch_cuda.PLAN_SPLITS
    assert not rest and (count / 2 < tiles <= count or group == 32)


def test_keys_of_eight_bits_are_read_in_cudnns_blocks_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = []

    def op(q, k, v, scale, causal, bias):
        blocks.append(k.shape[1])
        return empty_partial(q.as_subclass(torch.Tensor))

    monkeypatch.setattr(kernels, "BACKENDS", ("torch_cuda",))
    monkeypatch.setattr(torch_cuda, "attend", op)
    q = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16, device="meta").as_subclass(OnCuda)
    keys = torch.empty(1, 70_000, 128, device="meta")
    attend(q, keys, keys, scale=0.1)
    assert blocks == [32768, 32768, 70_000 - 2 * 32768]


@pytest.mark.parametrize("causal", [True, False])
def test_head_dimensions_that_the_ops_do_not_take_are_filled_up(causal: bool) -> None:
    def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 104
        out, lse = _plain_op(q, k, v, None, scale, causal)
        return out.to(q.dtype), lse

    q, k, v = (x.bfloat16() for x in draw(2, 3, 40, 40, dim=100))
    with CudaOps(flash=flash):
        got = torch_cuda.attend(q, k, v, 0.1, causal, None)
    want = attend(q, k, v, scale=0.1, causal=causal, backend="reference")
    assert got.out.shape == q.shape
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse.to(want.lse.dtype), want.lse, atol=1e-4, rtol=1e-4)
