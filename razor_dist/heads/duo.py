"""DuoAttention's training: one gate per KV head, learned so that closing it costs little.

**The loss** (papers/duoattention.txt, section 2.2). With H the last hidden states, after the final
norm, of E dimensions, at the l passkey words of a sample's recall (see `passkeys`)::

    L = 1 / (l E) sum_j || H_full[j] - H_mixed[j] ||^2  +  lambda / n sum_i |alpha_i|

over the n gates. Equations 1 and 2 of the paper are sums: over the l tokens (and, squared, over
their E dimensions) and over the gates. Taken so, the first term has thousands of summands for each
gate, lambda = 0.05 would weigh nothing, and what it weighs would depend on the model's size. Both
terms are means here, as DuoAttention's code takes the first one to be.

Only the gates train. They begin at 1, and are put back into [0, 1] after every step. The batch is
one sample, as in the paper. At 1 all gates are exact, so that the first step moves all of them
down by the learning rate; the distance then says which ones come back.

**Ranks** share a sample's tokens, its KV heads at attention (DeepSpeed-Ulysses), and the weights if
asked to (ZeRO stage 3). Sample s is that of step s, on any number of ranks, so that a run needs
nothing but gates, optimiser state and step to be continued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from razor_dist.errors import ConfigError
from razor_dist.heads import duo_engine, duo_pattern
from razor_dist.heads.duo_checkpoint import TrainingState
from razor_dist.heads.duo_folder import Pattern
from razor_dist.heads.gates import GateContext, Spread
from razor_dist.heads.head_map import HeadMap, Scores, rounded
from razor_dist.heads.passkeys import PasskeySample, PasskeySettings
from razor_dist.models.loader import dtype_name, model_fingerprint
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zero import ShardedWeights

METHOD: Final = duo_pattern.METHOD

# The share of steps in which the learning rate rises, and at the end that in which it falls; and
# the rate it rises from and falls to, of the highest. Section 3.1 of the paper: 400 of 2,000 steps,
# 0.002 of 0.02.
_RAMP: Final = 0.2
_LOWEST: Final = 0.1


@dataclass(frozen=True)
class DuoSettings:
    """Settings of the training; the defaults are the paper's (section 3.1).

    Attributes
    ----------
    sinks, recent : int
        What streaming attention sees while training.
    steps : int
        Each on one sample.
    learning_rate : float
        The highest, see `schedule`.
    l1 : float
        Lambda, the weight of the gates' mean.
    zero_stage : int
        0: every rank holds all weights. 3: each holds a share.
    sparsity, threshold : float, optional
        How the gates decide, see `duo_pattern.head_map`; not both.
    """

    sinks: int = 128
    recent: int = 256
    steps: int = 2000
    learning_rate: float = 0.02
    l1: float = 0.05
    zero_stage: int = 0
    sparsity: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 1), ("steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning_rate must be above 0, up to 1, got {self.learning_rate}")
        if not self.l1 >= 0:
            raise ConfigError(f"l1 must be at least 0, got {self.l1}")
        if self.zero_stage not in (0, 3):
            raise ConfigError(f"zero_stage must be 0 or 3, got {self.zero_stage}")
        if self.sparsity is not None and self.threshold is not None:
            raise ConfigError("give sparsity or threshold, not both: each decides alone")
        for name in ("sparsity", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, got {value}")


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes
    ----------
    step : int
        Steps done, this one included.
    tokens : int
        Of the sample.
    distance : float
        The loss's first term.
    sparsity : float
        Fraction of gates below one half, after the step.
    mean_gate : float
        After the step.
    """

    step: int
    tokens: int
    distance: float
    sparsity: float
    mean_gate: float


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, as a factor of the highest.

    It rises from 0.1 in the first fifth of the steps, stays at 1, and is back at 0.1 in the last.
    """
    ramp = max(1.0, _RAMP * steps)
    ends = min(step, max(steps - 1 - step, 0))
    return _LOWEST + (1 - _LOWEST) * min(1.0, ends / ramp)


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


def train(
    model: PreTrainedModel,
    sample: Callable[[int], PasskeySample],
    settings: DuoSettings,
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    state: TrainingState | None = None,
    save: Callable[[TrainingState], None] | None = None,
    save_every: int = 50,
    on_step: Callable[[StepReport], None] | None = None,
) -> Scores:
    """Train the gates of a model.

    Parameters
    ----------
    model : PreTrainedModel
        From `razor_dist.models.loader.load_model`. With `zero_stage` 3 it is best left on the CPU.
    sample : callable
        The passkey sample of an index, `Passkeys.sample`; the same on every rank.
    settings : DuoSettings
    group : ProcessGroup
        All ranks, from `razor_dist.parallel.zero.join_ranks`.
    device : torch.device, optional
        To train on; by default the model's.
    state : TrainingState, optional
        To continue from.
    save : callable, optional
        Called on rank 0 after every `save_every` steps and after the last.
    save_every : int
    on_step : callable, optional
        Progress, on rank 0.

    Returns
    -------
    tuple
        The gates, ``[layers][KV heads]``, rounded as a head map keeps scores.

    Raises
    ------
    ConfigError
        If the model's KV heads cannot be shared out evenly over the ranks.
    """
    device = device or model.device
    gated = GatedModel(model, settings, group, device)
    if settings.zero_stage == 3:
        ShardedWeights(model.base_model, device).gather_when_run()
    factor = partial(schedule, steps=settings.steps)
    engine, optimizer = duo_engine.gate_engine(gated, settings.learning_rate, factor)
    done = 0
    if state is not None:
        state.restore(gated.gates, optimizer, engine.lr_scheduler)
        done = state.step
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for step in range(done, settings.steps):
        one = sample(step)
        loss, distance = engine(one)
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            gated.gates.clamp_(0, 1)
        dist.all_reduce(distance, group=group)
        if rank == 0 and on_step is not None:
            on_step(_report(step + 1, len(one.ids), distance.item() / ranks, gated.gates))
        if rank == 0 and save is not None and _is_due(step + 1, save_every, settings.steps):
            save(TrainingState.of(step + 1, gated.gates, optimizer))
    return rounded(gated.gates.tolist())


def _is_due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def _report(step: int, tokens: int, distance: float, gates: Tensor) -> StepReport:
    sparsity = (gates < 0.5).float().mean().item()
    return StepReport(step, tokens, distance, sparsity, gates.mean().item())


def head_map(
    model_name: str,
    config: PretrainedConfig,
    gates: Scores,
    settings: DuoSettings,
    passkeys: PasskeySettings,
    dtype: torch.dtype,
) -> HeadMap:
    """The head map that trained gates decide, as `duo_pattern.head_map` decides for imported ones.

    Parameters
    ----------
    model_name : str
        As people know the model.
    config : PretrainedConfig
        Of the model.
    gates : tuple
        What `train` returned.
    settings : DuoSettings
    passkeys : PasskeySettings
        Of the samples.
    dtype : torch.dtype
        In which the model ran.
    """
    training = asdict(settings)
    del training["sparsity"], training["threshold"]
    sizes = {"sink_size": training.pop("sinks"), "recent_size": training.pop("recent")}
    training |= {"passkeys": asdict(passkeys), "dtype": dtype_name(dtype)}
    return duo_pattern.head_map(
        Pattern(gates, {**sizes, **training}, 0),
        model_name,
        ModelShape.from_config(config),
        model_fingerprint(config),
        sparsity=settings.sparsity,
        threshold=settings.threshold,
    )


def run_settings(
    config: PretrainedConfig, settings: DuoSettings, passkeys: PasskeySettings, haystack: str
) -> dict[str, Any]:
    """What must be equal in a run and in the one that continues it.

    The number of ranks and `zero_stage` are not in it: they change where numbers are, not which.
    Nor is how the gates decide, when all is done.
    """
    training = asdict(settings)
    del training["zero_stage"], training["sparsity"], training["threshold"]
    return {
        "model": model_fingerprint(config),
        **training,
        **{f"passkeys.{key}": value for key, value in asdict(passkeys).items()},
        "haystack": haystack,
    }
