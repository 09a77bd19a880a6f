"""Expected logits of a case: those of one rank, of stock transformers, or of a definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from razor_dist.cache.policy import StreamingPolicy
from tests.cases import Case, logits_of, model_and_shape
from tests.literal import causal, literal_attention, literal_head
from tests.ranks import Ranks

TOLERANCE = 1e-4
POLICY = StreamingPolicy(window_min=20, window_ratio=6, sinks=4, block=8)
# The window grows from 48 tokens on and is at its cap from 104 on.
GROWING = StreamingPolicy(window_min=12, window_ratio=4, window_max=26, sinks=4, block=8)


def tokens_of(count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 190, (count,), generator=generator).tolist())


def split_of(path: Path, seed: int = 0) -> tuple[tuple[bool, ...], ...]:
    """A random decision that has layers of one kind only, and mixed ones."""
    _, shape = model_and_shape(str(path))
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(shape.layers, shape.kv_heads, generator=generator) < 0.5).tolist()
    rows[0], rows[1] = [False] * shape.kv_heads, [True] + [False] * (shape.kv_heads - 1)
    return tuple(tuple(row) for row in rows)


def windows_of(split: tuple[tuple[bool, ...], ...]) -> tuple[tuple[int | None, ...], ...]:
    """Windows of the streaming heads, of two lengths: side by side in layers that all stream."""
    return tuple(
        tuple(None if kept else (12, 40)[(layer + head) % 2] for head, kept in enumerate(row))
        for layer, row in enumerate(split)
    )


def assert_same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    error = (got - want).abs().max() / want.abs().max()
    assert error <= TOLERANCE, f"relative error {error:.2e}"
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def assert_any_cut(
    ranks: Ranks, case: Case, want: Tensor, worlds: Seq[int], cuts: Seq[int] = ()
) -> None:
    """Assert the logits of a case for each number of ranks and each length of chunks.

    Without ``cuts`` chunks are as long as the case says.
    """
    for world in worlds:
        for cut in cuts or (case.chunked_prefill_size,):
            of = dataclasses.replace(case, chunked_prefill_size=cut)
            assert_same(ranks(world).run(logits_of, of)[0], want)


def stock_run(model: str | Path, tokens: Seq[int], attention: str = "eager", **given: Any) -> Any:
    """The output of transformers' own model. Eager, since sdpa runs an op that ours may run."""
    stock = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
    with torch.inference_mode():
        return stock(torch.tensor([tokens]), use_cache=False, **given)


def stock_logits(
    model: str | Path, tokens: Seq[int], attention: str = "eager", **given: Any
) -> Tensor:
    """float32 ``[N, V]``: transformers' own logits of every position."""
    logits: Tensor = stock_run(model, tokens, attention, **given).logits[0]
    return logits


def register(name: str, attend: Callable[..., Tensor]) -> None:
    """Define an attention of transformers, which computes each KV head in float64.

    ``attend(q, k, v, scaling, given)`` returns ``[G, N, D]`` of a KV head's queries ``[G, N, D]``;
    ``given`` has what the model was called with, and "layer" and "head".
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        scaling: float,
        **given: Any,
    ) -> tuple[Tensor, None]:
        queries = query[0].double().split(query.shape[1] // key.shape[1])
        outs = [
            attend(q, k, v, scaling, {**given, "layer": module.layer_idx, "head": head})
            for head, (q, k, v) in enumerate(
                zip(queries, key[0].double(), value[0].double(), strict=True)
            )
        ]
        return torch.cat(outs).to(query.dtype).transpose(0, 1).unsqueeze(0), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _literal_razor(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, given: dict[str, Any]
) -> Tensor:
    literal, layer, head = given["literal"], given["layer"], given["head"]
    if literal["retrieval"][layer][head]:
        return literal_attention(q, k, v, causal(len(k)), scaling)[0]
    if literal["windows"] is not None:
        minimum = literal["windows"][layer][head]
        literal = literal | {"window_min": minimum, "window_max": None, "window_ratio": None}
    return torch.stack([literal_head(of_one, k, v, scaling, literal) for of_one in q])


register("literal_razor", _literal_razor)


def literal_logits(
    model: str | Path,
    tokens: Seq[int],
    retrieval: Seq[Seq[bool]],
    policy: StreamingPolicy,
    windows: Seq[Seq[int | None]] | None = None,
) -> Tensor:
    """float32 ``[N, V]``: logits of every position with the literal attention."""
    literal = {**dataclasses.asdict(policy), "retrieval": retrieval, "windows": windows}
    return stock_logits(model, tokens, "literal_razor", literal=literal)
