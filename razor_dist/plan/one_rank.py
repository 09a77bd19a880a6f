"""One rank of a deployment, alone: the engine's own runner with a communicator that sends nothing.

On the meta device it shows what a rank allocates (`razor_dist.plan.memory`); on a GPU it runs all
work of one of eight ranks except transfers (``razor-dist bench gpu``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from transformers import PreTrainedModel

from razor_dist.cache.caches import CacheConfig
from razor_dist.engine.decode_mode import DecodeMode
from razor_dist.engine.graph import Recorder
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.tensor_parallel import TensorParallel
from razor_dist.heads.layout import HeadLayout
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.halo import KVPiece
from razor_dist.parallel.zigzag import Chunk, Interval, holdings
from razor_dist.plan.deployment import Deployment
from razor_dist.protocol.step_plan import BatchEntry, Compute, Open


def runner_of(
    d: Deployment,
    model: PreTrainedModel,
    cache: CacheConfig,
    comm: Communicator,
    *,
    recorder: Recorder | None = None,
) -> ModelRunner:
    """A runner of ``model`` as the rank of ``comm`` in a deployment."""
    heads, share = d.head_map, d.share(comm.rank)
    layout = HeadLayout.from_decision(heads.retrieval, model.device, heads.windows, share)
    tensor = TensorParallel(model, d.shape, layout, comm) if d.shared else None
    return ModelRunner(model, DecodeMode(layout, tensor), cache, comm, recorder=recorder)


def skip(runner: ModelRunner, done: Seq[Chunk]) -> None:
    """Put an opened sequence into the state after the chunks ``done``, without running them."""
    sequence, rank = runner.sequences[0], runner.comm.rank
    if not done:
        return
    runner.sequences.begin_chunks(0)
    prefill = sequence.prefill
    assert prefill is not None
    prefill.done, sequence.chunks = list(done), list(done)
    sequence.grow([sum(chunk.tokens(r) for chunk in done) for r in range(runner.comm.size)], rank)
    if prefill.scratch is not None:
        prefill.scratch.tokens = sequence.shard_tokens[rank]
        return
    slots = zip(runner.caches.streaming, sequence.streaming, strict=True)
    for index, (cache, slot) in enumerate(slots):
        slot.read_to(max(cache.policy.sinks, cache.policy.start(sequence.length)))
        kept = Interval(slot.start - slot.tail_capacity, sequence.length)
        own = [at for at, holder in holdings(done, kept) if holder == rank]
        cache.chunked[slot.index].pieces = {
            layer: [_piece(runner, at, group.rows) for at in own]
            for layer, heads in enumerate(runner.caches.layout.layers)
            for group in heads.groups
            if group.index == index
        }


def _piece(runner: ModelRunner, at: Interval, rows: slice) -> KVPiece:
    shape = (rows.stop - rows.start, len(at), runner.shape.head_dim)
    dtype = runner.config.streaming_dtype
    return KVPiece(at, *(torch.zeros(shape, dtype=dtype, device=runner.device) for _ in "kv"))


def chunk_reader(runner: ModelRunner, chunks: Seq[Chunk], index: int) -> Callable[[], None]:
    """Open a sequence and skip its chunks before ``index``; return a function that reads that."""
    chunk, prompt = chunks[index], chunks[-1].end
    runner.execute(Open(0, end=prompt, total=prompt, max_read=prompt))
    skip(runner, chunks[:index])
    tokens = torch.zeros(chunk.end - chunk.begin, dtype=torch.int64)
    plan = Compute.of([BatchEntry(0, tokens, sharded=True, last=chunk.end == prompt)])

    def read() -> None:
        runner.execute(plan)
        runner.synchronize()

    return read
