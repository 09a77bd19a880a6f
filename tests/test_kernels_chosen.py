"""Triton's kernels for chosen blocks: what they compute, interpreted, and what they compile to."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.kernels import chosen
from razor_dist.kernels.quantized import INT8, quantize
from tests.literal import literal_attention
from tests.triton_processes import Resources, resources

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "i8": INT8}


@dataclass(frozen=True)
class Blocks:
    """Queries at a text's end, and a shard of its keys."""

    heads: int = 2
    group: int = 3
    queries: int = 5
    dim: int = 64
    tokens: int = 1400
    kept: tuple[tuple[int, int], ...] = ((0, 1400),)  # runs of positions of the shard
    dtype: str = "fp32"  # of queries
    keys: str = "fp32"
    likely: float = 0.4  # that a query has chosen a block
    lists: int = 1 << 24  # entries of lists in memory

    def make(self, device: str) -> dict[str, Any]:
        """Return the arguments of both kernels by name, and all of the shard's keys in float64."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        where = torch.device(device)
        runs = [range(begin, min(end, self.tokens)) for begin, end in self.kept]
        shard = chosen.Shard.of(runs, self.tokens, where)
        # Views of what the projections give, and of pages.
        q = normal(self.queries, self.heads, self.group, 2 * self.dim)[..., : self.dim]
        q = q.permute(1, 2, 0, 3).to(where, DTYPES[self.dtype])
        slots = len(shard.places) + 9
        k, v = (normal(self.heads, slots, self.dim).to(where)[:, 7:-2] for _ in "kv")
        of_keys = [quantize(x) if self.keys == "i8" else x.to(DTYPES[self.keys]) for x in (k, v)]
        blocks = len(shard.edges) - 1
        picked = torch.rand(self.heads, blocks, self.queries, generator=generator) < self.likely
        positions = torch.arange(self.tokens - self.queries, self.tokens, device=where)
        slow = torch.randperm(self.dim, generator=generator)[: self.dim // 2].sort().values
        return {
            "q": q, "k": of_keys[0], "v": of_keys[1], "chosen": picked.to(where), "shard": shard,
            "positions": positions, "slow": slow.to(where),
        }  # fmt: skip


def literal(given: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, with a mask over all keys."""
    q, k, v = (given[name].to(torch.float64) for name in "qkv")
    places = given["shard"].places
    of_block = given["chosen"][:, places // chosen.BLOCK].transpose(1, 2).unsqueeze(1)
    seen = of_block & (places <= given["positions"].unsqueeze(-1))
    return literal_attention(q, k, v, seen, scale)


def errors(case: Blocks, device: str = "cpu") -> tuple[bool, float, float]:
    """Tell if the estimates are the definition's bits; largest errors of out and lse."""
    from razor_dist.kernels import chosen_triton

    given, scale = case.make(device), 0.3
    q = given["q"][..., given["slow"]].float() * scale
    of = q, given["k"], given["slow"], given["shard"], given["positions"]
    attended = {name: given[name] for name in ("q", "k", "v", "chosen", "shard", "positions")}
    with (
        mock.patch.object(chosen, "operations", lambda: None),
        mock.patch.object(chosen, "_triton", lambda device: None),
    ):
        want = chosen.largest(*of)
    same = torch.equal(chosen_triton.largest(*of), want)
    with mock.patch.object(chosen_triton, "_multiplies_floats", lambda device: True):
        same &= torch.equal(chosen_triton.largest(*of), want)
    with mock.patch.object(chosen_triton, "_LISTS", case.lists):
        out, lse = chosen_triton.attend_chosen(**attended, scale=scale)
    want, want_lse = literal(given, scale)
    assert torch.equal(lse.isfinite(), want_lse.isfinite())
    assert not out[~lse.isfinite()].any()
    error = (lse.double() - want_lse).nan_to_num().abs().max().item()
    return same, (out.double() - want).abs().max().item(), error


CASES = {
    "groups of three": Blocks(),
    "no groups": Blocks(group=1, heads=4, queries=70, dim=32, likely=0.2),
    "one query of sixteen heads": Blocks(group=16, heads=1, queries=1, dim=128, tokens=3000),
    "a chunk": Blocks(queries=70, likely=0.1),
    "a chunk in parts": Blocks(queries=70, likely=0.1, lists=50),
    "a shard of two runs": Blocks(kept=((0, 300), (901, 1400)), queries=40),
    "every third token": Blocks(kept=tuple((n, n + 1) for n in range(2, 1400, 3)), group=5),
    "nothing chosen": Blocks(likely=0.0),
    "a short text": Blocks(tokens=90, queries=3, kept=((0, 90),)),
    "bfloat16": Blocks(dtype="bf16", keys="bf16", dim=96, group=2, queries=33),
    "int8": Blocks(keys="i8", dim=128, group=2, queries=40),
    "int8, bfloat16 queries": Blocks(dtype="bf16", keys="i8", dim=64, queries=9),
    "wide heads": Blocks(dtype="bf16", keys="bf16", dim=256, group=2, heads=1, queries=20),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_definition(case: Blocks, interpreter: ProcessPoolExecutor) -> None:
    same, out, lse = interpreter.submit(errors, case).result(120)
    assert same and max(out, lse) < 5e-5


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    group=st.integers(1, 9), queries=st.integers(1, 70), dim=st.sampled_from([16, 24, 64, 80]),
    tokens=st.integers(150, 1700), begin=st.integers(0, 900), length=st.integers(1, 900),
    keys=st.sampled_from(["fp32", "i8"]), likely=st.sampled_from([0.05, 0.5, 1.0]),
)  # fmt: skip
def test_kernels_read_any_shard(
    group: int, queries: int, dim: int, tokens: int, begin: int, length: int, keys: str,
    likely: float, interpreter: ProcessPoolExecutor,
) -> None:  # fmt: skip
    begin = min(begin, tokens - 1)
    case = Blocks(
        1, group, min(queries, tokens), dim, tokens, ((begin, begin + length),), keys=keys,
        likely=likely,
    )  # fmt: skip
    same, out, lse = interpreter.submit(errors, case).result(120)
    assert same and max(out, lse) < 5e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_on_a_gpu_are_the_definition(case: Blocks, compiler: ProcessPoolExecutor) -> None:
    same, out, lse = compiler.submit(errors, case, "cuda").result(120)
    # Weights are rounded to the dtype of the queries.
    assert same and max(out, lse) < (3e-2 if case.dtype == "bf16" else 5e-5)


POINTERS = {
    **dict.fromkeys(["slow", "edges", "recent", "place", "position"], "*i64"),
    **dict.fromkeys(["listed", "count"], "*i32"),
    **dict.fromkeys(["out", "lse", "q_scale", "k_scale", "v_scale"], "*fp32"),
    **{"chosen": "*u8", "scale": "fp32"},
}


def compiled(
    kernel: str, capability: int, group: int, dim: int, queries: str, keys: str
) -> Resources:
    from razor_dist.kernels import chosen_triton

    types = POINTERS | {"q": f"*{queries}", "k": f"*{keys}", "v": f"*{keys}"}
    if kernel == "list_kernel":
        constants = {"T": 8, "BLOCKS": chosen_triton._LISTED}
    elif kernel == "largest_kernel":
        # As GPUs before Ampere.
        constants = chosen_triton.estimating(dim // 2, DTYPES[keys], floats=capability < 80)
        types["q"] = "*i8"
    else:
        constants = chosen_triton.attending(group, dim, DTYPES[queries], DTYPES[keys])
        constants["UPCAST"] = False
    return resources(kernel, capability, types, constants)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "group", "dim", "queries", "keys", "capabilities"),
    [
        ("largest_kernel", 8, 128, "bf16", "bf16", (80, 86, 89, 90)),
        ("largest_kernel", 8, 128, "bf16", "i8", (80, 90)),
        ("largest_kernel", 4, 256, "bf16", "bf16", (90,)),
        ("largest_kernel", 3, 64, "fp32", "fp32", (75, 90)),
        ("largest_kernel", 8, 128, "fp32", "i8", (75,)),
        ("list_kernel", 8, 128, "bf16", "bf16", (80, 90)),
        ("chosen_kernel", 8, 128, "bf16", "bf16", (80, 86, 89, 90)),
        ("chosen_kernel", 16, 128, "bf16", "bf16", (90,)),
        ("chosen_kernel", 8, 128, "bf16", "i8", (80, 89, 90)),
        ("chosen_kernel", 4, 256, "bf16", "bf16", (90,)),
        ("chosen_kernel", 3, 64, "fp32", "fp32", (80,)),
    ],
)
def test_kernels_compile_without_spills(
    kernel: str, group: int, dim: int, queries: str, keys: str, capabilities: tuple[int, ...],
    compiler: ProcessPoolExecutor,
) -> None:  # fmt: skip
    for capability in capabilities:
        call = compiler.submit(compiled, kernel, capability, group, dim, queries, keys)
        made = call.result(120)
        assert made.spilled == 0
        # Two programs fit a multiprocessor of an A100 (164 KB) and of an H100 (228 KB), and one
        # where there are 100 KB.
        assert made.shared <= 82 << 10
