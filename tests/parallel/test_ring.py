"""Our ring against the package ring-flash-attn, and against unsharded attention."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from razor_dist import kernels
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import ring_of
from razor_dist.kernels import attend, torch_cuda
from razor_dist.kernels.query import Query
from razor_dist.parallel import ring as ring_module
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import Earlier
from razor_dist.parallel.ring import ring_attention
from razor_dist.parallel.ring_flash import ring_flash_attention, serves
from razor_dist.parallel.silent import SilentCommunicator
from razor_dist.parallel.zigzag import Chunk
from tests.engine.simulated_prefill import on_eight_h200
from tests.literal import literal_attention
from tests.partials import CudaOps
from tests.ranks import Ranks

HEADS, GROUP, DIM, TOKENS = 2, 3, 16, 96


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(HEADS, GROUP, TOKENS, DIM, generator=generator)
    k, v = (torch.randn(HEADS, TOKENS, DIM, generator=generator) for _ in range(2))
    return q, k, v


def flash_attn_stand_in() -> None:
    """A `flash_attn` whose forward is the reference, with the package's layout and lse."""

    def forward(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        heads = k.shape[2]
        grouped = q[0].transpose(0, 1).unflatten(0, (heads, -1))
        partial = attend(
            grouped, k[0].transpose(0, 1), v[0].transpose(0, 1), scale=softmax_scale,
            causal=causal, backend="reference",
        )  # fmt: skip
        return (
            partial.out.flatten(0, 1).transpose(0, 1)[None],
            partial.lse.flatten(0, 1)[None],
            0,
            0,
        )

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    interface._flash_attn_forward, interface._flash_attn_backward = forward, None
    sys.modules["flash_attn"] = package
    sys.modules["flash_attn.flash_attn_interface"] = interface


def both_rings(
    comm: Communicator, tokens: int, short: int
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """This rank's rows by our ring and by the package's, and what each sent."""
    flash_attn_stand_in()
    chunk = Chunk(0, tokens, comm.size)
    rows = [p for chunk in chunk.owned(comm.rank) for p in range(chunk.begin, chunk.end)]
    q, k, v = inputs()
    q, k, v = q[:, :, rows], k[:, rows], v[:, rows]
    nothing = Earlier((), [0] * comm.size)
    assert serves(comm, chunk, nothing, 8) == (comm.size > 1 and tokens % (2 * comm.size) == 0)
    results, sent = [], []
    for ring in (ring_attention, ring_flash_attention):
        comm.bytes_sent.clear()
        with patch.object(ring_module, "_SHORT", short):
            results.append(ring(comm, chunk, Query(q, 0.25), k, v, nothing))
        sent.append(comm.bytes_sent["ring"])
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        del sys.modules[name]
    return results[0], results[1], sent[0], sent[1]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [TOKENS, 90])
@pytest.mark.parametrize("short", [0, TOKENS], ids=["ring", "gathered"])
def test_our_ring_is_the_packages_ring_and_unsharded_attention(
    world: int, tokens: int, short: int, ranks: Ranks
) -> None:
    q, k, v = inputs()
    q, k, v = q[:, :, :tokens], k[:, :tokens], v[:, :tokens]
    want = attend(q, k, v, scale=0.25, causal=True, backend="reference").out
    chunk = Chunk(0, tokens, world)
    for rank, (ours, theirs, sent, their_sent) in enumerate(
        ranks(world).run(both_rings, tokens, short)
    ):
        rows = [p for chunk in chunk.owned(rank) for p in range(chunk.begin, chunk.end)]
        torch.testing.assert_close(ours, want[:, :, rows], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(theirs, want[:, :, rows], atol=2e-6, rtol=1e-5)
        assert sent == their_sent


def after_others(
    comm: Communicator, earlier: int, short: int, slopes: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """This rank's rows of a chunk after ``earlier`` tokens, and the bytes that it sent."""
    size, rank = comm.size, comm.rank
    before, chunk = Chunk(0, earlier, size), Chunk(earlier, TOKENS, size)
    q, k, v = inputs()
    held = [[p for run in before.ranges(r) for p in run] for r in range(size)]
    # In two segments, as a pool may hold them.
    half = len(held[rank]) // 2
    segments = [(k[:, at], v[:, at]) for at in (held[rank][:half], held[rank][half:])]
    positions = [torch.tensor(at) for at in held] if slopes is not None else []
    seen = Earlier(segments, [len(at) for at in held], positions)
    rows = [p for run in chunk.ranges(rank) for p in run]
    query = Query(q[:, :, rows], 0.25, slopes)
    comm.bytes_sent.clear()
    with patch.object(ring_module, "_SHORT", short):
        out = ring_attention(comm, chunk, query, k[:, rows], v[:, rows], seen)
    return out, comm.bytes_sent["ring"]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("earlier", [16, 83, 93])  # keys travel; queries do; fewer than shards
def test_earlier_chunks_are_seen_whole_whoever_holds_them(
    world: int, biased: bool, earlier: int, ranks: Ranks
) -> None:
    q, k, v = inputs()
    slopes = torch.rand(HEADS, GROUP, generator=torch.manual_seed(1)) if biased else None
    places = torch.arange(TOKENS)
    distance = (places - places[:, None]).double()
    bias = 0.0 if slopes is None else slopes.double()[..., None, None] * distance
    want = literal_attention(q, k, v, distance <= 0, 0.25, bias)[0].float()
    chunk, sent = Chunk(earlier, TOKENS, world), {}
    for short in (0, TOKENS):
        found = ranks(world).run(after_others, earlier, short, slopes)
        sent[short] = sum(nbytes for _, nbytes in found)
        for rank, (out, _) in enumerate(found):
            rows = [p for run in chunk.ranges(rank) for p in run]
            torch.testing.assert_close(out, want[:, :, rows], atol=3e-6, rtol=1e-5)
    assert sent[0] == sent[TOKENS]


def test_the_package_without_flash_attn_is_refused() -> None:
    config, dtype = EngineConfig(ring="ring_flash_attn"), torch.bfloat16
    with pytest.raises(ConfigError, match="flash-attn"):
        ring_of(config, torch.device("cuda"), dtype, dtype)
    assert ring_of(EngineConfig(), torch.device("cpu"), dtype, dtype) is ring_attention


@pytest.mark.long
@pytest.mark.parametrize(("answers", "share"), [(0, 0.7), (1, 0.6)])
def test_a_million_tokens_in_chunks_by_time_are_one_plan_of_cudnn(
    answers: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight ranks, of two KV heads in groups of eight: the scheduler's chunks round the ring.

    The rest is flash attention's.
    """
    plans, products = set(), {"cuDNN": 0, "flash": 0}

    def attended(name, q, k):
        products[name] += q.shape[:3].numel() * k.shape[2]
        return torch.empty_like(q)

    def cudnn(q, k, v, mask, with_lse, dropout=0.0, causal=False, debug=False, *, scale):
        plans.add(tuple((x.shape, x.stride()) for x in (q, k, v)))
        out = attended("cuDNN", q, k)
        return out, out.new_empty(*q.shape[:3], 1, dtype=torch.float32)

    def flash(q, k, v, dropout=0.0, causal=False, debug=False, *, scale):
        out = attended("flash", q, k)
        return out, out.new_empty(out.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: torch_cuda.CUDNN_ON)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
    monkeypatch.setattr(torch_cuda, "supports", lambda *given: True)
    monkeypatch.setattr(kernels, "BACKENDS", ("torch_cuda",))
    # Results without data: merging them takes two minutes and changes no shape.
    monkeypatch.setattr("razor_dist.kernels.partial._merge", lambda one, other: one)
    world, of = 8, {"dtype": torch.bfloat16, "device": "meta"}
    steps = on_eight_h200(1 << 20, answers)
    chunks = [Chunk(step.begin, step.end, world) for step in steps if step.sharded]
    assert len(chunks) > 4
    pool = torch.empty(2, 2, (1 << 20) // world + 64, 128, **of)
    for rank in (0, world - 1):
        comm, stored = SilentCommunicator(rank, world), [0] * world
        for chunk in chunks:
            q = torch.empty(2, 8, chunk.tokens(rank), 128, **of)
            k, v = torch.empty(2, 2, chunk.tokens(rank), 128, **of)
            segments = [pool[:, :, : stored[rank]].unbind()] if stored[rank] else []
            with CudaOps(cudnn=cudnn, flash=flash):
                found = ring_attention(
                    comm, chunk, Query(q, 0.1), k, v, Earlier(segments, [*stored])
                )
            assert found.shape == q.shape
            stored = [n + chunk.tokens(r) for r, n in enumerate(stored)]
    assert len(plans) == 1
    assert products["cuDNN"] >= share * (products["cuDNN"] + products["flash"])
