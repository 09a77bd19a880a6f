"""DuoAttention's training: one gate per KV head, learned so that closing it costs little.

**The loss.** With H the last hidden states, after the final norm, of E dimensions, at the l passkey
words of a sample's recall (see `passkeys`; papers/duoattention.txt, section 2.2)::

    L = 1 / (l E) sum_j || H_full[j] - H_mixed[j] ||^2  +  lambda / n sum_i |alpha_i|

over the n gates. Equations 1 and 2 of the paper are sums: over the l tokens (and, squared, over
their E dimensions) and over the gates. With sums, the first term would have thousands of summands
for each gate, so that lambda = 0.05 would have no effect, or one that depends on the model's size.
Both terms are means here, as the first one is in DuoAttention's code.

**The loop.** Only the gates train. They begin at 1, and are clipped to [0, 1] after every step. The
batch is one sample, as in the paper. At 1 the mixed output is exact, so that the first step moves
all gates down by the learning rate; then the distance brings some of them back.

**Ranks** share a sample's tokens, its KV heads in attention (DeepSpeed-Ulysses), and with ZeRO
stage 3 the weights. All ranks have the same gates, whose gradients are averaged. Step s takes
sample s: to resume, a run needs only gates, optimiser state and step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.files import replacing
from razor_dist.heads.decision import NOT_FINITE, Scores, rounded
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify.criterion import Sample
from razor_dist.identify.duo import pattern as duo_pattern
from razor_dist.identify.duo.attention import GateContext, Ulysses
from razor_dist.identify.passkeys import Passkeys
from razor_dist.identify.settings import DuoSettings, PasskeySettings
from razor_dist.models.dual_chunk import check_one_chunk
from razor_dist.models.loader import dtype_name, model_fingerprint
from razor_dist.models.longrope import position_mark
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zero import ShardedWeights

STATE_FILE: Final = "gates.safetensors"  # in a run's folder
# Section 3.1 of the paper: the learning rate rises in the first 400 of 2,000 steps, from 0.002 to
# 0.02, and falls in the last 400.
_RAMP: Final = 0.2
_LOWEST: Final = 0.1


@dataclass(frozen=True)
class StepReport:
    """One training step: the loss's first term, and the gates after the step."""

    step: int  # steps done, this one included
    tokens: int  # of the sample
    distance: float
    sparsity: float  # fraction of gates below one half
    mean_gate: float


