"""DuoAttention's loss: what a model's output loses by gates that close.

With H the last hidden states, after the final norm, of E dimensions, at the l passkey words of a
sample's recall (see `passkeys`; papers/duoattention.txt, section 2.2)::

    L = 1 / (l E) sum_j || H_full[j] - H_mixed[j] ||^2  +  lambda / n sum_i |alpha_i|

over the n gates. Equations 1 and 2 of the paper are sums: over the l tokens (and, squared, over
their E dimensions) and over the gates. Taken so, the first term has thousands of summands for each
gate, lambda = 0.05 would weigh nothing, and what it weighs would depend on the model's size. Both
terms are means here, as DuoAttention's code takes the first one to be.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from razor_dist.heads.duo import engine as duo_engine
from razor_dist.heads.duo.gates import GateContext, Spread
from razor_dist.heads.duo.settings import DuoSettings
from razor_dist.heads.passkeys import PasskeySample
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape


class GatedModel(nn.Module):
    """A frozen model with a gate per KV head; its forward is the loss.

    Parameters
    ----------
    model : PreTrainedModel
        From `razor_dist.models.loader.load_model`.
    settings : DuoSettings
    group : ProcessGroup, optional
        Of the ranks that share each sample. Without it this process is alone.
    device : torch.device, optional
        Of the gates; by default the model's.

    Attributes
    ----------
    gates : Parameter
        float32 ``[layers, KV heads]``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: DuoSettings,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        shape = ModelShape.from_config(model.config)
        self._settings = settings
        self._rank = 0 if group is None else dist.get_rank(group)
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._spread: Spread | None = None
        if group is not None and self._ranks > 1:
            self._spread = duo_engine.Ulysses(group, shape.kv_heads)
        # In a list, so that it is no submodule: to DeepSpeed's engine the gates are everything.
        self._body = [model.base_model]
        _recompute_layers(model.base_model)
        self.gates = nn.Parameter(
            torch.ones(shape.layers, shape.kv_heads, device=device or model.device)
        )

    def forward(self, sample: PasskeySample) -> tuple[Tensor, Tensor]:
        """The loss and its first term, of this rank.

        Their means over ranks are those of the sample: a rank's own squares count as often as
        there are ranks.
        """
        extra = -len(sample.ids) % self._ranks
        part = (len(sample.ids) + extra) // self._ranks
        mine = slice(self._rank * part, (self._rank + 1) * part)
        device = self.gates.device
        # Tokens at the end, which nothing before them sees.
        ids = nn.functional.pad(sample.ids, (0, extra))[mine].to(device)
        mask = nn.functional.pad(sample.mask, (0, extra))[mine].to(device)
        positions = torch.arange(mine.start, mine.stop, device=device)
        positions += position_mark(self._body[0], len(sample.ids))
        with torch.no_grad():
            target = self._hidden(ids, positions, None)[mask].float()
        mixed = self._hidden(ids, positions, self.gates)[mask].float()
        words = sample.mask.sum().to(device)
        # Without passkey words here it is 0, and still has gradients to give to other ranks.
        distance = (target - mixed).square().sum() * self._ranks / (words * mixed.shape[-1])
        return distance + self._settings.l1 * self.gates.abs().mean(), distance.detach()

    def _hidden(self, ids: Tensor, positions: Tensor, gates: Tensor | None) -> Tensor:
        """Last hidden states of this rank's tokens, ``[T, E]``."""
        context = GateContext(gates, self._settings.sinks, self._settings.recent, self._spread)
        output: Any = self._body[0](
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            attention_context=context,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _recompute_layers(body: nn.Module) -> None:
    """Keep only the layers' inputs for backward, and compute each layer again there.

    What ``gradient_checkpointing_enable`` does in training mode, which would also switch dropout
    on: here the layers alone believe that they are trained, not the modules in them.
    """
    for module in body.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layer: Any = module
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            layer.training = True
