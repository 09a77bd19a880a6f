"""Every family of models on two ranks: stock transformers' logits, and the literal definition's.

The families of `tests/test_invariance.py` are tested there, at every number of ranks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import test_invariance
from tests.cases import Case, all_full, logits_of
from tests.ranks import Ranks
from tests.stock import literal_logits
from tests.test_invariance import GROWING, LITERAL, assert_same, split_of, tokens_of
from tests.tiny_models import FAMILIES, Tiny

OTHERS = [family for family in FAMILIES if family not in test_invariance.FAMILIES]


def stock_logits(path: Path, tokens: tuple[int, ...]) -> Tensor:
    """Logits ``[N, V]`` of stock transformers: eager, since sdpa would run an op that ours may."""
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = stock(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("family", OTHERS)
def test_all_heads_full_is_stock_transformers(family: str, ranks: Ranks, tiny: Tiny) -> None:
    n, k = 150, 4
    tokens, path = tokens_of(n + k, seed=1), tiny(family)
    case = Case(str(path), all_full(path), GROWING, tokens[:n], tokens[n:], chunked_prefill_size=64)
    assert_same(ranks(2).run(logits_of, case)[0], stock_logits(path, tokens)[n - 1 :])


@pytest.mark.parametrize("family", OTHERS)
def test_local_heads_are_the_literal_definition(family: str, ranks: Ranks, tiny: Tiny) -> None:
    n, k = 120, 4
    tokens, path = tokens_of(n + k, seed=2), tiny(family)
    split = split_of(path)
    want = literal_logits(str(path), list(tokens), split, LITERAL)[n - 1 :]
    case = Case(str(path), split, GROWING, tokens[:n], tokens[n:], chunked_prefill_size=50)
    assert_same(ranks(2).run(logits_of, case)[0], want)
    full = dataclasses.replace(case, retrieval=tuple((True,) * len(row) for row in split))
    assert not torch.allclose(ranks(2).run(logits_of, full)[0], want, rtol=1e-3, atol=1e-3)