class GatedModel(nn.Module):
    """A frozen model with a gate per KV head, float32 ``[layers, KV heads]``; forward is the loss.

    The ranks of ``group`` share each sample; without it this process is alone.
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
        self._ulysses = None
        if group is not None and self._ranks > 1:
            self._ulysses = Ulysses(group, shape.kv_heads)
        # In a list, so that it is not a submodule: the gates are the only parameters.
        self._body = [model.base_model]
        _recompute_layers(model.base_model)
        self.gates = nn.Parameter(
            torch.ones(shape.layers, shape.kv_heads, device=device or model.device)
        )

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """This rank's loss and its first term; the sample's are means over ranks."""
        extra = -len(sample.ids) % self._ranks
        part = (len(sample.ids) + extra) // self._ranks
        mine = slice(self._rank * part, (self._rank + 1) * part)
        device = self.gates.device
        # Padding at the end, which causal attention hides from all other tokens.
        ids = nn.functional.pad(sample.ids, (0, extra))[mine].to(device)
        mask = nn.functional.pad(sample.mask, (0, extra))[mine].to(device)
        positions = torch.arange(mine.start, mine.stop, device=device)
        check_one_chunk(self._body[0], len(sample.ids))
        positions += position_mark(self._body[0], len(sample.ids))
        with torch.no_grad():
            target = self._hidden(ids, positions, None)[mask].float()
        mixed = self._hidden(ids, positions, self.gates)[mask].float()
        words = sample.mask.sum().to(device)
        # Times the number of ranks, since gradients are averaged. A rank without passkey words has
        # distance 0, but still takes part in the other ranks' gradients.
        distance = (target - mixed).square().sum() * self._ranks / (words * mixed.shape[-1])
        return distance + self._settings.l1 * self.gates.abs().mean(), distance.detach()

    def _hidden(self, ids: Tensor, positions: Tensor, gates: Tensor | None) -> Tensor:
        """Return the last hidden states of this rank's tokens, ``[T, E]``."""
        context = GateContext(gates, self._settings.sinks, self._settings.recent, self._ulysses)
        output: Any = self._body[0](
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            attention_context=context,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _recompute_layers(body: nn.Module) -> None:
    """Keep only the layers' inputs for backward, and recompute each layer there."""
    # ``gradient_checkpointing_enable`` needs training mode, which also switches dropout on. Here
    # only the layers themselves are in training mode, not the modules in them.
    for module in body.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layer: Any = module
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            layer.training = True


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, as a fraction of the highest."""
    ramp = max(1.0, _RAMP * steps)
    ends = min(step, max(steps - 1 - step, 0))
    return _LOWEST + (1 - _LOWEST) * min(1.0, ends / ramp)


@dataclass(frozen=True)
class TrainingState:
    """The state of a training; tensors are float32 ``[layers, KV heads]``."""

    step: int  # steps done, which determine data and learning rate
    gates: Tensor
    mean: Tensor  # AdamW's running mean of the gradient
    square: Tensor  # AdamW's running mean of the squared gradient

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        """Write the state and `run_identity`; a kill leaves the old file or the new one."""
        with replacing(path) as draft:
            save_file(
                {"gates": self.gates, "mean": self.mean, "square": self.square},
                draft,
                metadata={"step": str(self.step), "settings": json.dumps(identity)},
            )

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any]) -> TrainingState:
        """Read a state; raise `ConfigError` if there is none, or its run had other settings."""
        if not path.is_file():
            raise ConfigError(f"there is no run to resume: {path} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in ("gates", "mean", "square")}
            step, theirs = int(metadata["step"]), json.loads(metadata["settings"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} does not hold a state of gate training: {error}") from error
        for key, value in identity.items():
            if theirs.get(key) != value:
                raise ConfigError(
                    f"the run in {path.parent} has {key} {theirs.get(key)!r}, this one {value!r}; "
                    "a run is resumed with the settings it began with"
                )
        return cls(step, **tensors)


@dataclass(frozen=True)
class KeptRun:
    """A run whose state is saved after every ``every`` steps and after the last."""

    file: Path
    identity: dict[str, Any]  # `run_identity`
    every: int = 50  # steps
    state: TrainingState | None = None  # from which the run resumes


def run_identity(
    model_name: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    settings: DuoSettings,
    passkeys: Passkeys,
    haystack: str,
) -> dict[str, Any]:
    """The settings that must be equal when a run is resumed."""
    training = asdict(settings)
    # Neither where weights are kept nor the rule that turns gates into a head map changes a gate.
    del training["zero_stage"], training["sparsity"], training["threshold"]
    return {
        "model": model_fingerprint(config),
        "model_name": model_name,  # fine-tunes of one model share its fingerprint
        "dtype": dtype_name(dtype),
        **training,
        **{f"passkeys.{key}": value for key, value in asdict(passkeys.settings).items()},
        "haystack": haystack,
        "haystack_fingerprint": passkeys.fingerprint,
    }


def train(
    model: PreTrainedModel,
    sample: Callable[[int], Sample],
    settings: DuoSettings,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
    kept: KeptRun | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> Scores:
    """Train the gates of a model, ``[layers][KV heads]``; raise `ConfigError` as `Ulysses`.

    With ``zero_stage`` 3 the ``model`` is best on the CPU; training runs on ``device``, by default
    the model's. ``sample`` is `Passkeys.sample`, the same on every rank. ``group`` has all ranks
    (`razor_dist.parallel.zero.join_ranks`); ``zero_stage`` 3 needs it even for one rank.
    ``on_step`` is called on rank 0, which also saves the run's state. Raise `ModelError` if the
    loss is not finite.
    """
    device = device or model.device
    state = None if kept is None else kept.state
    gated = GatedModel(model, settings, group, device)
    if settings.zero_stage == 3:
        ShardedWeights(model.base_model, device).gather_when_run()
    gates = gated.gates
    # No weight decay: the loss itself draws gates to 0.
    optimizer = torch.optim.AdamW([gates], lr=settings.learning_rate, weight_decay=0.0)
    if state is not None:
        gates.data.copy_(state.gates)
        optimizer.state[gates] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.mean.to(device),
            "exp_avg_sq": state.square.to(device),
        }
    first = group is None or dist.get_rank(group) == 0
    for step in range(0 if state is None else state.step, settings.steps):
        one = sample(step)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * schedule(step, settings.steps)
        loss, distance = gated(one)
        loss.backward()
        assert gates.grad is not None
        for mean in (gates.grad, distance) if group is not None else ():
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        if not distance.isfinite():
            raise ModelError(f"the distance of step {step + 1} is {distance.item()}: {NOT_FINITE}")
        optimizer.step()
        optimizer.zero_grad()
        gates.data.clamp_(0, 1)
        done = step + 1
        if first and on_step is not None:
            closed = (gates < 0.5).float().mean().item()
            on_step(StepReport(done, len(one.ids), distance.item(), closed, gates.mean().item()))
        if first and kept is not None and (done % kept.every == 0 or done == settings.steps):
            adam = optimizer.state[gates]
            tensors = (gates, adam["exp_avg"], adam["exp_avg_sq"])
            now = TrainingState(done, *(x.detach().cpu().clone() for x in tensors))
            now.save(kept.file, kept.identity)
    return rounded(gates.tolist())


def head_map(
    model_name: str,
    config: PretrainedConfig,
    gates: Scores,
    settings: DuoSettings,
    passkeys: PasskeySettings,
    dtype: torch.dtype,
) -> HeadMap:
    """Build the head map that follows from trained gates, as for imported patterns."""
    training = asdict(settings)
    del training["sparsity"], training["threshold"]
    sizes = {"sink_size": training.pop("sinks"), "recent_size": training.pop("recent")}
    training |= {"passkeys": asdict(passkeys), "dtype": dtype_name(dtype)}
    return duo_pattern.head_map(
        duo_pattern.Pattern(gates, {**sizes, **training}, 0),
        model_name,
        config,
        sparsity=settings.sparsity,
        threshold=settings.threshold,
    )
