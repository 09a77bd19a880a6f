"""Every backend against the definition, and what merging promises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.kernels import (
    BACKENDS,
    Partial,
    attend,
    compensate,
    empty_partial,
    merge,
    merge_stacked,
)


def draw(kv_heads: int, group: int, queries: int, keys: int, dim: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(kv_heads, group, queries, dim, generator=generator)
    k = torch.randn(kv_heads, keys, dim, generator=generator)
    v = torch.randn(kv_heads, keys, dim, generator=generator)
    return q, k, v


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 1, 5000), (3, 2, 7, 7), (1, 4, 70, 33)])
@pytest.mark.parametrize("biased", [False, True])
def test_cpu_flash_is_the_reference(shape: tuple[int, int, int, int], biased: bool) -> None:
    q, k, v = draw(*shape)
    bias = None
    if biased:
        bias = torch.randn(shape[3], generator=torch.Generator().manual_seed(1))
        bias[1::2] = -math.inf
    for causal in {False, shape[2] == shape[3] and not biased}:
        got = attend(q, k, v, scale=0.3, causal=causal, bias=bias, backend="torch_cpu")
        want = attend(q, k, v, scale=0.3, causal=causal, bias=bias, backend="reference")
        torch.testing.assert_close(got.out, want.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(got.lse, want.lse, atol=2e-6, rtol=1e-5)


def test_lse_is_a_natural_logarithm() -> None:
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 10, 16), torch.ones(1, 10, 16)
    for backend in ("reference", "torch_cpu"):
        lse = attend(q, k, v, scale=1.0, backend=backend).lse
        assert lse.item() == pytest.approx(math.log(10))


def test_no_keys_means_minus_infinity_not_zero() -> None:
    q, k, v = draw(2, 2, 3, 0)
    partial = attend(q, k, v, scale=1.0)
    assert (partial.lse == -math.inf).all()
    assert (partial.out == 0).all()


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
    for got in (merge(parts), merge(parts[::-1]), stacked):
        torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)


def test_merge_of_nothing_is_nothing_and_huge_scores_do_not_overflow() -> None:
    q = torch.zeros(1, 1, 2, 4)
    nothing = merge([empty_partial(q), empty_partial(q)])
    assert (nothing.lse == -math.inf).all()
    assert not nothing.out.isnan().any()
    huge = Partial(torch.ones(1, 1, 2, 4), torch.full((1, 1, 2), 1e4))
    assert torch.equal(merge([huge, empty_partial(q)]).out, huge.out)
    assert merge([huge, huge]).lse[0, 0, 0].item() == pytest.approx(1e4 + math.log(2))


def test_compensation_token_is_that_many_equal_keys() -> None:
    q, k, v = draw(2, 3, 4, 1)
    count = 17
    got = compensate(q, k[:, 0], v[:, 0], count, scale=0.4)
    want = attend(q, k.repeat(1, count, 1), v.repeat(1, count, 1), scale=0.4, backend="reference")
    torch.testing.assert_close(got.out, want.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-6)


def test_misuse_is_refused() -> None:
    q, k, v = draw(1, 1, 2, 3)
    with pytest.raises(ValueError, match="as many queries as keys, got 2 and 3"):
        attend(q, k, v, scale=1.0, causal=True)
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        attend(q, k, v, scale=1.0, backend="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash_attn", "torch_cuda"])
@pytest.mark.parametrize("shape", [(2, 4, 1, 3000), (2, 4, 200, 200), (1, 8, 130, 700)])
def test_cuda_backends_are_the_reference(backend: str, shape: tuple[int, int, int, int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q, k, v = (x.to("cuda", torch.bfloat16) for x in draw(*shape, dim=64))
    causal = shape[2] == shape[3]
    import importlib

    module = importlib.import_module(f"razor_dist.kernels.{backend}")
    if not module.supports(q, causal, None):
        pytest.skip(f"{backend} is not installed")
    got = attend(q, k, v, scale=0.125, causal=causal, backend=backend)
    want = attend(q, k, v, scale=0.125, causal=causal, backend="reference")
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse.float(), want.lse, atol=2e-2, rtol=1e-2)


def test_backends_are_listed_in_order_of_preference() -> None:
    assert BACKENDS == ("flash_attn", "torch_cuda", "torch_cpu", "reference")
