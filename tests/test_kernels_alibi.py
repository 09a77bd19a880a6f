"""Attention biased by distance against its definition in float64, near and far."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from razor_dist.kernels import HIDDEN, Partial, alibi, attend, merge, torch_cpu
from razor_dist.kernels.alibi import (
    BLOCK,
    Distance,
    Places,
    digits_of,
    distance_bias,
    widened,
)
from razor_dist.kernels.query import Query
from tests.literal import literal_attention
from tests.partials import assert_close, draw

SLOPES = torch.tensor([[0.84, 0.3], [0.1, 0.05], [0.01, 0.004]])


def literal(
    q: Tensor, k: Tensor, v: Tensor, scale: float, queries: Tensor, keys: Tensor, causal: bool
) -> Partial:
    away = keys - queries[:, None]
    seen = away <= 0 if causal else torch.ones(away.shape, dtype=torch.bool)
    bias = SLOPES.double()[:, :, None, None] * away
    return Partial(*literal_attention(q, k, v, seen, scale, bias))


def places(runs: list[range]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


@pytest.mark.parametrize("backend", ["reference", "torch_cpu"])
@pytest.mark.parametrize("at", [0, 1_000_000])
def test_alibi_is_its_definition(backend: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of two runs, longer than a block; errors do not grow with the position."""
    runs = [range(at, at + 300), range(at + 700, at + 700 + BLOCK)]
    own = places(runs)
    q, k, v = draw(3, 2, len(own), len(own))
    monkeypatch.setattr(alibi, "attend", functools.partial(attend, backend=backend))
    got = Query(q, 0.25, SLOPES).attend(k, v, causal=True, where=Places(runs, own))
    want = literal(q, k, v, 0.25, own, own, True)
    torch.testing.assert_close(got.out, want.out.float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(got.lse, want.lse.float(), atol=1e-4, rtol=1e-6)


def test_partials_of_any_segments_merge_to_the_whole() -> None:
    near, far = torch.arange(900_000, 900_100), torch.randperm(500)
    keys = torch.cat([far, near])
    runs = [range(900_100, 900_104)]
    q, k, v = draw(3, 2, 4, len(keys))
    parts = [
        Query(q, 0.25, SLOPES).attend(k[:, span], v[:, span], where=Places(runs, keys[span]))
        for span in (slice(0, 200), slice(200, 510), slice(510, 600))
    ]
    want = literal(q, k, v, 0.25, places(runs), keys, False)
    torch.testing.assert_close(merge(parts).out, want.out.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(merge(parts).lse, want.lse.float(), atol=1e-5, rtol=1e-6)


def test_positions_from_the_beginning_would_not_do() -> None:
    """Why queries have references of their own: what rounding makes of slope * j at a million."""
    at = 1_000_000
    keys, runs = torch.arange(at - 50, at), [range(at, at + 1)]
    q, k, v = draw(3, 2, 1, 50)
    want = literal(q, k, v, 0.25, places(runs), keys, False)
    naive = attend(q, k, v, scale=0.25, bias=distance_bias(SLOPES, keys.float()))
    ours = Query(q, 0.25, SLOPES).attend(k, v, where=Places(runs, keys))
    errors = [float((p.out - want.out).abs().max()) for p in (naive, ours)]
    assert errors[0] > 1e-3 and errors[1] < 1e-6


@pytest.mark.parametrize("keys", [77, 3000])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_a_bias_per_head(keys: int, queries: int) -> None:
    """As decode has it, folded and cut into parts, or not; what is hidden stays hidden."""
    q, k, v = draw(3, 2, queries, keys)
    bias = distance_bias(SLOPES, torch.arange(-keys, 0.0))
    bias[:, :, : keys // 2] = HIDDEN
    got = attend(q, k, v, scale=0.25, bias=bias, backend="torch_cpu")
    want = attend(q, k[:, keys // 2 :], v[:, keys // 2 :], scale=0.25,
                  bias=bias[:, :, keys // 2 :], backend="reference")  # fmt: skip
    assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_widened_heads_carry_the_distance_in_bfloat16() -> None:
    """The input of CUDA's kernels: the digits and both parts of the slope are needed."""
    q, k, v = (x.bfloat16() for x in draw(3, 2, 40, 5000, dim=64))
    queries, keys = torch.full((40,), 70_000), torch.arange(65_000, 70_000)
    wide = widened(q, k, v, 0.125, SLOPES, digits_of((keys - 70_000).float()))
    assert wide[0].shape[-1] == 72
    exact = (x.float() for x in wide)
    got = attend(*exact, scale=0.125, backend="reference")
    want = literal(q, k, v, 0.125, queries, keys, False)
    torch.testing.assert_close(got.out[..., :64], want.out.float(), atol=1e-4, rtol=0)
    assert not got.out[..., 64:].any()
    torch.testing.assert_close(got.lse, want.lse.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digits_hold_any_distance(dtype: torch.dtype) -> None:
    """Whole ones up to 2**24, and a compensation token's, which may be a half."""
    drawn = torch.randint(-(2**24) + 1, 2**24, (2000,), generator=torch.Generator().manual_seed(0))
    far = torch.cat([drawn.float(), torch.tensor([0.0, -255.5, 256.0, -65535.5, 2.0**23 - 0.5])])
    digits = digits_of(far).to(dtype)
    places = torch.tensor([65536.0, 256.0, 1.0, 1 / 256]).repeat_interleave(2)
    assert torch.equal((digits.double() * places).sum(-1) / 2, far.double())


def test_decode_in_bfloat16_a_million_tokens_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where a mask is rounded: the distance as dimensions, and no mask."""
    at, count = 1_000_000, 4000
    keys = torch.cat([torch.arange(100), torch.arange(at - count, at)])
    q, k, v = (x.bfloat16() for x in draw(3, 2, 1, len(keys), dim=64))
    want = literal(q, k, v, 0.125, torch.tensor([at]), keys, False)
    calls = []

    def rounding(
        q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
    ) -> Partial:
        """The op in float32, but for the mask."""
        calls.append((k.shape[1], bias is not None))
        rounded = None if bias is None else bias.to(q.dtype).float()
        return attend(q, k, v, scale=scale, bias=rounded, backend="reference")

    monkeypatch.setattr(torch_cpu, "attend", rounding)
    monkeypatch.setattr(alibi, "WIDENED_KEYS", 1000)
    errors = []
    for digits in (True, False):
        monkeypatch.setattr(alibi, "needs_digits", lambda *_, digits=digits: digits)
        away = Distance.of((keys - at).float(), q.dtype)
        got = Query(q, 0.125, SLOPES).attend(k, v, where=away)
        errors.append(float((got.lse - want.lse).abs().max()))
        if digits:
            torch.testing.assert_close(got.out, want.out.float(), atol=1e-4, rtol=0)
    assert errors[0] < 1e-5 and errors[1] > 1e-4
    # No more keys at a time than are to be copied; without digits nothing is, and there is a mask.
    assert calls == [(1000, False)] * 4 + [(100, False), (4100, True)]


def test_no_keys_are_no_attention() -> None:
    q, k, v = draw(3, 2, 1, 4)
    nowhere = Places([range(4, 5)], torch.arange(0))
    got = Query(q, 1.0, SLOPES).attend(k[:, :0], v[:, :0], where=nowhere)
    assert (got.lse == -torch.inf).all()
    assert not got.out.any()
