"""Keys and values in another dtype than the model computes in: rounded once, and half the bytes."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import build_engine
from razor_dist.engine.capacity import streaming_dtype
from razor_dist.kernels import decode_torch
from razor_dist.kernels.decode import Pages
from razor_dist.kernels.quantized import INT4, INT8, quantize
from razor_dist.parallel.comm import Communicator
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.memory import DryRun
from tests.cases import Case, answer, make_runner, prefill
from tests.logits import POLICY, split_of, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny

ULP = 2.0**-8  # bf16 keeps 8 significant bits: a number moves by half of this, relatively, at most


def case_of(path: Path, tokens: tuple[int, ...], prompt: int, **settings: Any) -> Case:
    """A prompt of ``prompt`` tokens; the others are forced one after the other."""
    settings = {"retrieval": split_of(path), "policy": POLICY, **settings}
    return Case(str(path), prompt=tokens[:prompt], forced=tokens[prompt:], **settings)


def rounded(dtype: torch.dtype, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return new keys and values as codes hold them."""
    return tuple(quantize(x, dtype).to(x.dtype) for x in new)


def store_rounded(
    dtype: torch.dtype,
    k: torch.Tensor,
    v: torch.Tensor,
    order: torch.Tensor,
    pages: Pages | None,
    *windows: Any,
) -> None:
    """`decode_torch.store` of retrieval keys and values as codes hold them."""
    if pages is not None:
        of = order[: len(pages.k)]
        k, v = (x.index_copy(0, of, *rounded(dtype, x[of])) for x in (k, v))
    decode_torch.store(k, v, order, pages, *windows)


