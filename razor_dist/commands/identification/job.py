"""``razor-dist identify`` from its flags to a file: the method, the map, its verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import torch
import typer

from razor_dist.commands.identification import alibi, duo, onthefly, razor
from razor_dist.commands.identification.model import Model
from razor_dist.commands.identification.options import IdentifyOptions, Method
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import build_config
from razor_dist.evals.needle.verify import Check
from razor_dist.heads.head_map import HeadMap
from razor_dist.models.adapters import is_alibi

_FIND: Mapping[Method, Callable[[Model, IdentifyOptions], HeadMap | None]] = {
    "razor": razor.find,
    "duo": duo.find,
    "onthefly": onthefly.find,
    "alibi": alibi.find,
}


def run(options: IdentifyOptions, given: AbstractSet[str]) -> None:
    """Find the heads of a model, write its map, and say so.

    Parameters
    ----------
    options : IdentifyOptions
        That have been checked.
    given : set of str
        The fields of ``options`` that the user gave.

    Raises
    ------
    ConfigError, ModelError
        If the options do not fit together or not the model.
    """
    model = Model.of(options)
    method = _method(model, options)
    options.check_method(given, method)
    check = _verification(options) if options.verify else None
    found = _FIND[method](model, options)
    if found is None:  # another rank writes
        return
    if check is not None:
        check.settle(found)  # refuses the map before anything is written
    found.save(options.out)  # before minutes of verification
    if check is not None:
        result = check.run(found, lambda line: typer.echo(line, err=True))
        typer.echo(f"verified on {result}")
        found = dataclasses.replace(found, verification=result)
        found.save(options.out)
    if options.plot is not None:
        from razor_dist.heads.plot import plot_head_map

        plot_head_map(found, options.plot)
    typer.echo(f"wrote {options.out}" + (f" and {options.plot}" if options.plot else ""))


def _method(model: Model, options: IdentifyOptions) -> Method:
    """The method that is asked for, or the one for such a model."""
    biased = is_alibi(model.config)
    if options.method == "auto":
        return "alibi" if biased else "razor"
    if biased is not (options.method == "alibi"):
        raise ConfigError(
            f"--method {options.method} is for models that are not biased by distance (ALiBi), and "
            f"{model.name} is; its heads' scopes follow from its weights: use --method alibi"
            if biased
            else f"--method alibi is for models biased by distance (ALiBi), and {model.name} is "
            "none"
        )
    return options.method


def _verification(options: IdentifyOptions) -> Check:
    """How the map will be verified, see `Check.plan`: with the settings to serve it with."""
    own = {} if options.verify_window is None else {"window_min": options.verify_window}
    served = build_config(
        EngineConfig,
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        threads=torch.get_num_threads(),
        **own,
    )
    haystack = "auto" if options.haystack is None else str(options.haystack)
    return Check.plan(served, options.verify_tokens, haystack, options.seed)
