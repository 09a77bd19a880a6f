"""Razor against full attention at a model's shape, with random weights and the same kernels.

For models whose weights are not at hand: time and memory depend on shapes alone. Both engines run
on one rank, one after the other on the same weights, so that the peak memory of each is its own.
Which heads are kept is made up, evenly spread; what a real head map keeps has to be given as a
fraction of KV heads.

Times are held against what the device was measured to do in the same run (`ceilings`), by the
operations and bytes that the planner counts (`razor_dist.plan`).
"""

from __future__ import annotations

import gc
import shlex
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from transformers import PreTrainedModel

from razor_dist.config.errors import ConfigError
from razor_dist.config.ranges import check_least
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sizes import size_name, tokens
from razor_dist.engine.build import make_engine
from razor_dist.engine.capacity import context_length
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.evals.bench_engines import OwnEngine
from razor_dist.evals.bench_shape_results import Length, Measured, ShapeResults
from razor_dist.evals.ceilings import measure_ceilings
from razor_dist.evals.peak import Peak
from razor_dist.evals.random_model import random_model, shape_config
from razor_dist.evals.timing import Run, Say, Timing, random_tokens
from razor_dist.models.loader import dtype_name
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.plan.compute import decode_reads, operations
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import load_device
from razor_dist.plan.memory import MemoryPlanner
from razor_dist.plan.traffic import full_attention

# Generated in the warm-up: enough that a CUDA graph is recorded and replayed.
_WARM_TOKENS = 4


@dataclass(frozen=True)
class ShapeSettings:
    """What is run.

    Attributes
    ----------
    shape : str
        Folder with the model's ``config.json``.
    kept : float
        Fraction of KV heads that keep the whole context with razor, above 0 and at most 1.
    window_max : int
        Longest window of a streaming head; below it, the paper's max(4000, N/5).
    tokens : tuple of int
        Lengths of the prompt, one after the other.
    new_tokens, repeats, seed : int
        As in `razor_dist.evals.timing.BenchSettings`; the seed is of the weights, too.
    device : str
        ``auto``, ``cpu`` or ``cuda``.
    threads : int or None
        torch's own number if None.

    Raises
    ------
    ConfigError
        If a value is out of range, or the folder has no ``config.json``.
    """

    shape: str
    kept: float = 0.3
    window_max: int = 8192
    tokens: tuple[int, ...] = (32768,)
    new_tokens: int = 32
    repeats: int = 3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ConfigError(f"kept is {self.kept}; give a fraction above 0 and at most 1")
        check_least(self, window_max=1)
        shape_config(self.shape)

    def config(self, max_model_len: int) -> EngineConfig:
        """The engine's settings, whichever heads are kept."""
        return EngineConfig(
            model=self.shape,
            device=self.device,
            max_num_seqs=1,
            max_model_len=max_model_len,
            window_min=min(4000, self.window_max),
            window_ratio=5,
            window_max=self.window_max,
        )

    def prompt_tokens(self, length: int, shape: ModelShape) -> int:
        """A prompt's tokens: ``length``, or a few less where the model has no room for an answer.

        A prompt that fills the whole context is shortened by the tokens to be generated.
        """
        if length == shape.max_positions and not shape.alibi:
            return max(1, length - self.new_tokens)
        return length

    @property
    def command(self) -> str:
        """The command line of such a run."""
        options: dict[str, object] = {
            "shape": self.shape,
            "tokens": ",".join(map(size_name, self.tokens)),
            "kept": f"{self.kept:g}",
            "window-max": size_name(self.window_max),
            "new-tokens": self.new_tokens,
            "repeats": self.repeats,
            "seed": self.seed,
            "device": self.device,
            "threads": self.threads,
        }
        given = ((f"--{name}", str(v)) for name, v in options.items() if v is not None)
        return shlex.join(["razor-dist", "bench", *(word for pair in given for word in pair)])


