"""``razor-dist identify``: find a model's retrieval heads and write its head map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typing_extensions import Doc

from razor_dist.commands.options import with_options
from razor_dist.config.errors import ConfigError
from razor_dist.config.validation import nearest
from razor_dist.files import check_writable
from razor_dist.identify.settings import DuoSettings, OnTheFlySettings, RazorSettings, ScopeSettings

_NO_VALUE = ("--verify", "--trust-remote-code", "--no-trust-remote-code")
# Flags that are not named like their settings.
_FLAGS = {
    "induction_percent": "--induction",
    "echo_percent": "--echo",
    "sinks": "--sink-tokens",
    "recent": "--recent-tokens",
}


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    model: Annotated[
        str, typer.Argument(help="smollm2 (embedded), a local folder or a hub id org/name.")
    ]
    out: Annotated[Path, typer.Option(help="Head map to write (JSON).")]
    plot: Annotated[Path | None, Doc("Picture to write as well (PNG).")] = None
    seed: Annotated[int, Doc("Of random tokens, passkeys and needles.")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Doc("Where the model runs.")] = "auto"
    dtype: Annotated[Literal["auto", "fp32", "bf16"], Doc("auto: fp32 on cpu, bf16 on cuda.")] = (
        "auto"
    )
    trust_remote_code: Annotated[bool, Doc("Run Python code that comes with the model.")] = False
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Then ask for needles in documents, with full attention and with the new map, and "
            "record what it loses.",
        ),
    ] = False
    verify_tokens: Annotated[
        int | None,
        Doc(
            "Of each of the 5 documents. [default: twice the least window, 2500 or more, as the "
            "model's context allows]"
        ),
    ] = None
    haystack: Annotated[
        Path | None,
        Doc(
            "Folder of .txt files to hide passkeys or needles in. [default: Python's language "
            "reference; for needles, essays if they are installed]"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Options of the methods whose maps leave the window to the settings."""

    verify_window: Annotated[
        int | None,
        Doc("Least window of a streaming head in --verify, in tokens. [default: the model's]"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions:
    passkeys: Annotated[int, Doc("Passkeys of 32 words hidden in a sample.")] = 10
    max_tokens: Annotated[
        int | None, Doc("Longest sample. [default: the model's context, up to 32000]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    checkpoint: Annotated[Path | None, Doc("New folder to keep the run's state in.")] = None
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=1, help="Steps from one state to the next, and from one line to the next in a log."
        ),
    ] = 50
    resume: Annotated[
        Path | None, Doc("--checkpoint folder of a run to continue, with its settings.")
    ] = None


# The methods, with the classes of their settings and of their options beside the `CommonOptions`.
METHODS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "razor": (
        "RazorAttention's induction and echo scores, in one pass.",
        (RazorSettings, WindowOptions),
    ),
    "duo": (
        "DuoAttention's gates, trained; ranks of torchrun may share the work.",
        (DuoSettings, WindowOptions, PasskeyOptions, RunOptions),
    ),
    "onthefly": (
        "The loss of each KV head if it alone is cut, in a few passes.",
        (OnTheFlySettings, WindowOptions, PasskeyOptions),
    ),
    "alibi": (
        "The distance that ALiBi heads (BLOOM, MPT, Baichuan) see, by their weights.",
        (ScopeSettings,),
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

    return ["alibi" if is_alibi(read_config(config_folder(model))) else "razor", *rest]


identify = typer.Typer(
    cls=MethodGroup,
    help="Find the retrieval heads of a model and write its head map.",
    subcommand_metavar="METHOD MODEL --out FILE [OPTIONS]",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _check(method: str, common: CommonOptions, own: Mapping[type, Any]) -> None:
    """Raise `ConfigError` for what can be seen to be wrong without a look at the model."""
    check_writable(common.out, common.plot)
    if method != "duo" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"method {method} runs in one process; only duo uses torchrun's ranks")
    needing = {
        "verify_tokens": common.verify_tokens,
        "verify_window": own[WindowOptions].verify_window,
    }
    if PasskeyOptions not in own:
        needing["haystack"] = common.haystack
    for name, value in needing.items():
        if not common.verify and value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --verify")


def _add(method: str, text: str, classes: tuple[type, ...]) -> None:
    def run(common: CommonOptions, settings: Any, *options: Any) -> None:
        own = {WindowOptions: WindowOptions()} | {type(one): one for one in options}
        _check(method, common, own)
        # Imported here, so that --help does not wait for torch.
        from razor_dist.commands import identify_run

        identify_run.run(method, common, settings, own)

    identify.command(method, help=text)(with_options(CommonOptions, *classes, flags=_FLAGS)(run))


for _name, (_text, _classes) in METHODS.items():
    _add(_name, _text, _classes)
