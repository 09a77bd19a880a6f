"""The bridge from transformers' attention interface to ours.

Models are loaded with ``attn_implementation="razor"``. Each forward pass carries an
`AttentionContext` in the model call's keyword arguments (``attention_context=...``); every layer
hands its rotated queries, keys and values to it. No mask is ever built: what is visible follows
from the context's positions.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "razor"


class AttentionContext(Protocol):
    """What one forward pass knows of its sequences."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer.

        Parameters
        ----------
        layer : int
            Index of the layer.
        q : Tensor
            ``[Hq, T, D]``, rotated queries of the T tokens of this pass.
        k, v : Tensor
            ``[K, T, D]``, their rotated keys and their values.
        scale : float
            Multiplies ``q . k``.

        Returns
        -------
        Tensor
            ``[T, Hq, D]`` in the dtype of ``q``.
        """
        ...


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attention_context: AttentionContext,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "indices"):
        if kwargs.get(name) is not None:
            # `models.loader` refuses such models; reaching this means that a release of
            # transformers has changed what it passes, and silence would be a wrong answer.
            raise NotImplementedError(f"this model passes {name!r}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attention_context.attend(layer, query[0], key[0], value[0], scale).unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, _no_mask)
