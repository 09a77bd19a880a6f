"""Engine steps on a given prompt, for the tests' rank processes to run."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from razor_dist.attention.sources import QueryHeads
from razor_dist.cache.caches import CacheConfig
from razor_dist.cache.policy import StreamingPolicy
from razor_dist.cache.slots import Arena
from razor_dist.engine.capacity import streaming_dtype
from razor_dist.engine.decode_mode import DecodeMode
from razor_dist.engine.graph import Recorder
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.tensor_parallel import TensorParallel, is_compact
from razor_dist.heads.layout import HeadLayout, HeadShare
from razor_dist.kernels.chosen import BlockChoice
from razor_dist.models.loader import load_model
from razor_dist.models.shape import ModelShape
from razor_dist.models.slower_half import slower_half
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.sharding import shard_sizes
from razor_dist.parallel.zigzag import chunks
from razor_dist.protocol.step_plan import BatchEntry, Close, Compute, Open

# Models that compute a rank's part of short steps, as the last runner wants it.
_SHARED: dict[str, TensorParallel] = {}


@dataclass(frozen=True)
class Case:
    """One run of the engine.

    Attributes
    ----------
    model : str
        Model folder.
    retrieval : tuple of tuple of bool
        Per layer and KV head.
    prompt : tuple of int
        Prefilled in chunks of ``chunked_prefill_size``.
    forced : tuple of int
        Decoded one by one after it, whatever the model would have chosen.
    device : str
        Where the ranks compute; ranks on CUDA share its one device.
    dtype : torch.dtype
        Of weights and computing.
    kv_dtype : torch.dtype
        Of stored keys and values.
    windows : tuple of tuple of (int or None), optional
        Per layer and KV head, a streaming head's own window.
    tail : int
        Dropped tokens that streaming caches keep.
    tensor : bool
        Several ranks share short steps.
    share : float
        Of a query's mass, from which retrieval heads read a block of keys; 0: they read all.
    """

    model: str
    retrieval: tuple[tuple[bool, ...], ...]
    policy: StreamingPolicy
    prompt: tuple[int, ...]
    forced: tuple[int, ...] = ()
    chunked_prefill_size: int = 8192
    exact: bool = False
    page_size: int = 16
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    windows: tuple[tuple[int | None, ...], ...] | None = None
    tail: int = 0
    tensor: bool = False
    share: float = 0.0


@functools.cache
def model_and_shape(
    path: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, ModelShape]:
    """The model in a folder, loaded once per process."""
    model = load_model(path, device=torch.device(device), dtype=dtype)
    return model, ModelShape.from_config(model.config)


def all_full(path: str | Path) -> tuple[tuple[bool, ...], ...]:
    """The decision that every head of a model is a retrieval head."""
    _, shape = model_and_shape(str(path))
    return ((True,) * shape.kv_heads,) * shape.layers


def make_runner(
    comm: Communicator,
    case: Case,
    sequences: int = 1,
    recorder: Recorder | None = None,
    source_heads: QueryHeads = (),
) -> ModelRunner:
    """A runner with room for ``sequences`` sequences of the case's length."""
    model, shape = model_and_shape(case.model, case.device, case.dtype)
    n, total = len(case.prompt), len(case.prompt) + len(case.forced)
    longest = max(shard_sizes(0, n, total, comm.size))
    pages = (-(-longest // case.page_size) + 1) * sequences
    tensor, share = case.tensor and comm.size > 1, None
    if case.model in _SHARED:
        _SHARED.pop(case.model).remove()
    if tensor:
        share = HeadShare(comm.rank, comm.size, shape.group, is_compact(model))
    layout = HeadLayout.from_decision(
        case.retrieval, torch.device(case.device), case.windows, share
    )
    mode = DecodeMode(layout, TensorParallel(model, shape, layout, comm) if tensor else None)
    if mode.tensor is not None:
        _SHARED[case.model] = mode.tensor
    policies = [case.policy.with_window(window, alibi=shape.alibi) for window in layout.windows]
    cache = CacheConfig(
        tuple(Arena.of(policy, total, sequences, case.tail) for policy in policies),
        sequences,
        total,
        pages,
        case.page_size,
        pages if case.exact else 0,
        case.kv_dtype,
        streaming_dtype(case.kv_dtype, case.dtype),
    )
    runner = ModelRunner(model, mode, cache, comm, recorder=recorder, source_heads=source_heads)
    if case.share:
        runner.caches.choice = BlockChoice(case.share, slower_half(model, shape.head_dim))
    return runner


def answer(*tokens: tuple[int, int]) -> Compute:
    """A step that reads one token of each of some sequences: pairs (sequence, token)."""
    return Compute.of([BatchEntry(key, [token]) for key, token in tokens])


def one_chunk(key: int, tokens: Seq[int] | torch.Tensor, *, last: bool) -> Compute:
    return Compute.of([BatchEntry(key, tokens, sharded=True, last=last)])


def prefill(runner: ModelRunner, key: int, case: Case) -> torch.Tensor | None:
    """Open a sequence and prefill the case's prompt; rank 0's logits of the last token."""
    n, total = len(case.prompt), len(case.prompt) + len(case.forced)
    runner.execute(Open(key, end=n, total=total, max_read=total))
    logits = None
    for chunk in chunks(0, n, case.chunked_prefill_size, runner.comm.size):
        tokens = case.prompt[chunk.begin : chunk.end]
        logits = runner.execute(one_chunk(key, tokens, last=chunk.end == n))
    return logits


def logits_of(comm: Communicator, case: Case) -> torch.Tensor | None:
    """Rank 0: float32 ``[1 + len(forced), V]``, after the prompt and after each forced token."""
    runner = make_runner(comm, case)
    rows = [prefill(runner, 0, case)]
    for token in case.forced:
        rows.append(runner.execute(answer((0, token))))
    runner.execute(Close(0))
    assert runner.sequences.kv_bytes == 0
    if comm.rank != 0:
        return None
    return torch.cat([row for row in rows if row is not None]).cpu()