def outcome(
    comm: Communicator, case: Case, codes: torch.dtype | None = None
) -> tuple[torch.Tensor | None, dict[str, int], list[int]]:
    """Logits on rank 0, bytes sent by purpose, and bytes of the caches' keys and values.

    With ``codes``, retrieval keys and values become what these hold of them, by the plain way.
    """
    runner = make_runner(comm, case)
    comm.bytes_sent.clear()
    with ExitStack() as patches:
        if codes is not None:
            stored = partial(rounded, codes)
            patches.enter_context(patch.object(runner.caches.pages, "stored", stored))
            # Keys are rounded once they are rotated, so they have to come rotated.
            store = partial(store_rounded, codes)
            kernels = Mock(wraps=decode_torch, store=store, ROTATES=False)
            where = "razor_dist.attention.decode.implementation"
            patches.enter_context(patch(where, return_value=kernels))
        rows = [prefill(runner, 0, case)]
        for token in case.forced:
            rows.append(runner.execute(answer((0, token))))
    caches = runner.caches
    pools = [caches.pages, *caches.streaming, *([caches.scratch] if caches.scratch else [])]
    kept = [pool.k.nbytes + pool.v.nbytes for pool in pools]
    dtypes = {case.kv_dtype, streaming_dtype(case.kv_dtype, case.dtype)}
    assert {pool.k.dtype for pool in pools} == dtypes
    logits = torch.cat([row for row in rows if row is not None]) if comm.rank == 0 else None
    return logits, dict(comm.bytes_sent), kept


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("world", [1, 4])
def test_bf16_keys_and_values_are_half_the_bytes_and_move_logits_by_their_rounding(
    world: int, exact: bool, ranks: Ranks, tiny: Tiny
) -> None:
    path = tiny("glm")
    full = case_of(path, tokens_of(185), 180, chunked_prefill_size=64, exact=exact)
    half = dataclasses.replace(full, kv_dtype=torch.bfloat16)
    want, sent, kept = ranks(world).run(outcome, full)[0]
    got, sent_half, kept_half = ranks(world).run(outcome, half)[0]
    error = (got - want).abs().max() / want.abs().max()
    # Every key and value moves by ULP / 2 at most, in three layers; scores are of the order of 10.
    assert 1e-5 < error < 3 * ULP
    assert kept_half == [n // 2 for n in kept]
    # What is not keys and values travels in float32 still.
    assert {p for p in sent if sent[p] != sent_half[p]} <= {"ring", "halo", "sinks"}
    for purpose in {"halo", "sinks"} & sent.keys():
        assert sent_half[purpose] * 2 == sent[purpose]
    if world > 1:
        # Of queries and partial results, which travel too, nothing changes.
        assert sent["ring"] / 2 <= sent_half["ring"] < sent["ring"]


def test_bf16_keys_and_values_do_not_break_invariance(ranks: Ranks, tiny: Tiny) -> None:
    """Ranks and cuts order the fp32 sums differently, which can turn a rounding now and then."""
    path = tiny("llama")
    base = case_of(path, tokens_of(150, seed=5), 145, kv_dtype=torch.bfloat16)
    want = ranks(1).run(outcome, base)[0][0]
    for world, cut in ((1, 37), (4, 64), (4, 8192)):
        got = ranks(world).run(outcome, dataclasses.replace(base, chunked_prefill_size=cut))[0][0]
        assert (got - want).abs().max() / want.abs().max() < ULP / 2
        assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("world", [1, 3])
def test_prefill_and_decode_see_the_same_bf16_cache(world: int, ranks: Ranks, tiny: Tiny) -> None:
    """The compensation token, too, is what the cache holds, whichever phase makes it.

    A sum in another order turns a rounding now and then, so errors are like one rounded key, up to
    6e-4. A compensation token in float32 at one phase makes all of them 2e-3 and more.
    """
    path = tiny("llama")
    tokens = tokens_of(190, seed=1)
    decoded = case_of(path, tokens, 140, kv_dtype=torch.bfloat16)
    rows = ranks(world).run(outcome, decoded)[0][0]
    errors = []
    for count in range(145, 190, 5):
        whole = dataclasses.replace(decoded, prompt=tokens[:count], forced=())
        want = ranks(world).run(outcome, whole)[0][0]
        errors.append((rows[count - 140] - want[0]).abs().max())
    assert torch.stack(errors).median() < 1e-3


@pytest.mark.parametrize(
    ("world", "family", "exact", "codes"),
    [
        (1, "llama", False, INT8),
        (2, "glm", True, INT8),
        (4, "llama", False, INT8),
        (2, "bloom", False, INT8),
        (1, "bloom", False, INT4),
        (2, "llama", False, INT4),
        (4, "glm", True, INT4),
    ],
)
def test_codes_are_attention_to_what_they_hold(
    world: int,
    family: str,
    exact: bool,
    codes: torch.dtype,
    ranks: Ranks,
    tiny: Tiny,
) -> None:
    """In one layer alone: where a sum in another order turns a code, later layers turn many."""
    path = tiny(family)
    heads, *others = split_of(path)
    settings = {
        "retrieval": ((True,) * len(heads), *((False,) * len(heads) for _ in others)),
        "chunked_prefill_size": 64,
        "exact": exact,
    }
    reference = case_of(path, tokens_of(165, seed=3), 150, **settings)
    case = dataclasses.replace(reference, kv_dtype=codes)
    want, plain = (ranks(1).run(outcome, reference, of)[0] for of in (codes, None))
    got = ranks(world).run(outcome, case)[0]
    largest = want[0].abs().max()
    assert (got[0] - want[0]).abs().max() < 1e-4 * largest
    assert (plain[0] - want[0]).abs().max() > 5e-4 * largest
    if world > 1:
        sent = ranks(world).run(outcome, reference)[0][1]
        changed = {purpose for purpose in sent if got[1][purpose] != sent[purpose]}
        assert changed == {"ring"}
        # What travels of D dimensions is D + 4 or D / 2 + 4 bytes, not 4 D; queries and results
        # are float32.
        assert sent["ring"] / (4 if codes == INT8 else 8) < got[1]["ring"] < sent["ring"]


@pytest.mark.parametrize(("kv_dtype", "width"), [("int8", 64 + 4), ("int4", 32 + 4)])
def test_codes_are_a_quarter_and_an_eighth_of_the_bytes(kv_dtype: str, width: int) -> None:
    full, small = (
        Deployment.of(EngineConfig(model="smollm2", kv_dtype=dtype), "cpu")
        for dtype in ("fp32", kv_dtype)
    )
    held = [DryRun(d).caches(8192, 7000) for d in (full, small)]
    for name in ("sequence_retrieval_kv", "retrieval_kv"):
        assert held[1][name] * 256 == held[0][name] * width
    assert held[1]["streaming_cache"] == held[0]["streaming_cache"]
    assert small.full_kv_bytes == full.full_kv_bytes * width // 256


def engine(path: Path, **settings: object) -> torch.dtype:
    config = EngineConfig(model=str(path), attention="full", max_model_len=64, **settings)
    built = build_engine(config, Communicator(None), torch.device("cpu"))
    return built.runner.caches.pages.k.dtype


def test_the_setting_is_honoured_and_what_it_costs_is_said(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny("llama")
    assert engine(path) == engine(path, dtype="fp32", kv_dtype="fp32") == torch.float32
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        with patch("razor_dist.engine.device.available", return_value=False):
            assert engine(path, kv_dtype="bf16") == torch.bfloat16
        assert "kept in bf16 on cpu" in caplog.records[-1].message
        assert engine(path, dtype="bf16") == torch.bfloat16
        assert engine(path, dtype="bf16", kv_dtype="fp32") == torch.float32
        assert "twice the memory" in caplog.records[-1].message


def test_the_package_ring_wants_one_dtype() -> None:
    from razor_dist.engine.device import ring_of

    config = EngineConfig(ring="ring_flash_attn", kv_dtype="fp32")
    with pytest.raises(ConfigError, match="dtype of the queries; set kv_dtype: auto"):
        ring_of(config, torch.device("cuda"), torch.bfloat16, torch.float32)
