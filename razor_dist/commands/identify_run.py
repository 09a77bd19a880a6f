"""``razor-dist identify`` from its options to a file: the method, the map, its verification."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from razor_dist.commands.identify_options import (
    BudgetOptions,
    CommonOptions,
    PasskeyOptions,
    RunOptions,
    WindowOptions,
)
from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import parse_size
from razor_dist.config.sources import build_config
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.evals.grid import Check
from razor_dist.files import make_folder
from razor_dist.heads.compare import HeadMapSummary
from razor_dist.heads.decision import Scores
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify import kvzip, onthefly, razor, reach, scope
from razor_dist.identify.budget import Budget, Masses, budgeted, masses
from razor_dist.identify.criterion import Criterion, Sample, head_map, score
from razor_dist.identify.duo import train as duo
from razor_dist.identify.passkeys import Passkeys, open_passkeys
from razor_dist.identify.prose import open_prose, start_tokens, user_turn
from razor_dist.identify.settings import (
    DuoSettings,
    KVzipSettings,
    OnTheFlySettings,
    PasskeySettings,
    RazorSettings,
    ReachSettings,
    ScopeSettings,
)
from razor_dist.models.adapters import is_alibi
from razor_dist.models.loader import dtype_name, load_model, read_config
from razor_dist.models.registry import display_name, resolve_model
from razor_dist.models.shape import ModelShape
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.parallel.zero import import_deepspeed, join_ranks

Own = Mapping[type, Any]  # options of a method by their class


class ModelSource:
    """A model whose weights are not loaded yet, downloaded if need be, and where it is to run."""

    def __init__(self, options: CommonOptions) -> None:
        config = EngineConfig(**_engine_settings(options))
        self.options = options
        self.device = torch_device(config, int(os.environ.get("LOCAL_RANK", "0")))
        self.dtype = torch_dtype(config, self.device)
        self.name, trust = display_name(options.model), options.trust_remote_code
        self.path = resolve_model(options.model, trust_remote_code=trust)
        self._model_options = config.model_options
        self.config = read_config(self.path, **self._model_options)
        self.shape = ModelShape.from_config(self.config)
        self.tokenizer = load_tokenizer(self.path, trust_remote_code=trust)

    def load(self, device: torch.device | None = None) -> PreTrainedModel:
        device = device or self.device
        return load_model(self.path, device=device, dtype=self.dtype, **self._model_options)

    def passkeys(self, options: PasskeyOptions) -> Passkeys:
        """Make samples up to the model's context, or to the paper's length if that is shorter."""
        longest = min(self.shape.max_positions, PasskeySettings.max_tokens)
        most = longest if options.max_tokens is None else options.max_tokens
        passkeys, seed = options.passkeys, self.options.seed
        settings = PasskeySettings(passkeys=passkeys, max_tokens=most, seed=seed)
        return open_passkeys(self.text_tokenizer(), settings, self.options.haystack)

    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; `ModelError` for a model without, since samples are words."""
        if self.tokenizer is None:
            raise ModelError(
                f"the model folder {self.path} has no tokenizer, and this method reads text"
            )
        return self.tokenizer


