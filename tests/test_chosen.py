"""Retrieval heads that read the blocks which their queries choose: `razor_dist.kernels.chosen`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.checks import check_settings
from razor_dist.evals.selection import SELECTORS, attend_selected
from razor_dist.kernels import chosen, merge
from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import KeysOrValues, quantize
from razor_dist.parallel.zigzag import Chunk
from tests.alibi_models import make_alibi
from tests.cases import Case, logits_of, model_and_shape
from tests.ranks import RankPool
from tests.test_invariance import POLICY, assert_same, split_of, tokens_of

Ranks = Callable[[int], RankPool]
Tiny = Callable[[str], Path]

SLOW = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])  # of 16 dimensions of a Llama
N, K = 1400, 6


def _by_blocks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: float
) -> tuple[Tensor, None]:
    group, outs = query.shape[1] // key.shape[1], []
    for q, k, v in zip(query[0].split(group), key[0], value[0], strict=True):
        q = (q * kwargs["scaling"]).double()
        out, _ = attend_selected(
            q, k.double(), v.double(), kwargs["share"], SELECTORS["slower"], SLOW
        )
        outs.append(out.to(query.dtype))
    return torch.cat(outs)[None].transpose(1, 2), None


AttentionInterface.register("by_blocks", _by_blocks)
AttentionMaskInterface.register("by_blocks", lambda *args, **kwargs: None)


def test_logits_are_those_of_stock_transformers_with_the_definition(
    ranks: Ranks, tiny: Tiny
) -> None:
    """For any number of ranks and any cut; the last tokens are answers, or of the prompt."""
    path, tokens, share = tiny("llama"), tokens_of(N + K), 1 / 300
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="by_blocks")
    with torch.inference_mode():
        want, full, none = (
            stock(torch.tensor([tokens]), use_cache=False, share=of).logits[0, N - 1 :]
            for of in (share, 1e-30, 0.99)
        )
    assert min((want - other).abs().max() for other in (full, none)) > 1e-3
    _, shape = model_and_shape(str(path))
    every = ((True,) * shape.kv_heads,) * shape.layers
    case = Case(str(path), every, POLICY, tokens[:N], tokens[N:], share=share)
    for world in (1, 2, 4, 8):
        for cut in (8192, 1000, 300):
            tensor = cut == 1000
            of = dataclasses.replace(case, chunked_prefill_size=cut, tensor=tensor)
            assert_same(ranks(world).run(logits_of, of)[0], want)
        whole = dataclasses.replace(case, prompt=tokens, forced=())
        assert_same(ranks(world).run(logits_of, whole)[0], want[-1:])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_beside_streaming_heads_and_in_8_bits(
    kv_dtype: torch.dtype, ranks: Ranks, tiny: Tiny
) -> None:
    path, tokens = tiny("glm"), tokens_of(N + K, seed=3)
    case = Case(
        str(path), split_of(path), POLICY, tokens[:N], tokens[N:], share=1 / 300, kv_dtype=kv_dtype
    )
    want = ranks(1).run(logits_of, case)[0]
    full = ranks(1).run(logits_of, dataclasses.replace(case, share=0.0))[0]
    assert (want - full).abs().max() > 1e-3
    for world, cut in ((1, 300), (2, 8192), (4, 300)):
        of = dataclasses.replace(case, chunked_prefill_size=cut, tensor=world == 2)
        got = ranks(world).run(logits_of, of)[0]
        if kv_dtype == torch.float32:
            assert_same(got, want)
        else:  # a number that is rounded the other way moves a key by a level
            torch.testing.assert_close(got, want, rtol=0, atol=5e-3)


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
        shard = chosen.Shard.of(runs, n)
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


def test_what_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    bloom = str(make_alibi("bloom", tmp_path / "bloom"))
    model = str(tiny("llama"))
    for settings_, message in (
        ({"model": bloom}, "is for models with rotary embeddings, and .*bloom has ALiBi"),
        ({"model": model, "kv_dtype": "int4"}, "kv_dtype: int4 mixes"),
        ({"model": model, "attention": "streaming"}, "attention: streaming there are none"),
    ):
        config = EngineConfig(**{"attention": "full", "retrieval_share": 0.1, **settings_})
        with pytest.raises(ConfigError, match=f"retrieval_share .*{message}"):
            check_settings(config, Path(config.model), torch.device("cpu"))
    config = EngineConfig(model=model, attention="full", retrieval_share="1/32")
    assert config.retrieval_share == 1 / 32
    with pytest.raises(ConfigError, match="retrieval_share is computed on cpu, and device is cuda"):
        check_settings(config, Path(model), torch.device("cuda"))
    for wrong in (1, -0.1, "1/0", "much", None):
        with pytest.raises(ConfigError, match="retrieval_share must be a number between 0 and 1"):
            EngineConfig(retrieval_share=wrong)
