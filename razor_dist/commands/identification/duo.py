"""``razor-dist identify --method duo``: DuoAttention's training, on one process or on ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from rich.progress import Progress, TaskID

from razor_dist.commands.identification.model import Model
from razor_dist.commands.identification.options import IdentifyOptions
from razor_dist.commands.identification.report import kept_by_score, progress_bar
from razor_dist.config.errors import ConfigError
from razor_dist.heads.duo import train as duo
from razor_dist.heads.duo.checkpoint import TrainingState, state_file
from razor_dist.heads.duo.settings import DuoSettings, run_settings
from razor_dist.heads.head_map import HeadMap
from razor_dist.parallel.zero import import_deepspeed, join_ranks


def find(model: Model, options: IdentifyOptions) -> HeadMap | None:
    """See `razor_dist.heads.duo.train`; None on ranks other than 0."""
    passkeys = model.passkey_settings(options)
    settings = DuoSettings(
        sinks=options.sink_tokens,
        recent=options.recent_tokens,
        steps=options.steps,
        learning_rate=options.learning_rate,
        l1=options.l1,
        zero_stage=options.zero_stage,
        sparsity=options.sparsity,
        threshold=options.threshold,
    )
    folder = _state_folder(options.checkpoint, options.resume)
    import_deepspeed(model.device)  # missing, it is missed at once
    source = model.passkeys(passkeys, options.haystack)
    text = "reference" if options.haystack is None else str(options.haystack.resolve())
    identity = run_settings(model.config, settings, passkeys, text)
    state = None
    if folder is not None:
        if options.resume is not None:
            state = TrainingState.load(state_file(folder), identity)
        folder.mkdir(parents=True, exist_ok=True)
    group = join_ranks(model.device)
    first = dist.get_rank(group) == 0
    # Sharded weights go to the device share by share.
    loaded = model.load(torch.device("cpu") if settings.zero_stage == 3 else None)

    def save(state: TrainingState) -> None:
        if folder is not None:
            state.save(state_file(folder), identity)

    began = time.monotonic()
    with progress_bar(silent=not first) as bar:
        done = 0 if state is None else state.step
        task = bar.add_task("training gates", total=settings.steps, completed=done)
        gates = duo.train(
            loaded,
            source.sample,
            settings,
            group,
            state=state,
            save=save,
            save_every=options.checkpoint_every,
            on_step=_teller(bar, task, settings.steps, options.checkpoint_every),
            device=model.device,
        )
    if not first:
        return None
    typer.echo(f"{settings.steps} steps; {time.monotonic() - began:.1f} s")
    found = duo.head_map(model.name, model.config, gates, settings, passkeys, model.dtype)
    typer.echo(kept_by_score(found))
    return found


def _teller(
    bar: Progress, task: TaskID, steps: int, every: int
) -> Callable[[duo.StepReport], None]:
    """What moves the bar with each step."""

    def on_step(report: duo.StepReport) -> None:
        said = (
            f"{report.tokens} tokens, distance {report.distance:.2e}, gates "
            f"{report.mean_gate:.3f}, sparsity {report.sparsity:.0%}"
        )
        bar.update(task, completed=report.step, description=f"gates: {said}")
        # A bar shows nothing in a file until it ends, hours later.
        if not bar.console.is_terminal and report.step % every == 0:
            typer.echo(f"step {report.step} of {steps}: {said}", err=True)

    return on_step


def _state_folder(checkpoint: Path | None, resume: Path | None) -> Path | None:
    """Where a run's state is kept; nowhere if None."""
    if checkpoint is not None and resume is not None:
        raise ConfigError("give --checkpoint or --resume, not both: --resume goes on in its folder")
    if checkpoint is not None and state_file(checkpoint).exists():
        raise ConfigError(
            f"{checkpoint} holds the state of a run; continue it with --resume {checkpoint}, or "
            "give a new folder"
        )
    return checkpoint if resume is None else resume
