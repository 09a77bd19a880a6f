"""DuoAttention's training: one gate per KV head, learned so that closing it costs little.

Only the gates train, by the loss of `duo_loss`. They begin at 1, and are put back into [0, 1] after
every step. The batch is one sample, as in the paper. At 1 all gates are exact, so that the first
step moves all of them down by the learning rate; the distance then says which ones come back.

**Ranks** share a sample's tokens, its KV heads at attention (DeepSpeed-Ulysses), and the weights if
asked to (ZeRO stage 3). Sample s is that of step s, on any number of ranks, so that a run needs
nothing but gates, optimiser state and step to be continued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.heads.decision import Scores, rounded
from razor_dist.heads.duo import engine as duo_engine
from razor_dist.heads.duo import pattern as duo_pattern
from razor_dist.heads.duo.checkpoint import TrainingState
from razor_dist.heads.duo.folder import Pattern
from razor_dist.heads.duo.loss import GatedModel
from razor_dist.heads.duo.settings import DuoSettings
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.passkeys import PasskeySample, PasskeySettings
from razor_dist.models.loader import dtype_name, model_fingerprint
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zero import ShardedWeights

# The share of steps in which the learning rate rises, and at the end that in which it falls; and
# the rate it rises from and falls to, of the highest. Section 3.1 of the paper: 400 of 2,000 steps,
# 0.002 of 0.02.
_RAMP: Final = 0.2
_LOWEST: Final = 0.1


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
