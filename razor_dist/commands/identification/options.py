"""The flags of ``razor-dist identify``, and which of them belong together."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from razor_dist.config.errors import ConfigError
from razor_dist.files import check_writable

Method = Literal["razor", "duo", "onthefly", "alibi"]

# The options that not every method has, and the methods that have them.
_BELONGS = {
    "induction": ("razor",),
    "echo": ("razor",),
    "tokens": ("razor",),
    "repeats": ("razor",),
    "sparsity": ("duo", "onthefly"),
    "sink_tokens": ("duo", "onthefly"),
    "recent_tokens": ("duo", "onthefly"),
    "passkeys": ("duo", "onthefly"),
    "max_tokens": ("duo", "onthefly"),
    "haystack": ("duo", "onthefly"),
    "samples": ("onthefly",),
    "threshold": ("duo",),
    "steps": ("duo",),
    "learning_rate": ("duo",),
    "l1": ("duo",),
    "zero_stage": ("duo",),
    "checkpoint": ("duo",),
    "checkpoint_every": ("duo",),
    "resume": ("duo",),
    "epsilon": ("alibi",),
    "bound": ("alibi",),
    "context_tokens": ("alibi",),
    "verify_window": ("razor", "duo", "onthefly"),
}


@dataclass(frozen=True, kw_only=True)
class IdentifyOptions:
    """What is asked for: a flag for each field, whose help says what it is."""

    model: Annotated[
        str, typer.Argument(help="smollm2 (embedded), a local folder or a hub id org/name.")
    ]
    out: Annotated[Path, typer.Option(help="Head map to write (JSON).")]
    method: Annotated[
        Literal["auto", "razor", "duo", "onthefly", "alibi"],
        typer.Option(
            help="razor: RazorAttention's induction and echo scores, in one pass. duo: "
            "DuoAttention's gates, trained. onthefly: what each KV head loses if it alone is cut, "
            "in a few passes. alibi: how far each head can see by its weights, of a model biased "
            "by distance. auto: alibi for such a model, razor for others."
        ),
    ] = "auto"
    induction: Annotated[
        float, typer.Option(help="razor: query heads to choose by induction score, in percent.")
    ] = 14.0
    echo: Annotated[
        float, typer.Option(help="razor: query heads to choose by echo score, in percent.")
    ] = 1.0
    tokens: Annotated[
        int, typer.Option(help="razor: random tokens; fewer if the model's context is short.")
    ] = 2500
    repeats: Annotated[int, typer.Option(help="razor: how often they are repeated.")] = 4
    sparsity: Annotated[
        float | None,
        typer.Option(
            help="duo, onthefly: fraction of KV heads to make local, 0 to 1. [default: 0.5, or "
            "0.75 without grouped heads]"
        ),
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option(help="duo, instead: keep the KV heads whose gate is at least this, 0 to 1."),
    ] = None
    sink_tokens: Annotated[
        int, typer.Option(help="duo, onthefly: first tokens that a cut head sees.")
    ] = 128
    recent_tokens: Annotated[
        int, typer.Option(help="duo, onthefly: recent tokens that a cut head sees.")
    ] = 256
    passkeys: Annotated[
        int, typer.Option(help="duo, onthefly: passkeys of 32 words hidden in a sample.")
    ] = 10
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="duo, onthefly: longest sample. [default: the model's context, up to 32000]"
        ),
    ] = None
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="duo, onthefly, --verify: folder of .txt files to hide passkeys and needles in. "
            "[default: Python's language reference; for needles, essays if they are installed]"
        ),
    ] = None
    samples: Annotated[
        int, typer.Option(help="onthefly: samples to measure, one forward pass each.")
    ] = 4
    steps: Annotated[int, typer.Option(help="duo: training steps, one sample each.")] = 2000
    learning_rate: Annotated[float, typer.Option(help="duo: the highest.")] = 0.02
    l1: Annotated[
        float, typer.Option(help="duo: weight of the gates' mean, which draws them to 0.")
    ] = 0.05
    zero_stage: Annotated[
        int, typer.Option(help="duo: 3 shards the frozen weights over the ranks, 0 does not.")
    ] = 0
    checkpoint: Annotated[
        Path | None, typer.Option(help="duo: new folder to keep the run's state in.")
    ] = None
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=1,
            help="duo: steps from one state to the next, and from one line to the next in a log.",
        ),
    ] = 50
    resume: Annotated[
        Path | None,
        typer.Option(help="duo: --checkpoint folder of a run to continue, with its settings."),
    ] = None
    epsilon: Annotated[
        float, typer.Option(help="alibi: attention weights up to this are neglected.")
    ] = 0.001
    bound: Annotated[
        Literal["paper", "strict"],
        typer.Option(
            help="alibi: the scope of RazorAttention's Theorem 1, or one that no input can exceed."
        ),
    ] = "paper"
    context_tokens: Annotated[
        int | None,
        typer.Option(
            help="alibi: heads that see as far keep everything. [default: the model's context]"
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the random tokens and passkeys.")] = 0
    plot: Annotated[Path | None, typer.Option(help="Picture to write as well (PNG).")] = None
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
        typer.Option(
            help="Of each of the 5 documents. [default: twice the least window, 2500 or more, as "
            "the model's context allows]"
        ),
    ] = None
    verify_window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="razor, duo, onthefly: least window of a streaming head. [default: the model's]",
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="auto: fp32 on cpu, bf16 on cuda.")
    ] = "auto"
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False

    def check(self, given: AbstractSet[str]) -> None:
        """Refuse what can be seen to be wrong without a look at the model.

        Parameters
        ----------
        given : set of str
            The fields that the user gave, not left at their defaults.

        Raises
        ------
        ConfigError
            If options do not go together, or a file cannot be written.
        """
        if self.method != "auto":
            self.check_method(given, self.method)
        check_writable(self.out, self.plot)
        if self.method != "duo" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"method {self.method} runs in one process; only duo uses torchrun's ranks"
            )
        if not self.verify and (self.verify_tokens is not None or self.verify_window is not None):
            raise ConfigError("--verify-tokens and --verify-window are options of --verify")

    def check_method(self, given: AbstractSet[str], method: Method) -> None:
        """Refuse options of other methods: ignored in silence, they would seem to have acted.

        Raises
        ------
        ConfigError
            If one is given that the method does not have.
        """
        for name, methods in _BELONGS.items():
            if method in methods or name not in given or (name == "haystack" and self.verify):
                continue
            verifies = ", or to --verify" if name == "haystack" else ""
            raise ConfigError(
                f"--{name.replace('_', '-')} belongs to --method {' and '.join(methods)}"
                f"{verifies}, not to {method}"
            )
