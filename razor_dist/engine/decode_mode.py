"""The choice between tensor-parallel decode, where ranks share short steps, and replicated."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from razor_dist.attention.decode import rotates
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.graph import Recorder
from razor_dist.engine.tape import StepFunction
from razor_dist.engine.tensor_parallel import TensorParallel, is_compact, why_not
from razor_dist.heads.decision import HeadRoles
from razor_dist.heads.layout import HeadLayout, HeadShare
from razor_dist.kernels.fused import postponed_rotations
from razor_dist.kernels.query import Query
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator

log = logging.getLogger(__name__)

_STEPS = 3  # of each mode that are timed, after one that is not
# Steps are shared if a token takes less than this many times its time on every rank alone: short
# prompts are then read once by all ranks, not by each, and a streaming head's window is in the
# memory of one rank.
SHARING_IS_WORTH = 1.4


class DecodeMode(NamedTuple):
    layout: HeadLayout
    tensor: TensorParallel | None = None  # shares the short steps of ``layout``; None: replicated
    reason: str = ""  # why it is this mode, for people


def share_short_steps(
    config: EngineConfig,
    model: PreTrainedModel,
    shape: ModelShape,
    roles: HeadRoles,
    comm: Communicator,
    recorder: Recorder | None = None,
) -> DecodeMode:
    """Return the mode of decoding, and its layout of the ranks' heads.

    All ranks call this together. With ``decode: auto`` they time steps of both kinds, recorded if
    there is a ``recorder``, and follow rank 0.
    """
    whole = HeadLayout.from_decision(roles.retrieval, model.device, roles.windows)
    if comm.size == 1:
        return DecodeMode(whole, None, "one rank")
    if config.decode == "replicated":
        return DecodeMode(whole, None, "by the settings")
    reason = why_replicated(config, model)
    if reason is not None:
        if comm.rank == 0:
            level = logging.WARNING if config.decode == "tensor" else logging.INFO
            log.log(level, "every rank computes all of a short step: %s", reason)
        return DecodeMode(whole, None, reason)
    share = HeadShare(comm.rank, comm.size, shape.group, is_compact(model))
    layout = HeadLayout.from_decision(roles.retrieval, model.device, roles.windows, share)
    tensor = TensorParallel(model, shape, layout, comm)
    reason = "by the settings"
    if config.decode == "auto":
        heads = [len(layer.outputs) for layer in layout.short]
        alone, shared = _measure(model, tensor, heads, comm, recorder)
        better = shared < SHARING_IS_WORTH * alone
        reason = (
            f"one token's weights take {1e3 * shared:.1f} ms where the ranks share them, and "
            f"{1e3 * alone:.1f} where each reads all"
        )
        if comm.rank == 0:
            log.info("decode: %s (%s)", "tensor" if better else "replicated", reason)
        if not better:
            tensor.remove()
            return DecodeMode(whole, None, reason)
    return DecodeMode(layout, tensor, reason)


def why_replicated(config: EngineConfig, model: PreTrainedModel) -> str | None:
    """Why several ranks of these settings cannot share short steps, or None."""
    if config.weights != "replicated":
        return f"weights: {config.weights} gathers whole layers on every rank"
    if config.weight_dtype == "int8":
        return "weight_dtype: int8 packs whole layers"
    if config.keeps_prefixes:
        return "prefix_host_gb and prefix_store save windows that every rank has whole"
    return why_not(model)


class _NoAttention:
    """An `AttentionContext` of zeros, for ``heads[layer]`` query heads.

    `layers` are the layers that have called it, in order.
    """

    def __init__(self, heads: Sequence[int]) -> None:
        self._heads, self.layers = heads, list[int]()

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        self.layers.append(layer)
        _, _, tokens, dim = query.q.shape
        return query.q.new_zeros(tokens, self._heads[layer], dim)


@torch.inference_mode()
def run_without_attention(model: PreTrainedModel, heads: Sequence[int] | None = None) -> Tensor:
    """Logits ``[1, V]`` of one token; attention has results for these ``heads`` of each layer.

    By default, of all. `NotImplementedError` if our attention is not called once in each layer.
    """
    if heads is None:
        heads = _every_head(model)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    context = _NoAttention(heads)
    options = {"use_cache": False, "logits_to_keep": 1, "attention_context": context}
    logits: Tensor = model(input_ids=token, position_ids=token, **options).logits[0]
    if sorted(context.layers) != list(range(len(heads))):
        raise NotImplementedError("not all of its layers attend once for a token")
    return logits


def _every_head(model: PreTrainedModel) -> list[int]:
    """Query heads of each layer."""
    shape = ModelShape.from_config(model.config)
    return [shape.query_heads] * shape.layers


def postpones_rotations(model: PreTrainedModel, comm: Communicator) -> bool:
    """True if attention is to rotate a decode step's queries and keys; all ranks call it together.

    Hosts may differ in whether they have a compiler, or Triton. All ranks try it, or none does: the
    trial gathers sharded weights.
    """
    there = torch.tensor([rotates(model.device)], dtype=torch.int64)
    return bool(comm.host.all_gather(there, "control").all()) and rotations_can_wait(model)


def rotations_can_wait(model: PreTrainedModel) -> bool:
    """True if attention gets queries and keys as a model's rotary embeddings leave them.

    Only then can it rotate them itself: Phi puts rotated parts and others together, HunYuan norms
    what is rotated, Ministral 3 scales queries.
    """
    try:
        with postponed_rotations():
            run_without_attention(model)
    except NotImplementedError:
        return False
    return True


@torch.inference_mode()
def _measure(
    model: PreTrainedModel,
    tensor: TensorParallel,
    heads: Sequence[int],
    comm: Communicator,
    recorder: Recorder | None,
) -> tuple[float, float]:
    """Seconds of one token's step without attention: every rank alone, and all together.

    Attention is left out: tensor-parallel decode's is never more work than the other's.
    """

    whole = _every_head(model)  # once, not in each step that is timed

    def alone() -> tuple[Tensor]:
        return (run_without_attention(model, whole),)

    def shared() -> tuple[Tensor]:
        with tensor.sharing():
            return (tensor.gather_logits(run_without_attention(model, heads)),)

    steps = _recorded([alone, shared], comm, model.device, recorder)
    least = [float("inf"), float("inf")]
    for _ in range(_STEPS):
        for index, step in enumerate(steps):
            _wait_for_all(comm, model.device)
            began = time.perf_counter()
            step()
            _wait_for_all(comm, model.device)
            least[index] = min(least[index], time.perf_counter() - began)
    found = torch.tensor(least, dtype=torch.float64, device=model.device)
    comm.broadcast(found, "control")
    seconds: tuple[float, float] = tuple(found.tolist())
    return seconds


def _recorded(
    steps: list[StepFunction],
    comm: Communicator,
    device: torch.device,
    recorder: Recorder | None,
) -> list[StepFunction]:
    """Return what replays the steps; the steps themselves, run once, if a rank cannot record."""
    found = []
    for step in steps:
        if recorder is None:
            step()
            continue
        recorder.warm_up(step)
        try:
            found.append(recorder.record(step))
        except Exception as error:  # whatever it is: what is not recorded is timed as it is
            log.info("steps are timed without recording them: %s", error)
    # A rank that has no recordings would leave the others waiting.
    missing = torch.tensor([len(found) < len(steps)], dtype=torch.int64, device=device)
    return steps if comm.all_reduce(missing, "control").wait()[0].item() else found


def _wait_for_all(comm: Communicator, device: torch.device) -> None:
    comm.all_reduce(torch.zeros(1, device=device), "control").wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