def run(settings: ShapeSettings, say: Say) -> ShapeResults:
    """Measure the device, then both engines at every length, then the device again.

    Parameters
    ----------
    settings : ShapeSettings
    say : callable
        Told of every run as it ends.

    Raises
    ------
    ConfigError
        If nothing could be measured at any length; the message is the first one's.
    ModelError
        If the model cannot be served.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = settings.config(max(settings.tokens) + settings.new_tokens)
    device = torch_device(config, 0)
    dtype = torch_dtype(config, device)
    ceilings = measure_ceilings(device, dtype)
    say(f"measured: {ceilings}")
    torch.manual_seed(settings.seed)
    model = random_model(settings.shape, device, dtype)
    lengths = [_measure_length(model, settings, length, say) for length in settings.tokens]
    reasons = [found for length in lengths for found in length.engines.values()]
    if all(isinstance(found, str) for found in reasons):
        raise ConfigError(f"nothing was measured: {reasons[0]}")
    return ShapeResults(
        settings,
        device.type,
        dtype_name(dtype),
        torch.get_num_threads(),
        sum(parameter.numel() for parameter in model.parameters()),
        ceilings.or_better(measure_ceilings(device, dtype)),
        lengths,
    )


def _measure_length(
    model: PreTrainedModel, settings: ShapeSettings, length: int, say: Say
) -> Length:
    """Razor, then full attention."""
    shape = ModelShape.from_config(model.config)
    prompt = random_tokens(shape.vocab_size, settings.prompt_tokens(length, shape), settings.seed)
    config = settings.config(len(prompt) + settings.new_tokens)
    razor = Deployment.of(config, "cuda" if model.device.type == "cuda" else "cpu", settings.kept)
    engines: dict[str, Measured | str] = {}
    for attention, d in (("razor", razor), ("full", full_attention(razor))):
        name = f"{attention}, {tokens(len(prompt))} tokens"

        def told(line: str, name: str = name) -> None:
            say(f"{name}: {line}")

        engines[attention] = found = _measure(model, d, prompt, settings, told)
        _give_back(model.device)
        if isinstance(found, str):
            told(f"does not fit: {found}")
    return Length(len(prompt), engines)


def _measure(
    model: PreTrainedModel, d: Deployment, prompt: list[int], settings: ShapeSettings, say: Say
) -> Measured | str:
    """One engine's runs; a sentence if it does not fit."""
    total = len(prompt) + settings.new_tokens
    try:
        context_length(d.config, d.shape)
    except ConfigError as error:
        return str(error)
    # Any device does: those of its numbers that matter to bytes are about several ranks.
    planned = MemoryPlanner(d, load_device("cpu")).at(total, total)
    needed, free = planned.total - planned.weights, psutil.virtual_memory().available
    # Memory that is not there ends a process on CPU; CUDA says so when it is asked for.
    if d.kind == "cpu" and needed > free:
        return f"it needs {needed / 1e9:.1f} GB beside the weights, and {free / 1e9:.1f} are free"
    try:
        return _timed(model, d, planned.total, prompt, settings, say)
    except ConfigError as error:
        return str(error)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error)):
            raise
        return str(error).splitlines()[0]


def _timed(
    model: PreTrainedModel,
    d: Deployment,
    planned: int,
    prompt: list[int],
    settings: ShapeSettings,
    say: Say,
) -> Measured:
    """A short warm-up, then the runs.

    A warm-up of the whole prompt would take as long as a run, which at a million tokens is minutes;
    kernels are chosen and memory is mapped by one chunk alike.
    """
    with Peak(model.device) as peak:
        built = make_engine(
            model, d.config, d.decision.retrieval, Communicator(None), eos_token_ids=()
        )
        engine = OwnEngine(built)
        engine(prompt[: d.chunked_prefill_size], min(_WARM_TOKENS, settings.new_tokens))
        runs = []
        for _ in range(settings.repeats):
            runs.append(Run.steady(*engine.trace(prompt, settings.new_tokens)))
            say(str(runs[-1]))
    return Measured(
        runs=Timing(d.decision.source, runs),
        kv_bytes=engine.peak_kv_bytes,
        before_bytes=peak.before,
        peak_bytes=peak.peak,
        planned_bytes=planned,
        operations=operations(d, len(prompt)).total,
        # Of the step in the middle.
        step_bytes=decode_reads(d, len(prompt) + settings.new_tokens // 2),
        in_graphs=engine.in_graphs,
    )


def _give_back(device: torch.device) -> None:
    """Free an engine that is no longer used, so that the next one finds its memory."""
    gc.collect()  # its parts know each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