def run(method: str, options: CommonOptions, settings: Any, own: Own) -> None:
    """Find a model's heads by a method and write its map; ``own`` are the method's options."""
    model = ModelSource(options)
    if is_alibi(model.config) is not (method == "alibi"):
        raise ConfigError(
            f"method alibi is for models biased by distance (ALiBi), and {model.name} is not"
            if method == "alibi"
            else f"method {method} is for models that are not biased by distance (ALiBi), and "
            f"{model.name} is; its heads' scopes follow from its weights: use method alibi"
        )
    check = _verification(options, own[WindowOptions]) if options.verify else None
    # Refused before the work, not after it.
    wanted: BudgetOptions = own[BudgetOptions]
    budget = None if wanted.budget is None else budget_of(model, wanted)
    reading = None if budget is None else reading_of(model, budget, wanted.mass_tokens)
    if budget is not None and reading is not None:
        if getattr(settings, "zero_stage", 0) == 3:  # masses are measured on one device
            raise ConfigError("--zero-stage 3 excludes --budget, unless --middle-share is 0")
        budget = replace(budget, longest=reading.tokens // 2)
    found = _FINDERS[method](model, settings, own)
    if found is None:  # another rank writes
        return
    if budget is not None:
        seen = measured_masses(model, budget, reading)
        found, chosen = budgeted(found, budget, seen)
        if seen:
            typer.echo(f"mass dropped: {chosen.mass(seen):.4f} of attention, mean over KV heads")
        typer.echo(str(chosen))
    if check is not None:
        check.settle(found)  # refuses the map before anything is written
    found.save(options.out)  # before minutes of verification
    if check is not None:
        result = check.run(found, lambda line: typer.echo(line, err=True))
        typer.echo(f"verified on {result}")
        if not result.found_full:
            typer.echo("warning: full attention finds none, so this verifies nothing")
        found = replace(found, verification=result)
        found.save(options.out)
    if options.plot is not None:
        from razor_dist.heads.plot import plot_head_map

        plot_head_map(found, options.plot)
    typer.echo(f"wrote {options.out}" + (f" and {options.plot}" if options.plot else ""))


def _engine_settings(options: CommonOptions) -> dict[str, Any]:
    names = ("model", "device", "dtype", "trust_remote_code", "rope_scaling")
    return {name: getattr(options, name) for name in names}


def _verification(options: CommonOptions, window: WindowOptions) -> Check:
    own = {} if window.verify_window is None else {"window_min": window.verify_window}
    own["threads"] = torch.get_num_threads()
    served = build_config(EngineConfig, **_engine_settings(options), **own)
    haystack = "auto" if options.haystack is None else str(options.haystack)
    return Check.plan(served, options.verify_tokens, haystack, options.seed)


def budget_of(model: ModelSource, options: BudgetOptions) -> Budget:
    """Settle a budget by the model's sizes and the windows of its defaults, or refuse it."""
    context = model.shape.max_positions
    tokens = parse_size(options.budget_tokens) if options.budget_tokens else context
    if not 0 < tokens <= context:
        raise ConfigError(f"budget_tokens is {tokens}, but the model holds {context} tokens")
    return Budget.of(
        build_config(EngineConfig, model=model.options.model),
        model.shape,
        tokens,
        bytes=parse_size(str(options.budget)),
        token_bytes=2 * model.shape.head_dim * model.dtype.itemsize,
        short=options.short_window,
        share=options.middle_share,
        middle=options.middle_window,
    )


def reading_of(model: ModelSource, budget: Budget, most: int) -> ReachSettings | None:
    """The texts, of up to ``most`` tokens, on which `measured_masses` measures a budget's windows.

    None for two classes, which need no masses. Raise `ConfigError` if the texts are too short.
    """
    if budget.share == 0:
        return None
    room = model.shape.max_positions - len(start_tokens(model.text_tokenizer()))
    tokens = min(most, budget.tokens, room)
    # `Mass` measures the second half of a text, where every query must drop some tokens.
    window = budget.short if budget.longest is not None else budget.middles[0]
    if 2 * window > tokens:
        raise ConfigError(
            f"the attention beyond a window of {window} tokens is measured on texts of {tokens}, "
            f"which are too short: give --mass-tokens {2 * window} or more, if the model and "
            "--budget-tokens hold them, or a shorter --short-window or --middle-window"
        )
    return ReachSettings(samples=2, tokens=tokens, seed=model.options.seed)


def measured_masses(model: ModelSource, budget: Budget, reading: ReachSettings | None) -> Masses:
    """Measure the attention mass that each window of a budget drops on `reading_of`'s texts."""
    if reading is None:
        return {}
    tokenizer, samples = model.text_tokenizer(), reading.samples
    prose, start = open_prose(tokenizer, model.options.haystack), start_tokens(tokenizer)
    windows = [budget.short, *budget.middles]
    batch = reach.texts(prose, reading, model.shape, start)
    with _progress("measuring windows", samples) as (tick, seconds):
        found = masses(model.load(), batch, windows, budget.policy.sinks, tick)
    typer.echo(f"{samples} texts of {reading.tokens} tokens, windows of {windows}; {seconds()}")
    return found


def _razor(model: ModelSource, settings: RazorSettings, own: Own) -> HeadMap:
    loaded = model.load()
    vocabulary = razor.plain_vocabulary(model.tokenizer, loaded.config)
    start = start_tokens(model.tokenizer)
    with _progress("probing layers", loaded.config.num_hidden_layers) as (tick, seconds):
        result = razor.probe(loaded, vocabulary, settings, tick, start)
    found = razor.head_map(model.name, loaded, result, settings)
    limit = (
        "" if result.tokens == settings.tokens else f", the most that fit; {settings.tokens} asked"
    )
    typer.echo(f"{result.tokens} random tokens x {settings.repeats}{limit}; {seconds()}")
    heads = len(found.retrieval) * found.query_heads
    for kind, pairs in found.selected.items():
        edge = _edge(found.scores[kind], len(pairs))
        typer.echo(f"{kind}: {len(pairs)} of {heads} query heads{edge}")
    typer.echo(
        f"selected {round(found.selected_fraction * heads)} of {heads} query heads "
        f"({found.selected_fraction:.1%}), which promote {HeadMapSummary.of('', found)}"
    )
    here, there = (decision.retrieval for decision in result.decide(settings, found.group))
    differ = sum(sum(map(bool.__ne__, *rows)) for rows in zip(here, there, strict=True))
    typer.echo(f"the per-token reading of the scores would decide {differ} KV heads otherwise")
    return found


def _onthefly(model: ModelSource, settings: OnTheFlySettings, own: Own) -> HeadMap:
    source = model.passkeys(own[PasskeyOptions])
    batch = map(source.sample, range(settings.samples))
    used = {"passkeys": asdict(source.settings)}
    return _measured(model, "onthefly", settings, batch, onthefly.Change, onthefly.KIND, used)


def _kvzip(model: ModelSource, settings: KVzipSettings, own: Own) -> HeadMap:
    tokenizer = model.text_tokenizer()
    prose, shape = open_prose(tokenizer, model.options.haystack), model.shape
    batch = kvzip.repetitions(prose, settings, shape, user_turn(tokenizer))
    return _measured(model, "kvzip", settings, batch, kvzip.Reconstruction, kvzip.KIND)


def _reach(model: ModelSource, settings: ReachSettings, own: Own) -> HeadMap:
    tokenizer = model.text_tokenizer()
    prose, start = open_prose(tokenizer, model.options.haystack), start_tokens(tokenizer)
    batch = reach.texts(prose, settings, model.shape, start)
    return _measured(model, "reach", settings, batch, reach.Reach, reach.KIND)


def _measured(
    model: ModelSource,
    method: str,
    settings: Any,
    batch: Iterable[Sample],
    criterion: Callable[[PreTrainedModel, Any], Criterion],
    kind: str,
    used: Mapping[str, Any] | None = None,
) -> HeadMap:
    """Score a model's KV heads by a criterion and decide; the map records settings and ``used``."""
    loaded = model.load()
    with _progress("measuring samples", settings.samples) as (tick, seconds):
        scores = score(loaded, batch, criterion(loaded, settings), tick)
    typer.echo(f"{settings.samples} samples; {seconds()}")
    found = head_map(
        model.name,
        loaded.config,
        method,
        {kind: scores},
        {**asdict(settings), **(used or {}), "dtype": dtype_name(loaded.dtype)},
        sparsity=settings.sparsity,
    )
    typer.echo(_kept_by_score(found))
    return found


def _alibi(model: ModelSource, settings: ScopeSettings, own: Own) -> HeadMap:
    loaded: Any = model.load()
    with _progress("measuring layers", loaded.config.num_hidden_layers) as (tick, seconds):
        found = scope.head_map(model.name, loaded, settings, tick)
    typer.echo(f"scopes at epsilon {settings.epsilon:g}, {settings.bound} bound; {seconds()}")
    context = found.settings["context"]
    typer.echo(f"kept {HeadMapSummary.of('', found)}: window of {context} tokens or more")
    windows = sorted(w for row in found.windows or () for w in row if w is not None)
    if windows:
        typer.echo(
            f"windows of streaming heads: {windows[0]} to {windows[-1]} tokens, "
            f"{sum(windows) / len(windows):.0f} on average"
        )
    return found


def _duo(model: ModelSource, settings: DuoSettings, own: Own) -> HeadMap | None:
    """Train on one process or on ranks; return None on ranks other than 0."""
    options: RunOptions = own[RunOptions]
    file, every = _state_file(options), options.checkpoint_every
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and settings.zero_stage != 3
    if not alone:  # if it is missing, say so before the work
        import_deepspeed(model.device)
    source, haystack = model.passkeys(own[PasskeyOptions]), model.options.haystack
    text = "reference" if haystack is None else str(haystack.resolve())
    kept, done = None, 0
    if file is not None:
        identity = duo.run_identity(model.name, model.config, model.dtype, settings, source, text)
        state = None if options.resume is None else duo.TrainingState.load(file, identity)
        make_folder(file.parent)
        kept, done = duo.KeptRun(file, identity, every, state), state.step if state else 0
    group = None if alone else join_ranks(model.device)
    first = group is None or dist.get_rank(group) == 0
    # Sharded weights go to the device share by share.
    loaded = model.load(torch.device("cpu") if settings.zero_stage == 3 else None)
    with _progress("training gates", settings.steps, done, silent=not first) as (tick, seconds):

        def on_step(report: duo.StepReport) -> None:
            line = (
                f"{report.tokens} tokens, distance {report.distance:.2e}, gates "
                f"{report.mean_gate:.3f}, sparsity {report.sparsity:.0%}"
            )
            tick(report.step, f"gates: {line}")
            # A bar shows nothing in a file until it ends, hours later.
            if not sys.stderr.isatty() and report.step % every == 0:
                typer.echo(f"step {report.step} of {settings.steps}: {line}", err=True)

        gates = duo.train(
            loaded,
            source.sample,
            settings,
            group,
            kept=kept,
            on_step=on_step,
            device=model.device,
        )
    if group is not None and dist.get_world_size(group) > 1:
        # A process that ends with the group's threads at work is aborted now and then.
        dist.destroy_process_group()
    if not first:
        return None
    typer.echo(f"{settings.steps} steps; {seconds()}")
    found = duo.head_map(model.name, model.config, gates, settings, source.settings, model.dtype)
    typer.echo(_kept_by_score(found))
    return found


def _state_file(kept: RunOptions) -> Path | None:
    if kept.checkpoint is not None and kept.resume is not None:
        raise ConfigError("give --checkpoint or --resume, not both: --resume goes on in its folder")
    folder = kept.checkpoint or kept.resume
    file = None if folder is None else folder / duo.STATE_FILE
    if kept.checkpoint is not None and file is not None and file.exists():
        raise ConfigError(
            f"{kept.checkpoint} holds the state of a run; continue it with --resume "
            f"{kept.checkpoint}, or give a new folder"
        )
    return file


# The methods, in one form: the model, the method's settings and options to its map, or None on a
# rank that does not write it.
_FINDERS: Mapping[str, Callable[[ModelSource, Any, Own], HeadMap | None]] = {
    "razor": _razor,
    "duo": _duo,
    "onthefly": _onthefly,
    "kvzip": _kvzip,
    "reach": _reach,
    "alibi": _alibi,
}


@contextmanager
def _progress(
    label: str, total: int, done: int = 0, *, silent: bool = False
) -> Iterator[tuple[Callable[..., None], Callable[[], str]]]:
    """Show a progress bar on stderr; yield functions to advance it and to read its clock."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console, began = Console(stderr=True), time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=silent) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield (
            lambda _, label=None: bar.update(task, advance=1, description=label),
            lambda: f"{time.monotonic() - began:.1f} s",
        )


def _kept_by_score(found: HeadMap) -> str:
    """Return, in words, the heads that a map with one score keeps, and by what margin."""
    [(kind, scores)] = found.kv_scores.items()
    edge = _edge(scores, sum(map(sum, found.retrieval)), f"a {kind} of ")
    return f"kept {HeadMapSummary.of('', found)}{edge}"


def _edge(scores: Scores, chosen: int, what: str = "") -> str:
    """Return, in words, the lowest chosen score and the highest score left out, if both exist."""
    ranked = sorted((score for row in scores for score in row), reverse=True)
    if not 0 < chosen < len(ranked):
        return ""
    return f", down to {what}{ranked[chosen - 1]:.3g} (the next has {ranked[chosen]:.3g})"
