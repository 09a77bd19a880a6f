"""What ``razor-dist identify`` does with a model by each method, and what it says of it.

Imports torch and transformers; `identify`, which reads the options, imports it when it has to.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel

from razor_dist.config import EngineConfig
from razor_dist.config_sources import build_config
from razor_dist.engine.prompts import load_tokenizer
from razor_dist.evals.verify import Check
from razor_dist.heads import duo, onthefly, razor, scope
from razor_dist.heads.duo_checkpoint import TrainingState, state_file
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.passkeys import Passkeys, PasskeySettings, open_passkeys, start_tokens
from razor_dist.models.alibi import is_alibi
from razor_dist.models.loader import load_model, read_config
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zero import import_deepspeed, join_ranks


@dataclass(frozen=True)
class Run:
    """Where a training run keeps its state.

    Attributes
    ----------
    folder : Path, optional
        Nowhere if None.
    resume : bool
        Begin from the state that is there.
    every : int
        Steps from one state to the next.
    """

    folder: Path | None
    resume: bool
    every: int


class Job:
    """A model, and what can be done with it.

    Parameters
    ----------
    name : str
        As people know the model.
    path : Path
        Its folder.
    device : torch.device
    dtype : torch.dtype
    trust_remote_code : bool
    """

    def __init__(
        self,
        name: str,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool,
    ) -> None:
        self._name = name
        self._path = path
        self._device = device
        self._dtype = dtype
        self._trust = trust_remote_code

    def longest_sample(self) -> int:
        """The model's context, or what the paper trains with if that is shorter."""
        config = read_config(self._path, trust_remote_code=self._trust)
        return min(ModelShape.from_config(config).max_positions, PasskeySettings.max_tokens)

    def is_alibi(self) -> bool:
        """Whether the model is biased by distance."""
        return is_alibi(read_config(self._path, trust_remote_code=self._trust))

    def _load(self, device: torch.device) -> PreTrainedModel:
        return load_model(
            self._path, device=device, dtype=self._dtype, trust_remote_code=self._trust
        )

    def _passkeys(self, settings: PasskeySettings, haystack: Path | None) -> Passkeys:
        return open_passkeys(self._path, settings, haystack, trust_remote_code=self._trust)

    def razor(self, induction: float, echo: float, tokens: int, repeats: int, seed: int) -> HeadMap:
        """RazorAttention's probe, see `razor_dist.heads.razor`."""
        settings = razor.RazorSettings(induction, echo, tokens, repeats, seed)
        loaded = self._load(self._device)
        vocabulary = razor.plain_vocabulary(self._path, loaded.config)
        tokenizer = load_tokenizer(self._path, trust_remote_code=self._trust)
        start = time.monotonic()
        with _progress() as progress:
            task = progress.add_task("probing layers", total=loaded.config.num_hidden_layers)
            result = razor.probe(
                loaded,
                vocabulary,
                settings,
                lambda _: progress.advance(task),
                start=[] if tokenizer is None else start_tokens(tokenizer),
            )
        seconds = time.monotonic() - start
        found = razor.head_map(self._name, loaded.config, result, settings, self._dtype)
        _report_razor(found, result, settings, seconds)
        return found

    def alibi(self, settings: scope.ScopeSettings) -> HeadMap:
        """Scopes by the weights, see `razor_dist.heads.scope`."""
        loaded: Any = self._load(self._device)
        start = time.monotonic()
        with _progress() as progress:
            task = progress.add_task("measuring layers", total=loaded.config.num_hidden_layers)
            measured = scope.measure(loaded, settings, lambda _: progress.advance(task))
        seconds = time.monotonic() - start
        found = scope.head_map(self._name, loaded.config, measured, settings, self._dtype)
        typer.echo(
            f"scopes at epsilon {settings.epsilon:g}, {settings.bound} bound; {seconds:.1f} s"
        )
        typer.echo(f"{_kept(found)}: window of {found.settings['context']} tokens or more")
        windows = sorted(w for row in found.windows or () for w in row if w is not None)
        if windows:
            typer.echo(
                f"windows of local heads: {windows[0]} to {windows[-1]} tokens, "
                f"{sum(windows) / len(windows):.0f} on average"
            )
        return found

    def onthefly(
        self, settings: onthefly.OnTheFlySettings, passkeys: PasskeySettings, haystack: Path | None
    ) -> HeadMap:
        """DuoAttention's criterion without training, see `razor_dist.heads.onthefly`."""
        source = self._passkeys(passkeys, haystack)
        loaded = self._load(self._device)
        start = time.monotonic()
        with _progress() as progress:
            task = progress.add_task("measuring samples", total=settings.samples)
            scores = onthefly.measure(
                loaded, source.sample, settings, lambda _: progress.advance(task)
            )
        seconds = time.monotonic() - start
        typer.echo(f"{settings.samples} samples; {seconds:.1f} s")
        found = onthefly.head_map(
            self._name, loaded.config, scores, settings, passkeys, self._dtype
        )
        _report_kept(found)
        return found

    def duo(
        self,
        settings: duo.DuoSettings,
        passkeys: PasskeySettings,
        haystack: Path | None,
        run: Run,
    ) -> HeadMap | None:
        """DuoAttention's training, see `razor_dist.heads.duo`: None on ranks other than 0."""
        import_deepspeed(self._device)  # missing, it is missed at once
        source = self._passkeys(passkeys, haystack)
        config = read_config(self._path, trust_remote_code=self._trust)
        text = "reference" if haystack is None else str(haystack.resolve())
        identity = duo.run_settings(config, settings, passkeys, text)
        state = None
        if run.folder is not None:
            if run.resume:
                state = TrainingState.load(state_file(run.folder), identity)
            run.folder.mkdir(parents=True, exist_ok=True)
        group = join_ranks(self._device)
        first = dist.get_rank(group) == 0
        # Sharded weights go to the device share by share.
        loaded = self._load(torch.device("cpu") if settings.zero_stage == 3 else self._device)

        def save(state: TrainingState) -> None:
            if run.folder is not None:
                state.save(state_file(run.folder), identity)

        start = time.monotonic()
        with _progress(silent=not first) as progress:
            task = progress.add_task(
                "training gates",
                total=settings.steps,
                completed=0 if state is None else state.step,
            )

            def on_step(report: duo.StepReport) -> None:
                said = (
                    f"{report.tokens} tokens, distance {report.distance:.2e}, gates "
                    f"{report.mean_gate:.3f}, sparsity {report.sparsity:.0%}"
                )
                progress.update(task, completed=report.step, description=f"gates: {said}")
                # A bar shows nothing in a file until it ends, hours later.
                if not progress.console.is_terminal and report.step % run.every == 0:
                    typer.echo(f"step {report.step} of {settings.steps}: {said}", err=True)

            gates = duo.train(
                loaded,
                source.sample,
                settings,
                group,
                state=state,
                save=save,
                save_every=run.every,
                on_step=on_step,
                device=self._device,
            )
        if not first:
            return None
        seconds = time.monotonic() - start
        typer.echo(f"{settings.steps} steps; {seconds:.1f} s")
        found = duo.head_map(
            self._name,
            config,
            gates,
            settings,
            passkeys,
            self._dtype,
        )
        _report_kept(found)
        return found


