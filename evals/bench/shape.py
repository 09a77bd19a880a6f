"""Razor against full attention at a model's shape, with random weights and the same kernels.

For models whose weights are missing: time and memory depend on shapes alone. Both engines run
on one rank, one after the other on the same weights, so that the peak memory of each is its own.
Retrieval heads are made up, evenly spread; their share of the KV heads has to be given.

Times are held against what the device was measured to do in the same run (`measure.Rates`), by
the operations and bytes that the planner counts (`razor_dist.plan`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.config.errors import ConfigError
from razor_dist.config.sizes import tokens
from razor_dist.engine.build import make_engine
from razor_dist.engine.capacity import context_length
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.evals.bench.engine import OwnEngine
from razor_dist.evals.bench.measure import (
    BenchRecord,
    Table,
    Timing,
    cost_on,
    measure_ceilings,
    random_tokens,
)
from razor_dist.evals.bench.settings import ShapeBenchSettings
from razor_dist.heads.decision import HeadRoles
from razor_dist.models.loader import dtype_name, model_from_config, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.plan.compute import decode_reads, full_attention, operations
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import load_device
from razor_dist.plan.memory import MemoryPlanner

log = logging.getLogger(__name__)

# Generated in the warm-up: enough that a CUDA graph is recorded and replayed.
_WARM_TOKENS = 4
# Name of a column; its figure, factor and digits; and the name of razor's ratio to full.
_COLUMNS = {
    "prefill, s": ("prefill_seconds", 1, 2, "prefill"),
    "of the matmul ceiling": ("prefill_of_matmul_ceiling", 1, 2, None),
    "decode, ms/token": ("decode_seconds_per_token", 1e3, 2, "decode"),
    "of the bandwidth": ("decode_of_bandwidth", 1, 2, None),
    "peak memory, GB": ("peak_bytes", 1e-9, 2, "peak_memory"),
    "planned, GB": ("planned_bytes", 1e-9, 2, None),
    "KV, GB": ("kv_bytes", 1e-9, 3, "kv"),
}
HEAD = ("tokens", "attention", *_COLUMNS)


def shape_config(name: str) -> PretrainedConfig:
    return read_config(config_folder(name))


def random_model(folder: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    return model_from_config(shape_config(folder), device=device, dtype=dtype)


def engine_around(model: PreTrainedModel, d: Deployment) -> OwnEngine:
    """Return an engine of one rank that no token ends, with steady decode times."""
    roles, comm = HeadRoles(d.head_map.retrieval), Communicator(None)
    built = make_engine(model, d.config, roles, comm, eos_token_ids=())
    return OwnEngine(built, steady=True)


def run(settings: ShapeBenchSettings) -> BenchRecord:
    """Measure the device, then both engines at every length, then the device again."""
    shape_config(settings.shape)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    config = settings.config(max(settings.lengths) + settings.new_tokens)
    device = torch_device(config, 0)
    dtype = torch_dtype(config, device)
    ceilings = measure_ceilings(device, dtype)
    log.info("measured: %s", ceilings)
    torch.manual_seed(settings.seed)
    model = random_model(settings.shape, device, dtype)
    lengths = [measure_length(model, settings, length) for length in settings.lengths]
    engines = [one for length in lengths for one in length["engines"].values()]
    measured = [one for one in engines if "does_not_fit" not in one]
    if not measured:
        raise ConfigError(f"nothing was measured: {engines[0]['does_not_fit']}")
    ceilings = ceilings.or_better(measure_ceilings(device, dtype))
    for one in measured:
        rate = one["operations"] / one["prefill_seconds"]
        one["prefill_of_matmul_ceiling"] = rate / ceilings.products
        rate = one["step_bytes"] / one["decode_seconds_per_token"]
        one["decode_of_bandwidth"] = rate / ceilings.bandwidth
    figures = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": dtype_name(dtype),
        "ceilings": {
            "bytes_read_per_second": ceilings.bandwidth,
            "matmul_operations_per_second": ceilings.products,
        },
        "lengths": lengths,
    }
    return BenchRecord("shape", settings, figures, *_tables(figures, settings))


def prompt_tokens(length: int, new_tokens: int, shape: ModelShape) -> int:
    """Return a prompt's length: of the model's whole context, room for the answer is left."""
    if length == shape.max_positions and not shape.alibi:
        return max(1, length - new_tokens)
    return length


def measure_length(
    model: PreTrainedModel, settings: ShapeBenchSettings, length: int
) -> dict[str, Any]:
    """Measure razor, then full attention, at one length; the ratios are empty without both."""
    shape = ModelShape.from_config(model.config)
    length = prompt_tokens(length, settings.new_tokens, shape)
    prompt = random_tokens(shape.vocab_size, length, settings.seed)
    config, cuda = settings.config(length + settings.new_tokens), model.device.type == "cuda"
    razor = Deployment.of(config, "cuda" if cuda else "cpu", settings.kept)
    engines = {}
    for attention, d in (("razor", razor), ("full", full_attention(razor))):
        log.info("%s, %s tokens", attention, tokens(length))
        engines[attention] = found = measure_engine(model, d, prompt, settings)
        gc.collect()  # an engine's parts know each other; the next one wants the memory
        if cuda:
            torch.cuda.empty_cache()
        if "does_not_fit" in found:
            log.info("does not fit: %s", found["does_not_fit"])
    ratios = {}
    if not any("does_not_fit" in one for one in engines.values()):
        named = [(name, key) for key, _, _, name in _COLUMNS.values() if name]
        ratios = {name: engines["razor"][key] / engines["full"][key] for name, key in named}
    return {"tokens": length, "engines": engines, "razor_over_full": ratios}


def measure_engine(
    model: PreTrainedModel, d: Deployment, prompt: list[int], settings: ShapeBenchSettings
) -> dict[str, Any]:
    """Return an engine's figures, or ``does_not_fit``, a reason."""
    total = len(prompt) + settings.new_tokens
    try:
        context_length(d.config, d.shape)
        # Any device does: those of its numbers that matter to bytes are about several ranks.
        planned = MemoryPlanner(d, load_device("cpu")).at(total, total)
        needed, free = planned.total - planned.weights, psutil.virtual_memory().available
        # Memory that is not there ends a process on CPU; CUDA says so when it is asked for.
        if d.kind == "cpu" and needed > free:
            raise ConfigError(
                f"it needs {needed / 1e9:.1f} GB beside the weights, and {free / 1e9:.1f} are free"
            )
        return {**_timed(model, d, prompt, settings), "planned_bytes": planned.total}
    except ConfigError as error:
        return {"does_not_fit": str(error)}
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error)):
            raise
        return {"does_not_fit": str(error).splitlines()[0]}


