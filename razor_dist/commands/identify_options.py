"""Options of ``razor-dist identify`` beside the methods' own settings; each field is a flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from typing_extensions import Doc


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
    rope_scaling: Annotated[
        str | None,
        Doc("YaRN, as serve has it: a map is for the frequencies that it was made with."),
    ] = None
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
class BudgetOptions:
    """Options by which bytes decide, instead of a method's own rule."""

    budget: Annotated[
        str | None,
        Doc(
            "Bytes of a sequence's keys and values, such as 30M: they decide how many heads keep "
            "everything, and give the others windows of their own."
        ),
    ] = None
    budget_tokens: Annotated[
        str | None, Doc("Length of the sequence. [default: the model's context]")
    ] = None
    short_window: Annotated[
        int | None, Doc("Window of most heads, in tokens. [default: the settings' at that length]")
    ] = None
    middle_window: Annotated[
        int | None,
        Doc(
            "Window of heads that give most attention to what the short one drops. [default: 2, "
            "4 or 8 times the short one: the one that drops least, at most half of --mass-tokens]"
        ),
    ] = None
    middle_share: Annotated[
        float,
        Doc("Of the bytes beyond short windows, the part for middle ones; 0: two classes only."),
    ] = 0.5
    mass_tokens: Annotated[
        int,
        Doc(
            "Tokens of each of two texts that attention is seen on: twice the longest window or "
            "more."
        ),
    ] = 4096


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
