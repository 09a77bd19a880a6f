"""The bridge from transformers' attention interface to ours.

Models are loaded with ``attn_implementation="razor"``. Each forward pass carries an
`AttentionContext` in the model call's keyword arguments (``attention_context=...``); every layer
passes its rotated queries, keys and values to it. No mask is ever built: the context's positions
decide which keys are visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from razor_dist.kernels.fused import postponed_rotation
from razor_dist.kernels.query import Query
from razor_dist.models.dual_chunk import check_one_chunk
from razor_dist.models.longrope import position_mark

NAME = "razor"

# Arguments to attention that do not change its result. Positions are in queries and keys already,
# `_problem` checks dropout and is_causal, and the rest concerns a model's outputs or a library.
_NAMES = """
    cache_position deterministic dropout hidden_states is_causal num_items_in_batch
    output_attentions output_hidden_states output_router_logits position_embeddings position_ids
    return_dict use_cache
"""
_HARMLESS = frozenset(_NAMES.split())


class AttentionContext(Protocol):
    """Computes attention for one forward pass, whose sequences it knows."""

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a layer, by index, to the T tokens of this pass and the tokens before them.

        ``query.q`` is ``[K, G, T, D]``, ``k`` and ``v`` are ``[K, T, D]``. Queries and keys are
        rotated, or attention has to rotate them (``query.rotation``), or the query has ALiBi's
        slopes. The result is ``[T, K G, D]`` in the dtype of the queries.
        """


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    attention_context: AttentionContext,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    problem = _problem(module, (query, key, value), attention_mask, kwargs)
    if problem is not None:
        # `models.support` refuses such models by their configuration. This is for a model's own
        # code, or a new release of transformers, that does what no configuration tells.
        raise NotImplementedError(f"the attention of {type(module).__name__} {problem}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    rotation = postponed_rotation(query, key)
    grouped = Query.grouped(query[0], scale, None, key.shape[1])._replace(rotation=rotation)
    return attention_context.attend(layer, grouped, key[0], value[0]).unsqueeze(0), None


def _problem(
    module: nn.Module, qkv: Sequence[Tensor], mask: Tensor | None, given: Mapping[str, Any]
) -> str | None:
    """Name what a layer asks for beyond causal attention, since ignoring it would be wrong."""
    if mask is not None:
        return "brings a mask of its own, which is not supported"
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return "is bidirectional, which is not supported"
    if given.get("dropout"):
        return "drops out weights, which is not supported"
    for name, value in given.items():
        if value is not None and name not in _HARMLESS:
            return f"is called with {name!r}, which is not supported"
    for dim, sizes, remedy in (
        (-1, "widths {}", "only one width is supported"),
        (-2, "{} tokens", "keys of other tokens than its own are not supported"),
    ):
        found = [x.shape[dim] for x in qkv]
        if len(set(found)) > 1:
            listed = sizes.format(", ".join(map(str, found)))
            return f"has queries, keys and values of {listed}; {remedy}"
    return None


@torch.inference_mode()
def run_body(model: PreTrainedModel, input_ids: Tensor, context: AttentionContext) -> None:
    """Run a prompt, int64 ``[N]``, through a model's body; logits would take most of the memory."""
    ids = input_ids.to(model.device)
    body = model.base_model
    check_one_chunk(body, len(ids))
    positions = torch.arange(len(ids), device=ids.device) + position_mark(body, len(ids))
    body(
        input_ids=ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        attention_context=context,
    )


AttentionInterface.register(NAME, _forward)
# No mask function is registered: transformers then makes none, and does not compare positions to
# find packed sequences, six kernels a step and a wait for the device.
