"""Settings of the benches; each field is a flag of ``razor-dist bench``.

Imported for ``--help``, so nothing here may wait for torch.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from typer import Argument, Option

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import parse_size
from razor_dist.config.sources import build_config
from razor_dist.config.validation import check_least
from razor_dist.files import check_writable

# A passkey sample recalls ten passkeys of 32 words, as in DuoAttention's paper.
RECALLED_TOKENS = 320
# Of engines that are timed: what is measured is read, and each token takes a step.
PLAIN: Mapping[str, Any] = MappingProxyType({"prefix_cache": False, "speculative_config": None})
# Fields that name files to write.
_FILES = ("json", "markdown", "plot", "answers")

# Engines of others by their names, and the packages that they come in.
PEERS = {"openvino": "openvino-genai", "llama-cpp": "llama-cpp-python"}

Decode = Literal["replicated", "tensor"]
Device = Annotated[Literal["auto", "cpu", "cuda"], Option(help="Where it runs.")]
NewTokens = Annotated[int, Option(min=2, help="Tokens generated after it.")]
Repeats = Annotated[int, Option(min=1, help="Timed runs of each engine.")]
Seed = Annotated[int, Option(min=0, help="Of the prompt's random token ids.")]
Threads = Annotated[int, Option(min=1, help="Threads of one rank; several ranks share them.")]
WorldSize = Annotated[int, Option(min=1, help="Number of ranks.")]
OwnThreads = Annotated[int | None, Option(min=1, help="Default: torch's own number.")]
Folder = Annotated[
    str | None,
    Option(metavar="FOLDER", help="Instead: random weights at the sizes of this config.json."),
]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of every bench; making one raises `ConfigError` if a value makes no sense."""

    # The field that is an argument, not a flag.
    argument: ClassVar[str | None] = None

    @property
    def files(self) -> tuple[Path | None, ...]:
        """Files to write: JSON, Markdown, and others if the bench has them."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """Return the settings by name, without the files."""
        given = dataclasses.asdict(self)
        # JSON has no infinity.
        return {k: "inf" if v == math.inf else v for k, v in given.items() if k not in _FILES}

    def command(self, bench: str) -> str:
        """Return the command line of these settings, defaults spelled out."""
        values, words = self.values(), ["razor-dist", "bench", bench]
        if self.argument is not None:
            words.append(str(values.pop(self.argument)))
        for name, value in values.items():
            flag = "--" + name.replace("_", "-")
            if value is not None and value is not False:
                words += [flag] if value is True else [flag, str(value)]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class FileBenchSettings(BenchSettings):
    json: Annotated[Path | None, Option(metavar="FILE", help="Figures to write.")] = None
    markdown: Annotated[Path | None, Option(metavar="FILE", help="Tables to write.")] = None

    def __post_init__(self) -> None:
        check_writable(*self.files)
        files = [file for file in self.files if file is not None]
        if twice := {file for file in files if files.count(file) > 1}:
            raise ConfigError(f"{min(twice)} is given twice; give two files")

    @property
    def files(self) -> tuple[Path | None, ...]:
        return tuple(getattr(self, name, None) for name in _FILES)


@dataclass(frozen=True, kw_only=True)
class PromptBenchSettings(FileBenchSettings):
    one_length: ClassVar[bool] = True
    tokens: Annotated[str, Option(help="Tokens of the prompt: 8K is 8192, 8k is 8000.")] = "7000"
    new_tokens: NewTokens = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "ranks", "busy_processes", "counts"):
            getattr(self, name, None)  # its own error, if what it is made of is no list of sizes
        if self.one_length and len(self.lengths) > 1:
            raise ConfigError(f"tokens is {self.tokens!r}; this bench takes one length")

    @property
    def lengths(self) -> tuple[int, ...]:
        return _sizes("tokens", self.tokens)

    @property
    def prompt_tokens(self) -> int:
        """The one length, or the longest."""
        return max(self.lengths)


@dataclass(frozen=True, kw_only=True)
class ModelBenchSettings(PromptBenchSettings):
    """Settings of benches that compare engines of one model, alone and as ranks."""

    model: Annotated[str, Option(help="smollm2 (embedded), a local folder or hub id.")] = "smollm2"
    world_sizes: Annotated[
        str, Option(help="Numbers of ranks, compared with the first; none: this process alone.")
    ] = "1,8"
    repeats: Repeats = 3
    seed: Seed = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return () if self.world_sizes == "none" else _sizes("world_sizes", self.world_sizes)


@dataclass(frozen=True, kw_only=True)
class EngineBenchSettings(ModelBenchSettings):
    threads: Threads = 2
    int8: Annotated[
        bool,
        Option(
            "--int8",
            help="Also razor with weights, keys and values of 8 bits, or keys and values of 4.",
        ),
    ] = False
    peers: Annotated[
        str | None, Option(help="Other engines beside ours: openvino,llama-cpp (extra: peers).")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.peer_names if name not in PEERS]:
            raise ConfigError(f"peers has {unknown[0]!r}; there are {', '.join(PEERS)}")
        if self.peers and self.model != "smollm2":
            raise ConfigError(
                f"peers read the embedded model's GGUF file, but model is {self.model!r}; leave "
                "one of them out"
            )

    @property
    def peer_names(self) -> list[str]:
        return self.peers.split(",") if self.peers else []

    def config(
        self,
        attention: str,
        world_size: int = 1,
        decode: Decode = "replicated",
        dtypes: Mapping[str, str] = MappingProxyType({}),
    ) -> EngineConfig:
        """Return the engine's settings; those not named here have the model's defaults."""
        return build_config(
            EngineConfig,
            model=self.model,
            attention=attention,
            world_size=world_size,
            decode=decode,
            threads=max(1, self.threads // world_size),
            **PLAIN,
            **dtypes,
        )


@dataclass(frozen=True, kw_only=True)
class BatchBenchSettings(PromptBenchSettings):
    """Settings of ``bench batch``; the embedded model."""

    tokens: Annotated[str, Option(help="Tokens of each prompt.")] = "500"
    new_tokens: NewTokens = 64
    answers_at_once: Annotated[str, Option(help="Numbers of answers at once.")] = "1,8,16,32"
    repeats: Repeats = 3
    world_size: WorldSize = 1
    threads: Threads = 2
    openvino: Annotated[bool, Option("--openvino", help="Also OpenVINO (extra: peers).")] = False
    seed: Seed = 0

    @property
    def counts(self) -> tuple[int, ...]:
        return _sizes("answers_at_once", self.answers_at_once)


@dataclass(frozen=True, kw_only=True)
class BusyBenchSettings(ModelBenchSettings):
    one_length: ClassVar[bool] = False
    tokens: Annotated[str, Option(help="Tokens of the prompts, such as 3000,7000.")] = "3000"
    repeats: Repeats = 1
    busy: Annotated[str, Option(help="Numbers of processes that compute beside it.")] = "1,2,4"
    world_sizes: Annotated[str, Option(help="Numbers of our ranks.")] = "1,2,8"

    @property
    def busy_processes(self) -> tuple[int, ...]:
        """Numbers of busy processes: none first, which the others are compared with."""
        return (0, *_sizes("busy", self.busy))


@dataclass(frozen=True, kw_only=True)
class PrefixBenchSettings(PromptBenchSettings):
    load: Annotated[
        Literal["questions", "kill", "needle", "zipf", "contexts", "needle-contexts", "pins"],
        Option(
            help="Questions and turns; the same store after a kill -9; that with the needle model; "
            "a pool that is too small; by a context's handle and by its text; that with the needle "
            "model; memory while contexts come and go."
        ),
    ] = "questions"
    world_size: WorldSize = 1
    new_tokens: NewTokens = 16


@dataclass(frozen=True, kw_only=True)
class SourcesBenchSettings(PromptBenchSettings):
    world_size: WorldSize = 1
    new_tokens: NewTokens = 48
    repeats: Annotated[int, Option(min=1, help="Answers with sources, and as many without.")] = 8


@dataclass(frozen=True, kw_only=True)
class RanksBenchSettings(PromptBenchSettings):
    """Settings of benches of the embedded model on several numbers of ranks."""

    world_sizes: Annotated[str, Option(help="Numbers of ranks.")] = "1,8"

    @property
    def ranks(self) -> tuple[int, ...]:
        return _sizes("world_sizes", self.world_sizes)


@dataclass(frozen=True, kw_only=True)
class DraftsBenchSettings(RanksBenchSettings):
    tokens: Annotated[str, Option(help="Tokens of the document: 8K is 8192, 8k is 8000.")] = "5000"
    new_tokens: NewTokens = 200
    repeats: Repeats = 3
    world_sizes: Annotated[str, Option(help="Numbers of ranks; several share short steps.")] = "1,8"
    threads: Threads = 2


@dataclass(frozen=True, kw_only=True)
class ShapeBenchSettings(PromptBenchSettings):
    argument: ClassVar[str | None] = "shape"
    one_length: ClassVar[bool] = False
    shape: Annotated[str, Argument(metavar="FOLDER", help="With a config.json.")]
    kept: Annotated[float, Option(help="Fraction of KV heads that are retrieval heads.")] = 0.3
    window_max: Annotated[str, Option(help="Longest window of a streaming head.")] = "8K"
    tokens: Annotated[str, Option(help="Lengths of the prompt, such as 128K,1M.")] = "32K"
    repeats: Repeats = 3
    seed: Seed = 0
    device: Device = "auto"
    threads: OwnThreads = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.kept <= 1:
            raise ConfigError(f"kept is {self.kept}; give a fraction above 0 and at most 1")
        _ = self.config(1)

    def config(self, max_model_len: int) -> EngineConfig:
        """Return the engine's settings; the window is the paper's max(4000, N/5), but bounded."""
        window_max = parse_size(self.window_max)
        if window_max < 1:
            raise ConfigError(f"window_max must be at least 1, got {window_max}")
        return EngineConfig(
            model=self.shape,
            device=self.device,
            max_num_seqs=1,
            max_model_len=max_model_len,
            window_min=min(4000, window_max),
            window_ratio=5,
            window_max=window_max,
            **PLAIN,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeBenchSettings(FileBenchSettings):
    model: Annotated[
        str | None, Option(help="smollm2 (embedded, the default), a local folder or hub id.")
    ] = None
    shape: Folder = None
    tokens: Annotated[
        int, Option(help="Random tokens of the probe, whatever the model's context.")
    ] = 2500
    repeats: Annotated[int, Option(help="How often they are repeated.")] = 4
    training: Annotated[
        bool, Option("--training", help="Also steps of DuoAttention's gate training.")
    ] = False
    train_tokens: Annotated[int, Option(help="With --training: tokens of each sample.")] = 32768
    steps: Annotated[int, Option(help="With --training: steps.")] = 100
    threads: OwnThreads = None
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], Option(help="auto: fp32 on cpu, bf16 on cuda.")
    ] = "auto"
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and self.shape is not None:
            raise ConfigError("give --model or --shape, not both")
        check_least(self, steps=1, tokens=2, repeats=2, train_tokens=RECALLED_TOKENS + 1)

    @property
    def source(self) -> str:
        """Name of the model, or the folder of its shape."""
        return self.shape or self.model or "smollm2"


@dataclass(frozen=True, kw_only=True)
class GpuBenchSettings(BenchSettings):
    out: Annotated[Path, Option(metavar="FOLDER", help="For figures, page and logs.")]
    device: Device = "auto"
    minutes: Annotated[float, Option(min=0.1, help="Time for all parts together.")] = 9.0
    patience: Annotated[float, Option(min=1, help="Times the time that each part may take.")] = 1.0

    @property
    def files(self) -> tuple[Path | None, ...]:
        return self.out / "gpu.json", self.out / "gpu.md"


def _sizes(name: str, text: str) -> tuple[int, ...]:
    with suppress(ConfigError):
        sizes = tuple(map(parse_size, text.split(",")))
        if min(sizes) > 0 and len(set(sizes)) == len(sizes):
            return sizes
    raise ConfigError(
        f"{name} is {text!r}; give positive numbers such as 1,8 or 8K,1M (8K is 8192, 8k is 8000), "
        "each once"
    )
