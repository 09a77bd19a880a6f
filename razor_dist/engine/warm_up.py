"""Compilation and recording before the engine is ready, so that no request waits for them.

On CUDA a first step compiles kernels (8 to 12 s), a first long prompt loads cuDNN (1 to 3 s), and a
first batch of each size is recorded (0.1 s). On CPU kernels are compiled as the model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.runner import ModelRunner
from razor_dist.kernels import Partial, attend, merge
from razor_dist.kernels.chosen import BLOCK, RECENT
from razor_dist.protocol.step_plan import BatchEntry, Close, Compute, Open

# Sequences of the decode steps that are recorded.
_BATCHES = (1, 2, 4, 8)
# Steps of each batch: one that is seen, and two that are recorded and compared (`DecodeGraphs`).
_STEPS = 3
# Batches where nothing is recorded: one step of each compiles the kernels, and with sharded weights
# every step gathers all of these.
_COMPILING = 2
# Keys of a block that cuDNN is given (`razor_dist.kernels.torch_cuda`), and queries of a KV head.
_LONG = 32768
# Tokens of a prompt of which retrieval heads choose blocks, where they do.
_CHOOSING = RECENT + 4 * BLOCK


@torch.inference_mode()
def warm_up(runner: ModelRunner, batches: Sequence[int] = _BATCHES) -> None:
    """Read short prompts and decode some tokens of each batch; all ranks call this together.

    Batches that there is no room for are left out. The caches are empty before and after. The steps
    go past the scheduler, so that no counter and no estimate has them.
    """
    sent = runner.comm.bytes_sent.copy()
    prompt = torch.zeros(2 * runner.comm.size, dtype=torch.int64)
    steps = _STEPS
    if runner.graphs is None:
        batches, steps = batches[:_COMPILING], 1
    total = len(prompt) + steps * len(batches)
    most = _most_sequences(runner.config, total)
    opened: list[int] = []
    for count in (count for count in batches if count <= most):
        while len(opened) < count:
            key = len(opened)
            runner.execute(Open(key, end=len(prompt), total=total, max_read=total))
            opened.append(key)
            runner.execute(Compute.of([BatchEntry(key, prompt, sharded=True)]))
        for _ in range(steps):
            runner.execute(Compute.of([BatchEntry(key, prompt[:1]) for key in opened]))
    for key in opened:
        runner.execute(Close(key))
    total = _CHOOSING + 1
    if runner.caches.choice is not None and _fits(runner, total):
        prompt = torch.zeros(_CHOOSING, dtype=torch.int64)
        runner.execute(Open(0, end=_CHOOSING, total=total, max_read=total))
        runner.execute(Compute.of([BatchEntry(0, prompt, sharded=True)]))
        runner.execute(Compute.of([BatchEntry(0, prompt[:1])]))
        runner.execute(Close(0))
    if runner.device.type == "cuda":
        _attend_to_long_keys(runner)
        if runner.comm.size > 1:
            merge_as_ranks_do(runner)
    runner.synchronize()
    runner.sequences.peak_kv_bytes = 0
    runner.comm.bytes_sent.clear()
    runner.comm.bytes_sent.update(sent)


def _most_sequences(cache: CacheConfig, total: int) -> int:
    """Sequences of ``total`` tokens that caches are certain to have room for at once."""
    if total > cache.max_tokens:
        return 0
    places = [arena.places // arena.width(total) for arena in cache.arenas]
    pages = cache.num_pages // -(-total // cache.page_size)
    return min([cache.max_sequences, pages, *places])


def _fits(runner: ModelRunner, total: int) -> bool:
    """Return whether ``total`` tokens of one sequence fit; a rank needs a page beyond its part."""
    cache = runner.config
    pages = -(-total // (runner.comm.size * cache.page_size)) + 1
    return total <= cache.max_tokens and pages <= cache.num_pages


def _attend_to_long_keys(runner: ModelRunner) -> None:
    group, dim = runner.shape.group, runner.shape.head_dim
    k = torch.zeros(1, _LONG, dim, dtype=runner.model.dtype, device=runner.device)
    attend(k.new_zeros(1, group, -(-_LONG // group), dim), k, k, scale=1.0)


def merge_as_ranks_do(runner: ModelRunner) -> None:
    """Merge results as other ranks send them in prompts of several chunks.

    Triton compiles a kernel once more for strides that 16 divides. Those of what was sent are
    T (D + 1) and G T (D + 1), for a chunk's T tokens.
    """
    group, dim = runner.shape.group, runner.shape.head_dim
    for tokens in {16, 17, 16 // math.gcd(16, group)}:
        sent = Partial.unpacked(torch.zeros(1, group, tokens, dim + 1, device=runner.device))
        merge([sent, sent, sent, Partial(sent.out.contiguous(), sent.lse)])
