"""Log-probabilities of a prompt's tokens, from the logits of its chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from razor_dist.attention.step import ChunkTokens, Step
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import positions_of
from razor_dist.protocol.step_plan import BatchEntry


def split_logprobs(
    comm: Communicator, entries: Seq[BatchEntry], step: Step, logits: Tensor
) -> tuple[dict[int, Tensor], Tensor]:
    """Split a step's logits into log-probabilities of prompts and the rows to sample from.

    The tables of `_gather`, by sequence, are of the chunks that ask for them.
    """
    chunks = iter([chunk for part in step.passes for chunk in part.chunks])
    # Of a pass that the ranks share, rank 0 alone has logits (`TensorParallel.gather_logits`).
    has = [comm.rank == 0 or not part.tensor_parallel for part in step.passes]
    pairs = zip(step.passes, has, strict=True)
    rows = list(logits.split([n * has_any for part, has_any in pairs for n in part.rows]))
    found: dict[int, Tensor] = {}
    for index, entry in enumerate(entries):
        chunk = next(chunks) if entry.sharded else None
        if chunk is not None and entry.prompt_logprobs >= 0:
            found[entry.sequence] = _gather(comm, entry, chunk, rows[index])
            rows[index] = rows[index][len(rows[index]) - entry.last :]
    return found, torch.cat(rows)


def _gather(comm: Communicator, entry: BatchEntry, tokens: ChunkTokens, logits: Tensor) -> Tensor:
    """Log-probabilities of the tokens that follow each of a chunk's, from all ranks.

    A row of the float64 table ``[n, 2 + 2 k]`` has the token's log-probability, its place, 1
    for the likeliest, and the k likeliest tokens' log-probabilities and ids. ``logits`` are of
    this rank's tokens.
    """
    chunk, known = tokens.chunk, len(entry.tokens) - (entry.following < 0)
    # The prompt's last token has no next token: any id does, its row is cut off below.
    after = torch.cat([entry.tokens[1:], torch.tensor([max(0, entry.following)])])
    following = after.to(logits.device)[tokens.positions - chunk.begin]
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, following.unsqueeze(-1))
    rank = (logprobs > chosen).sum(-1, keepdim=True) + 1
    top = logprobs.topk(entry.prompt_logprobs, dim=-1)
    # Ids and ranks are exact in float64, so one tensor carries all.
    table = torch.cat([chosen, rank, top.values, top.indices], dim=-1).double()
    most = max(chunk.tokens(r) for r in range(comm.size))
    padded = torch.zeros(most, table.shape[1], dtype=torch.float64, device=logits.device)
    padded[: len(following)] = table
    gathered = comm.all_gather(padded, "control").cpu()
    rows = torch.empty(len(entry.tokens), table.shape[1], dtype=torch.float64)
    for r in range(comm.size):
        at = positions_of(chunk.ranges(r), rows.device) - chunk.begin
        rows[at] = gathered[r, : len(at)]
    return rows[:known]