def verification_plan(
    config: EngineConfig,
    tokens: int | None,
    window: int | None,
    haystack: Path | None,
    seed: int,
    trust_remote_code: bool,
) -> Check:
    """How a map will be verified, see `Check.plan`: with the settings it would be served with."""
    own = {} if window is None else {"window_min": window}
    served = build_config(
        EngineConfig,
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=trust_remote_code,
        threads=torch.get_num_threads(),
        **own,
    )
    return Check.plan(served, tokens, "auto" if haystack is None else str(haystack), seed)


def verified(found: HeadMap, check: Check) -> HeadMap:
    """A map with what it was found to lose."""
    result = check.run(found, lambda line: typer.echo(line, err=True))
    typer.echo(f"verified on {result}")
    return dataclasses.replace(found, verification=result)


def _progress(silent: bool = False) -> Progress:
    """A progress bar on stderr."""

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=silent)


def _report_kept(found: HeadMap) -> None:
    """Say on stdout what was chosen, and how sure the choice is."""
    [(kind, scores)] = found.kv_scores.items()
    kept = sum(map(sum, found.retrieval))
    ranked = sorted((score for row in scores for score in row), reverse=True)
    edge = ""
    if 0 < kept < len(ranked):
        edge = f", down to a {kind} of {ranked[kept - 1]:.3g} (the next has {ranked[kept]:.3g})"
    typer.echo(f"{_kept(found)}{edge}")


def _kept(found: HeadMap) -> str:
    return (
        f"kept {sum(map(sum, found.retrieval))} of {sum(map(len, found.retrieval))} KV heads "
        f"({found.kv_fraction:.1%}) on {sum(map(any, found.retrieval))} of "
        f"{len(found.retrieval)} layers"
    )


def _report_razor(
    found: HeadMap, result: razor.ProbeScores, settings: razor.RazorSettings, seconds: float
) -> None:
    """Say on stdout what was used, what was chosen and how sure the choice is."""
    heads = len(found.retrieval) * found.query_heads
    kv_heads = len(found.retrieval) * len(found.retrieval[0])
    kept = sum(map(sum, found.retrieval))
    touched = sum(map(any, found.retrieval))
    chosen = round(found.selected_fraction * heads)
    limit = (
        "" if result.tokens == settings.tokens else f", the most that fit; {settings.tokens} asked"
    )
    typer.echo(f"{result.tokens} random tokens x {settings.repeats}{limit}; {seconds:.1f} s")
    for kind, pairs in found.selected.items():
        typer.echo(f"{kind}: {len(pairs)} of {heads} query heads" + _threshold(found, kind))
    typer.echo(
        f"selected {chosen} of {heads} query heads ({found.selected_fraction:.1%}), which promote "
        f"{kept} of {kv_heads} KV heads ({found.kv_fraction:.1%}) on {touched} of "
        f"{len(found.retrieval)} layers"
    )
    chosen_here, chosen_there = result.decide(settings, heads // kv_heads)
    differ = sum(
        a != b
        for here, there in zip(chosen_here.retrieval, chosen_there.retrieval, strict=True)
        for a, b in zip(here, there, strict=True)
    )
    typer.echo(f"the per-token reading of the scores would decide {differ} KV heads otherwise")


def _threshold(found: HeadMap, kind: str) -> str:
    """The lowest chosen score and the highest left out."""
    ranked = sorted((score for row in found.scores[kind] for score in row), reverse=True)
    count = len(found.selected[kind])
    if not 0 < count < len(ranked):
        return ""
    return f", down to {ranked[count - 1]:.3g} (the next has {ranked[count]:.3g})"