def _timed(
    model: PreTrainedModel, d: Deployment, prompt: list[int], settings: ShapeBenchSettings
) -> dict[str, Any]:
    """Time the runs after a short warm-up.

    A warm-up of the whole prompt would take as long as a run, which at a million tokens is minutes;
    kernels are chosen and memory is mapped by one chunk alike.
    """
    with cost_on(model.device) as cost:
        engine = engine_around(model, d)
        engine(prompt[: d.chunked_prefill_size], min(_WARM_TOKENS, settings.new_tokens))
        timing = Timing(d.source)
        for _ in range(settings.repeats):
            timing.runs.append(engine(prompt, settings.new_tokens))
            log.info("%s", timing.runs[-1])
    return {
        **timing.as_json(),
        "kv_bytes": engine.runner.sequences.peak_kv_bytes,  # held at most
        "before_bytes": cost.before_bytes,  # with the weights and no engine
        "peak_bytes": cost.peak_bytes,
        "operations": operations(d, len(prompt)).total,
        # Weights, keys and values that the step in the middle reads.
        "step_bytes": decode_reads(d, len(prompt) + settings.new_tokens // 2),
        "in_graphs": engine.in_graphs,
    }


def _tables(
    figures: Mapping[str, Any], settings: ShapeBenchSettings
) -> tuple[list[Table], list[str]]:
    rows, notes = [list(HEAD)], []
    for length in figures["lengths"]:
        count = tokens(length["tokens"])
        for name, one in length["engines"].items():
            if "does_not_fit" in one:
                rows.append([count, name, "does not fit", *[""] * (len(HEAD) - 3)])
                notes.append(f"{count} tokens, {name}: does not fit: {one['does_not_fit']}")
                continue
            if figures["device"] != "cpu" and not one["in_graphs"]:
                notes.append(f"{count} tokens, {name}: decoded without CUDA graphs")
            cells = [f"{one[key] * factor:.{n}f}" for key, factor, n, _ in _COLUMNS.values()]
            rows.append([count, name, *cells])
        if ratios := length["razor_over_full"]:
            cells = [f"{ratios[name]:.2f}" if name else "" for *_, name in _COLUMNS.values()]
            rows.append([count, "razor / full", *cells])
    ceilings = figures["ceilings"]
    about = (
        f"{figures['device']}, {figures['threads']} threads, {figures['parameters']:,} random "
        f"weights in {figures['dtype']}; {settings.kept:.0%} of the KV heads are retrieval heads, "
        f"window at most {settings.window_max}. Ceilings measured in the same run: "
        f"{ceilings['bytes_read_per_second'] / 1e9:,.1f} GB/s read, "
        f"{ceilings['matmul_operations_per_second'] / 1e12:,.3f} TFLOP/s in a matrix product."
    )
    return [Table(about, rows)], notes
