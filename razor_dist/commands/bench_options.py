"""The flags of ``razor-dist bench``, and which of them belong together."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import parse_size
from razor_dist.files import check_writable

# Those of one of the two benches only; the rest belong to both.
_STOCK = ("model", "world_sizes")
_SHAPED = ("kept", "window_max", "device", "markdown")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is asked for: a flag for each field, whose help says what it is."""

    model: Annotated[
        str | None, typer.Option(help="smollm2 (embedded, the default), a local folder or hub id.")
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompt: 8K is 8192, 8k is 8000; with --shape several lengths if "
            "you like, such as 128K,1M. Default: 7000, with --shape 32K."
        ),
    ] = None
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated after it.")] = 32
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each engine.")] = 3
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of one rank; several ranks share them. Default: 2, with --shape torch's "
            "own number.",
        ),
    ] = None
    world_sizes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of ranks; the others are compared with the first. Default: 1,8."
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of the prompt's random token ids.")] = 0
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Instead: razor against full attention with random weights at the sizes of this "
            "folder's config.json, one rank; beside what the device can do at most.",
        ),
    ] = None
    kept: Annotated[
        float | None,
        typer.Option(help="With --shape: fraction of KV heads that razor keeps. Default: 0.3."),
    ] = None
    window_max: Annotated[
        str | None, typer.Option(help="With --shape: longest streaming window. Default: 8K.")
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="With --shape: where it runs.")
    ] = None
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --shape: table to write (Markdown)."),
    ] = None
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write (JSON).")] = None

    def check(self, given: AbstractSet[str]) -> None:
        """Refuse what can be seen to be wrong before anything is measured.

        Parameters
        ----------
        given : set of str
            The fields that the user gave, not left at their defaults.

        Raises
        ------
        ConfigError
            If options do not go together, or a file cannot be written.
        """
        check_writable(*self.files)
        if self.json is not None and self.json == self.markdown:
            raise ConfigError(f"json and markdown are both {self.json}; give two files")
        for name in _SHAPED if self.shape is None else _STOCK:
            if name in given:
                what = "an option of --shape only" if self.shape is None else "no option of --shape"
                raise ConfigError(f"{name} is {what}")

    @property
    def files(self) -> list[Path]:
        """What is to be written."""
        return [file for file in (self.json, self.markdown) if file is not None]

    def settings(self) -> dict[str, Any]:
        """What the bench is told: parsed, and without what is left to its defaults.

        Raises
        ------
        ConfigError
            If a size or a list of sizes makes no sense.
        """
        settings: dict[str, Any] = {
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "threads": self.threads,
            "seed": self.seed,
            "tokens": None if self.tokens is None else _lengths(self.tokens),
        }
        if self.shape is None:
            settings |= {"model": self.model}
            if self.tokens is not None:
                settings["tokens"] = _one(settings["tokens"])
            if self.world_sizes is not None:
                settings["world_sizes"] = _sizes(self.world_sizes)
        else:
            settings |= {"shape": self.shape, "kept": self.kept, "device": self.device}
            if self.window_max is not None:
                settings["window_max"] = parse_size(self.window_max)
        return {name: value for name, value in settings.items() if value is not None}


def _lengths(text: str) -> tuple[int, ...]:
    """The sizes in ``--tokens``."""
    lengths = tuple(parse_size(word) for word in text.split(","))
    if min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise ConfigError(f"tokens is {text!r}; give lengths of at least 1, each once")
    return lengths


def _one(lengths: tuple[int, ...]) -> int:
    if len(lengths) > 1:
        raise ConfigError("tokens may be several lengths with --shape only; give one")
    return lengths[0]


def _sizes(text: str) -> tuple[int, ...]:
    """The numbers in ``--world-sizes``."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"world_sizes is {text!r}; give positive integers such as 1,8")
    sizes = tuple(int(word) for word in words)
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"world_sizes is {text!r}; give each number once")
    return sizes
