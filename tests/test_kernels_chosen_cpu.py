"""The kernels for chosen blocks on a CPU compute the definition, however keys are dealt."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from razor_dist.evals.selection import SELECTORS, attend_selected
from razor_dist.kernels import chosen, merge
from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import KeysOrValues, quantize
from razor_dist.parallel.zigzag import Chunk
from tests.test_kernels_decode import Largest


def _shards(n: int, ways: int) -> list[list[range]]:
    """A text of n tokens over so many ranks: a chunk, and answers dealt by position."""
    chunk = Chunk(0, max(1, n * 3 // 4), ways)
    return [
        [*chunk.ranges(rank), range(chunk.end + (rank - chunk.end) % ways, n, ways)]
        for rank in range(ways)
    ]


def _attention(
    q: Tensor, k: KeysOrValues, v: KeysOrValues, share: float, slow: Tensor, ways: int, cut: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention by the kernels of keys that are cut; estimates and choice with it."""
    n = k.shape[1]
    at = torch.arange(n - q.shape[2], n)
    held = []
    for runs in _shards(n, ways):
        shard = chosen.Shard.of(runs, n, torch.device("cpu"))
        held += [
            (
                k[:, shard.places[i : i + cut]],
                v[:, shard.places[i : i + cut]],
                shard.cut(i, i + cut),
            )
            for i in range(0, len(shard.places), cut)
        ]
    slower = q[..., slow]
    estimate = torch.stack([chosen.largest(slower, k, slow, s, at) for k, _, s in held]).amax(0)

    def attend(read: Tensor) -> Partial:
        return merge([chosen.attend_chosen(q, k, v, read, s, at, scale=1.0) for k, v, s in held])

    fixed = chosen.fixed(at, chosen.blocks_of(n)).expand(len(q), -1, -1)
    first = attend(fixed)
    found = chosen.choose(share, estimate, first.lse)
    assert not (found & fixed).any()
    return merge([first, attend(found)]).out, estimate, found | fixed


def test_keys_that_are_not_read_are_not_converted() -> None:
    """Without compiled operations, of a long shard of 8-bit keys."""
    n, dim = 5 * 4096, 32
    k, v, q = torch.randn(3, 2, n, dim, generator=torch.Generator().manual_seed(0))
    at = torch.arange(n - 3, n)
    shard = chosen.Shard.of([range(n)], n, torch.device("cpu"))
    read = chosen.fixed(at, chosen.blocks_of(n)).expand(2, -1, -1)
    codes, of = (quantize(k), quantize(v)), (read, shard, at)
    with mock.patch.object(chosen, "operations", lambda: None):
        numbers = (x.to(torch.float32) for x in codes)
        want = chosen.attend_chosen(q[:, :3].unsqueeze(1), *numbers, *of, scale=0.2)
        with Largest() as seen:
            found = chosen.attend_chosen(q[:, :3].unsqueeze(1), *codes, *of, scale=0.2)
    torch.testing.assert_close(found.out, want.out, rtol=0, atol=1e-6)
    assert seen.numbers < 8 * chosen.BLOCK * dim


@settings(max_examples=25, deadline=None)
@given(
    group=st.integers(1, 3), dim=st.sampled_from([16, 32, 64]), n=st.integers(1, 1500),
    queries=st.integers(1, 200), share=st.sampled_from([1 / 8, 1 / 64, 1e-30, 0.99]),
    ways=st.sampled_from([1, 2, 3]), cut=st.sampled_from([2000, 333]),
    sharpness=st.sampled_from([0.3, 1.0]), kind=st.sampled_from(["fp32", "bf16", "int8"]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_kernels_compute_the_definition(
    group: int, dim: int, n: int, queries: int, share: float, ways: int, cut: int,
    sharpness: float, kind: str, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    queries = min(queries, n)
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((2, group, queries, dim), (2, n, dim), (2, n, dim))
    )
    q, slow = q * sharpness, torch.arange(dim // 2) * 2
    if kind == "bf16":
        k, v = k.bfloat16(), v.bfloat16()
    keys, values = (quantize(k), quantize(v)) if kind == "int8" else (k, v)
    out, estimate, read = _attention(q, keys, values, share, slow, ways, cut)
    with mock.patch.object(chosen, "operations", lambda: None):
        plain, of_torch, read_plain = _attention(q, keys, values, share, slow, 1, n)
    # Whole numbers are multiplied, so that these are the same bits however keys are dealt.
    assert torch.equal(estimate, of_torch)
    if not torch.equal(read, read_plain):  # one is at the border, where masses round
        return
    bound = 2e-3 if kind == "int8" else 3e-5
    torch.testing.assert_close(out, plain, rtol=0, atol=bound)
    if kind != "int8":
        seen = torch.arange(read.shape[1]).unsqueeze(-1) * chosen.BLOCK <= torch.arange(
            n - queries, n
        )
        for head in range(2):
            own_q, own_k, own_v = (x[head].double() for x in (q, k, v))
            want, blocks = attend_selected(own_q, own_k, own_v, share, SELECTORS["slower"], slow)
            if torch.equal((read[head] & seen).T, blocks):
                torch.testing.assert_close(out[head].double(), want, rtol=0, atol=3e-5)
            else:  # at most a border
                assert (blocks != (read[head] & seen).T).float().mean() < 1e-3
