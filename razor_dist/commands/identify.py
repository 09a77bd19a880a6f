"""``razor-dist identify``: find a model's retrieval heads and write its head map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from razor_dist.commands.identify_options import (
    BudgetOptions,
    CommonOptions,
    PasskeyOptions,
    RunOptions,
    WindowOptions,
)
from razor_dist.commands.options import with_options
from razor_dist.config.errors import ConfigError
from razor_dist.config.validation import nearest
from razor_dist.files import check_writable
from razor_dist.identify.settings import (
    DuoSettings,
    KVzipSettings,
    OnTheFlySettings,
    RazorSettings,
    ReachSettings,
    ScopeSettings,
)

_TRUST = ("--trust-remote-code", "--no-trust-remote-code")
_NO_VALUE = ("--verify", *_TRUST)
# Flags that are not named like their settings.
_FLAGS = {
    "induction_percent": "--induction",
    "echo_percent": "--echo",
    "sinks": "--sink-tokens",
    "recent": "--recent-tokens",
}

# Settings that say how many heads keep everything.
_COUNTS = ("induction_percent", "echo_percent", "sparsity", "threshold")


# The methods, with the classes of their settings and of their options beside the `CommonOptions`.
METHODS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "razor": (
        "RazorAttention's induction and echo scores, in one pass.",
        (RazorSettings, WindowOptions, BudgetOptions),
    ),
    "duo": (
        "DuoAttention's gates, trained; ranks of torchrun may share the work.",
        (DuoSettings, WindowOptions, PasskeyOptions, RunOptions, BudgetOptions),
    ),
    "onthefly": (
        "The loss of each KV head if it alone is cut, in a few passes.",
        (OnTheFlySettings, WindowOptions, PasskeyOptions, BudgetOptions),
    ),
    "kvzip": (
        "KVzip's scores: the most attention to a text while it is repeated, in a few passes.",
        (KVzipSettings, WindowOptions, BudgetOptions),
    ),
    "reach": (
        "How far mean queries look back by position, in a few passes over text (kvpress).",
        (ReachSettings, WindowOptions, BudgetOptions),
    ),
    "alibi": (
        "The distance that ALiBi heads (BLOOM, MPT, Baichuan) see, by their weights.",
        (ScopeSettings,),  # no budget: the windows follow from the slopes
    ),
}


class MethodGroup(TyperGroup):
    """The methods, and the older form of the command, ``identify MODEL --method METHOD``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = method_first(args)
        return super().parse_args(ctx, args)


def method_first(args: Sequence[str]) -> list[str]:
    """Rewrite ``MODEL --method METHOD ...`` as ``METHOD MODEL ...``; the method may be ``auto``."""
    rest = [word for arg in args for word in (arg.split("=", 1) if "--method=" in arg else [arg])]
    method = "auto"
    if "--method" in rest[:-1]:
        at = rest.index("--method")
        method = rest[at + 1]
        del rest[at : at + 2]
    if method != "auto":
        return [method, *rest]
    models = (
        arg
        for last, arg in zip(["", *rest], rest, strict=False)
        if not arg.startswith("-") and (last[:2] != "--" or "=" in last or last in _NO_VALUE)
    )
    model = next(models, None)
    if model is None:
        return ["razor", *rest]
    meant = nearest(model, METHODS)
    # A hub id has a slash.
    if meant is not None and "/" not in model and not Path(model).expanduser().exists():
        raise ConfigError(f"unknown method {model!r}; did you mean {meant!r}?")
    # Transformers takes seconds to import, and --help needs none of it.
    from razor_dist.models.adapters import is_alibi
    from razor_dist.models.loader import read_config
    from razor_dist.models.registry import config_folder

    trust = [flag for flag in rest if flag in _TRUST][-1:] == [_TRUST[0]]
    config = read_config(config_folder(model), trust_remote_code=trust)
    return ["alibi" if is_alibi(config) else "razor", *rest]


identify = typer.Typer(
    cls=MethodGroup,
    help="Find the retrieval heads of a model and write its head map.",
    subcommand_metavar="METHOD MODEL --out FILE [OPTIONS]",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _check(method: str, common: CommonOptions, settings: Any, own: Mapping[type, Any]) -> None:
    """Raise `ConfigError` for mistakes that show without the model."""
    check_writable(common.out, common.plot)
    if common.plot is not None and common.plot.absolute() == common.out.absolute():
        raise ConfigError(f"--out and --plot both name {common.out}; give two files")
    if method != "duo" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"method {method} runs in one process; only duo uses torchrun's ranks")
    needing = {
        "verify_tokens": common.verify_tokens,
        "verify_window": own[WindowOptions].verify_window,
    }
    budget: BudgetOptions = own[BudgetOptions]
    reads = budget.budget is not None and budget.middle_share > 0
    if method in ("razor", "alibi") and not reads:  # which read no text
        needing["haystack"] = common.haystack
    for name, value in needing.items():
        if not common.verify and value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --verify")
    for field in fields(budget):
        if budget.budget is None and getattr(budget, field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')} needs --budget")
    for name in _COUNTS:
        default = getattr(type(settings), name, None)
        if budget.budget is not None and getattr(settings, name, default) != default:
            flag = _FLAGS.get(name, f"--{name}")
            raise ConfigError(
                f"{flag} is of no use with --budget: bytes decide how many heads keep everything"
            )


def _add(method: str, text: str, classes: tuple[type, ...]) -> None:
    def run(common: CommonOptions, settings: Any, *options: Any) -> None:
        own = {WindowOptions: WindowOptions(), BudgetOptions: BudgetOptions()}
        own |= {type(one): one for one in options}
        _check(method, common, settings, own)
        # Imported here, so that --help does not wait for torch.
        from razor_dist.commands import identify_run

        identify_run.run(method, common, settings, own)

    identify.command(method, help=text)(with_options(CommonOptions, *classes, flags=_FLAGS)(run))


for _name, (_text, _classes) in METHODS.items():
    _add(_name, _text, _classes)
