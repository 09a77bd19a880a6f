"""Attention of many queries, compiled for this CPU, is that of float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.kernels import attend, attend_windows, many_cpu, takes_windows
from razor_dist.kernels.compiled import operations
from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import INT4, INT8, Codes, has_scale, quantize, unpacked
from tests.literal import literal_attention
from tests.partials import assert_close, threads

pytestmark = pytest.mark.skipif(operations() is None, reason="needs a C++ compiler")


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(
    heads=st.integers(1, 3), group=st.sampled_from([1, 2, 3, 8, 200]), tokens=st.integers(1, 150),
    before=st.integers(0, 300), dim=st.sampled_from([16, 32, 48, 64, 80, 128]),
    causal=st.booleans(), windows=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, INT8, INT4]),
    count=st.integers(1, 3), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_it_is_attention(
    heads: int, group: int, tokens: int, before: int, dim: int, causal: bool, windows: bool,
    dtype: torch.dtype, count: int, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    keys = tokens + before

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # As a model and a cache have them: other tokens' heads, and other places, lie between.
    q = normal(tokens, heads, group, dim).permute(1, 2, 0, 3)
    both = [normal(heads, keys + 7, dim)[:, 3 : keys + 3] for _ in "kv"]
    coded = has_scale(dtype)
    k, v = (unpacked(quantize(x, dtype).packed()) if coded else x.to(dtype) for x in both)
    if isinstance(k, Codes) and not takes_windows(q, k):
        assert dim % 32
        return
    j, first = torch.arange(keys), torch.zeros(tokens, dtype=torch.int64)
    if windows:  # which begin in the queries' order, at times after the query's own key
        first = torch.randint(0, keys + 1, (tokens,), generator=generator).sort().values
    seen = j >= first.unsqueeze(1)
    if causal:
        seen &= j <= before + torch.arange(tokens).unsqueeze(1)
    with threads(count):
        got = many_cpu.attend(q, k, v, 0.2, causal, first=first if windows else None)
    want = Partial(*literal_attention(q, *(x.to(torch.float32) for x in (k, v)), seen, 0.2))
    # With codes a query is off by 2^-16 of its largest number, 4, in each dimension: its
    # scores by 0.2 * 4 * 2^-16 * 128 at most if all errors pull the same way.
    bound = 5e-4 if coded else 1e-5
    assert_close(got, want, atol=bound, rtol=bound)
    assert (got.out[(got.lse == -math.inf)] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, INT8, INT4])
def test_scores_beyond_reason_and_numbers_that_are_none(dtype: torch.dtype) -> None:
    """A hundred times what float32's exponential holds; one NaN spoils its own row or head."""
    q, k, v = torch.randn(2, 3, 40, 64), torch.randn(2, 90, 64), torch.randn(2, 90, 64)

    def kept(x: Tensor) -> Tensor | Codes:
        return quantize(x, dtype) if has_scale(dtype) else x

    seen = torch.ones(40, 90, dtype=torch.bool)
    got = many_cpu.attend(1000 * q, kept(k), kept(v), 1.0, False)
    _, want = literal_attention(1000 * q, *(kept(x).to(torch.float32) for x in (k, v)), seen, 1.0)
    assert got.out.isfinite().all()
    torch.testing.assert_close(got.lse.double(), want, rtol=1e-4, atol=0)
    q[0, 1, 7, 3] = math.nan
    k[1, 50, 9] = math.nan
    got = many_cpu.attend(q, kept(k), kept(v), 1.0, False)
    bad = torch.zeros(2, 3, 40, dtype=torch.bool)
    bad[0, 1, 7] = bad[1] = True
    assert torch.equal(got.out.isnan().any(-1), bad)


def test_it_serves_what_it_can_read() -> None:
    q, k, v = torch.randn(2, 3, 40, 64), torch.randn(2, 90, 64), torch.randn(2, 90, 64)

    def supports(q: Tensor, k: Tensor = k, v: Tensor = v, biased: bool = False) -> bool:
        return many_cpu.supports(q, k, v, False, biased)

    assert supports(q) and takes_windows(q, k)
    assert not supports(q[:, :, :16])  # few: the keys are shared out instead
    assert not supports(q[..., :24])
    assert not supports(q, biased=True)
    assert not supports(q, v=v.half())
    assert not supports(q.requires_grad_())
    assert not takes_windows(q.detach(), k.half())
    q = q.detach()
    for kept in (k.half(), k.double()):  # which are converted
        found = attend(q, kept, v.to(kept.dtype), scale=0.2)
        want = attend(q, k, v, scale=0.2, backend="reference")
        torch.testing.assert_close(found.out, want.out, atol=2e-3, rtol=0)
    with_gradient = attend(q, k.requires_grad_(), v, scale=0.2)
    assert with_gradient.out.requires_grad
    k = k.detach()
    with pytest.raises(RuntimeError, match="do not go with keys"):
        many_cpu.attend(q, k, v[:, :3], 0.2, False)
    nothing = attend_windows(q[:0], k[:0], v[:0], torch.zeros(40, dtype=torch.int64), scale=1.0)
    assert nothing.out.shape == (0, 3, 40, 64)
    with pytest.raises(RuntimeError, match="a beginning must be there for every query"):
        attend_windows(q, k, v, torch.zeros(39, dtype=torch.int64), scale=1.0)
