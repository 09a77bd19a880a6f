"""``razor-dist identify --method razor``: RazorAttention's probe."""

from __future__ import annotations

import time

import typer

from razor_dist.commands.identification.model import Model
from razor_dist.commands.identification.options import IdentifyOptions
from razor_dist.commands.identification.report import edge, kept, progress_bar
from razor_dist.frontend.prompts import load_tokenizer
from razor_dist.heads import razor
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.passkeys import start_tokens


def find(model: Model, options: IdentifyOptions) -> HeadMap:
    """See `razor_dist.heads.razor`."""
    settings = razor.RazorSettings(
        induction_percent=options.induction,
        echo_percent=options.echo,
        tokens=options.tokens,
        repeats=options.repeats,
        seed=options.seed,
    )
    loaded = model.load()
    vocabulary = razor.plain_vocabulary(model.path, loaded.config)
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    began = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("probing layers", total=loaded.config.num_hidden_layers)
        result = razor.probe(
            loaded,
            vocabulary,
            settings,
            lambda _: bar.advance(task),
            start=[] if tokenizer is None else start_tokens(tokenizer),
        )
    seconds = time.monotonic() - began
    found = razor.head_map(model.name, loaded.config, result, settings, model.dtype)
    _report(found, result, settings, seconds)
    return found


def _report(
    found: HeadMap, result: razor.ProbeScores, settings: razor.RazorSettings, seconds: float
) -> None:
    """Say what was used, what was chosen and how sure the choice is."""
    heads = len(found.retrieval) * found.query_heads
    limit = (
        "" if result.tokens == settings.tokens else f", the most that fit; {settings.tokens} asked"
    )
    typer.echo(f"{result.tokens} random tokens x {settings.repeats}{limit}; {seconds:.1f} s")
    for kind, pairs in found.selected.items():
        said = edge(found.scores[kind], len(pairs))
        typer.echo(f"{kind}: {len(pairs)} of {heads} query heads{said}")
    chosen = round(found.selected_fraction * heads)
    typer.echo(
        f"selected {chosen} of {heads} query heads ({found.selected_fraction:.1%}), which promote "
        f"{kept(found)}"
    )
    chosen_here, chosen_there = result.decide(settings, found.group)
    differ = sum(
        a != b
        for here, there in zip(chosen_here.retrieval, chosen_there.retrieval, strict=True)
        for a, b in zip(here, there, strict=True)
    )
    typer.echo(f"the per-token reading of the scores would decide {differ} KV heads otherwise")
