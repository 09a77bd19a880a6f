"""The parts of ``razor-dist bench gpu``, in the order of what they decide."""

from __future__ import annotations

import functools
import itertools
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import razor_dist
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.sampler import Draw, sample
from razor_dist.evals.bench import one_of_eight, shape
from razor_dist.evals.bench.attention import GROUP, HEAD_DIM, measure_attention, recorded
from razor_dist.evals.bench.engine import greedy
from razor_dist.evals.bench.gpu import Bench, Parts, Skipped
from razor_dist.evals.bench.gpu_tests import run_tests
from razor_dist.evals.bench.measure import (
    CeilingSizes,
    Rates,
    Table,
    fastest,
    measure_ceilings,
    random_tokens,
)
from razor_dist.evals.bench.one_of_eight import few_layers
from razor_dist.evals.bench.settings import ShapeBenchSettings
from razor_dist.evals.bench.sweep import sweep
from razor_dist.kernels import attend
from razor_dist.kernels.chosen import Shard, attend_chosen, fixed, largest
from razor_dist.kernels.compiled import SWITCH
from razor_dist.plan.deployment import Deployment

PartResult = tuple[dict[str, Any], list[Table]]

_PACKAGE = Path(razor_dist.__file__).parent
_OPS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_PACKAGES = ("torch", "triton", "transformers", "flash-attn")
_NVIDIA_SMI = "name,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.used"
_LAUNCHES = 1000
# Of a copying query at 8,191 tokens and a share of 1/32, and the same at 4,096 (docs/sparse.md).
_CHOSEN = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured; small on CPU, to see that it works."""

    folder: str  # of the model's shape
    layers: int  # of it that are run
    few_layers: int  # for a prompt's last chunk; they are scaled to all of the shape's
    context: int  # tokens of a prompt of eight ranks
    chunks: tuple[int, ...]  # tokens of a rank in the last chunk of it
    keys: tuple[int, ...]  # of decode attention alone; the first is swept
    queries: tuple[int, int]  # of prefill attention, and its keys
    choosing: tuple[tuple[int, int], ...]  # queries that choose blocks, and their keys
    prompt: str  # of one rank, end to end
    vocabulary: int
    batches: tuple[int, ...]  # sequences of a rank's decode step
    new_tokens: int
    ceilings: CeilingSizes


_SHAPES = _PACKAGE / "configs" / "shapes"
CUDA = Sizes(
    folder=str(_SHAPES / "glm-4-9b-chat-1m"),
    layers=40,
    few_layers=5,  # have retrieval heads as all 40: 0.3 of the KV heads
    context=1 << 20,
    chunks=(1 << 10, 13 << 10, 128 << 10),  # beside an answer, by time, and alone
    keys=(128 << 10, 256 << 10, 512 << 10, 1 << 20),
    queries=(32 << 10, 128 << 10),
    choosing=((1, 128 << 10), (1 << 10, 128 << 10), (8 << 10, 128 << 10)),
    prompt="128K",
    vocabulary=151_552,
    batches=(1, 8),
    new_tokens=32,
    ceilings=CeilingSizes(2 << 30, 8192, seconds=0.3),
)
CPU = Sizes(
    folder=str(_SHAPES / "glm-quarter"),
    layers=2,
    few_layers=2,
    context=2048,
    chunks=(32, 256),
    keys=(256,),
    queries=(64, 1024),
    choosing=((1, 2048), (16, 2048)),
    prompt="256",
    vocabulary=37_888,
    batches=(1, 2),
    new_tokens=4,
    ceilings=CeilingSizes(32 << 20, 256, seconds=0.02),
)


def sizes(bench: Bench) -> Sizes:
    return CUDA if bench.cuda else CPU


def versions(bench: Bench) -> Iterator[PartResult]:
    """Report versions, the device's properties and clocks, and the schemas of the attention ops."""
    found = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if bench.cuda:
        found["device"] = str(torch.cuda.get_device_properties(bench.device))
        found["nvidia-smi"] = _nvidia_smi()
    for name in _OPS:
        packet = getattr(torch.ops.aten, name, None)
        found[name] = "not in this torch" if packet is None else str(packet.default._schema)
    yield {"versions": found}, [Table("Versions and schemas:", [["", ""], *found.items()], "left")]


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


@functools.cache
def ceilings_of(device: torch.device) -> Rates:
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    return measure_ceilings(device, dtype, (CUDA if cuda else CPU).ceilings)


def ceilings(bench: Bench) -> Iterator[PartResult]:
    """Measure what the planner assumes: bytes read and copied, a product, a small kernel."""
    device, seconds = bench.device, sizes(bench).ceilings.seconds
    most = ceilings_of(device)
    source = torch.ones(sizes(bench).ceilings.buffer_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / fastest(lambda: target.copy_(source), device, seconds)
    number = torch.zeros(1, device=device)

    def launches() -> Tensor:
        for _ in range(_LAUNCHES):
            number.add_(1)
        return number

    kernels = {"eager": fastest(launches, device, seconds) / _LAUNCHES}
    if bench.cuda:
        kernels["in a graph"] = fastest(recorded(launches, device), device, seconds) / _LAUNCHES
    figures = {
        "bytes_read_per_second": most.bandwidth,
        "bytes_copied_per_second": copied,
        "matmul_operations_per_second": most.products,
        "seconds_per_kernel": kernels,
    }
    rows = [
        ["", ""],
        ["read, GB/s", f"{most.bandwidth / 1e9:,.0f}"],
        ["read and written by a copy, GB/s", f"{copied / 1e9:,.0f}"],
        ["matrix product, TFLOP/s", f"{most.products / 1e12:,.2f}"],
        *([f"a kernel of one number, {how}, µs", f"{1e6 * s:.2f}"] for how, s in kernels.items()),
    ]
    yield figures, [Table("Ceilings:", rows)]


def decode(bench: Bench) -> Iterator[PartResult]:
    """Decode attention alone: every path, then our kernel's constants."""
    yield measure_attention(
        bench.device, ceilings_of(bench.device), (1, 2), 1, sizes(bench).keys[0]
    )
    if find_spec("triton") is None:
        raise Skipped("the sweep needs triton")
    yield from sweep(bench, sizes(bench).keys)


def prefill(bench: Bench) -> Iterator[PartResult]:
    figures, tables = measure_attention(
        bench.device, ceilings_of(bench.device), (1,), *sizes(bench).queries
    )
    yield {"attention": figures}, tables


def chosen_blocks(bench: Bench) -> Iterator[PartResult]:
    """Time one retrieval head under `retrieval_share`, beside attention to all of its keys."""
    given, device = sizes(bench), bench.device
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    slow, scale = torch.arange(HEAD_DIM // 2, device=device), HEAD_DIM**-0.5
    for queries, keys in given.choosing:
        k, v = (torch.randn(1, keys, HEAD_DIM, device=device).to(dtype) for _ in "kv")
        shard = Shard.of([range(keys)], keys, device)
        blocks = len(shard.edges) - 1
        q = torch.randn(1, GROUP, queries, HEAD_DIM, device=device).to(dtype)
        slower, at = q[..., slow].float(), torch.arange(keys - queries, keys, device=device)
        picked = torch.rand(1, blocks, queries, device=device) < _CHOSEN / blocks
        of = functools.partial(attend_chosen, q, k, v, shard=shard, positions=at, scale=scale)
        calls: dict[str, Callable[[], object]] = {
            "attention to all keys": functools.partial(attend, q, k, v, scale=scale),
            "estimates of all blocks": functools.partial(largest, slower, k, slow, shard, at),
            "what is always read": functools.partial(of, chosen=fixed(at, blocks)[None]),
            f"{_CHOSEN} chosen blocks a query": functools.partial(of, chosen=picked),
        }
        seconds = given.ceilings.seconds
        found = {name: fastest(call, device, seconds) for name, call in calls.items()}
        rows = [["", "µs"], *([name, f"{1e6 * s:,.0f}"] for name, s in found.items())]
        title = f"{queries:,} queries that choose from {keys:,} keys, G = {GROUP}, D = {HEAD_DIM}:"
        yield {f"queries_{queries}": found}, [Table(title, rows)]


def rank_decode(bench: Bench) -> Iterator[PartResult]:
    """One rank of eight at the whole context: a token of one sequence, and of eight."""
    given = sizes(bench)
    steps = (given.context, given.batches, given.new_tokens)
    with few_layers(given.folder, given.layers) as folder:
        for found, table, rank in one_of_eight.decode(bench, folder, *steps):
            batch = found["batch"]
            yield {f"batch_{batch}": found}, [table]
            if bench.is_late:
                return
            kernels, profiled = step_profile(bench, rank.runner, rank.step, f"Batch {batch}")
            yield {f"profile_{batch}": kernels}, [profiled]
            if bench.is_late:
                return


def rank_prefill(bench: Bench) -> Iterator[PartResult]:
    """The last chunk of the same rank's prompt."""
    given = sizes(bench)
    chunks = (given.context, given.chunks, given.few_layers)
    for found, table in one_of_eight.prefill(bench, given.folder, *chunks):
        yield {f"tokens_{found['tokens']}": found}, [table]


def model_shape(bench: Bench) -> Iterator[PartResult]:
    """A model of these sizes on one rank, end to end; and the kernels of one of its steps."""
    given = sizes(bench)
    kind: Literal["cuda", "cpu"] = "cuda" if bench.cuda else "cpu"
    with few_layers(given.folder, given.layers) as folder:
        settings = ShapeBenchSettings(
            shape=folder, tokens=given.prompt, device=kind, new_tokens=given.new_tokens
        )
        config = settings.config(settings.lengths[0] + settings.new_tokens + 1)
        d = Deployment.of(config, kind, settings.kept)
        model = shape.random_model(folder, bench.device, d.dtype)
    engine = shape.engine_around(model, d)
    prompt = random_tokens(engine.vocab_size, settings.lengths[0], settings.seed)
    engine(prompt[: d.chunked_prefill_size], min(4, settings.new_tokens))  # loads and records
    tokens = engine.stream(prompt, settings.new_tokens + 1)
    run = engine.timed(itertools.islice(tokens, settings.new_tokens))
    graphs = engine.runner.graphs
    figures = {
        "tokens": len(prompt),
        "prefill_seconds": run.prefill_seconds,
        "decode_seconds_per_token": run.decode_seconds,
        "in_graphs": engine.in_graphs,
        "replay_differs_by": None if graphs is None else graphs.difference,
    }
    head = ["tokens", "prefill, s", "decode, ms/token", "in graphs", "differs by"]
    cells = [f"{len(prompt):,}", f"{run.prefill_seconds:.2f}", f"{1e3 * run.decode_seconds:.2f}"]
    cells += [str(engine.in_graphs), f"{graphs.difference if graphs else 0:.0e}"]
    yield figures, [Table(f"{Path(given.folder).name}, razor, one rank:", [head, cells])]
    if bench.is_late:
        return
    name = f"One rank, {len(prompt):,} tokens"
    kernels, table = step_profile(bench, engine.runner, lambda: next(tokens), name)
    yield {"profile": kernels}, [table]


def step_profile(
    bench: Bench, runner: ModelRunner, step: Callable[[], object], what: str
) -> tuple[dict[str, Any], Table]:
    """The kernels of one decode step, or the ops on CPU, by name."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.cuda else [])]
    with profile(activities=activities) as profiled:
        step()
    count, micro = Counter[str](), Counter[str]()
    for event in profiled.events():
        leaf = event.name.startswith("aten::") and not event.cpu_children
        if event.device_type == DeviceType.CUDA if bench.cuda else leaf:
            count[event.name] += 1
            micro[event.name] += round(event.time_range.elapsed_us())
    launches, layers = sum(count.values()), runner.shape.layers
    replayed = "" if runner.graphs is not None and runner.graphs.enabled else "not "
    rows = [["kernel" if bench.cuda else "op", "count", "µs"]]
    rows += [[name[:80], str(count[name]), f"{us:,}"] for name, us in micro.most_common(16)]
    title = (
        f"{what}: one step, {replayed}replayed from a recording: {launches:,} launches, "
        f"{launches / layers:.1f} a layer, {sum(micro.values()) / 1e3:.2f} ms:"
    )
    figures = {
        "launches": launches,
        "launches_per_layer": launches / layers,
        "microseconds": micro,
        "count": count,
    }
    return figures, Table(title, rows)


def sampler(bench: Bench) -> Iterator[PartResult]:
    """Time the host between two steps: logits to host memory, and a token of each row."""
    given, found, rows = sizes(bench), {}, [["", "batch 1, µs", "batch 8, µs"]]
    kinds = {
        "greedy": greedy(1),
        "temperature 0.8, top_p 0.95": replace(greedy(1), temperature=0.8, top_p=0.95),
    }
    for batch in (1, 8):
        logits = torch.randn(batch, given.vocabulary, device=bench.device)
        draws = [Draw(seed, 0) for seed in range(batch)]
        calls: dict[str, Callable[[], object]] = {"logits to host memory": logits.cpu} | {
            name: functools.partial(sample, logits, [params] * batch, draws)
            for name, params in kinds.items()
        }
        for name, call in calls.items():
            found[f"{name}, batch {batch}"] = fastest(call, bench.device, given.ceilings.seconds)
    for name in ("logits to host memory", *kinds):
        rows.append([name, *(f"{1e6 * found[f'{name}, batch {n}']:.0f}" for n in (1, 8))])
    yield {"seconds": found}, [Table(f"Sampling from {given.vocabulary:,} tokens:", rows)]


# Files that have tests for a GPU, the shortest first: collecting others would need more packages.
KERNEL_TESTS = ("tests/test_kernels_decode.py", "tests/test_kernels_chosen.py")
TESTS = (
    "tests/heads/test_razor.py",
    "tests/test_cuda.py",
    "tests/engine/test_graph.py",
    "tests/test_kernels.py",
)


def correct(bench: Bench) -> Iterator[PartResult]:
    """Compare the compiled decode kernels with float64: if they are wrong, no figure counts."""
    # They call no operation of CPUs, whose compilation takes 20 s.
    return run_tests(bench, KERNEL_TESTS, env={SWITCH: "0"})


def gpu_tests(bench: Bench) -> Iterator[PartResult]:
    return run_tests(bench, TESTS)


PARTS: Parts = {
    "versions": (versions, 30),
    "correct": (correct, 150),
    "ceilings": (ceilings, 30),
    "decode": (decode, 120),
    "rank decode": (rank_decode, 90),
    "rank prefill": (rank_prefill, 60),
    "shape": (model_shape, 100),
    "prefill": (prefill, 45),
    "chosen blocks": (chosen_blocks, 30),
    "sampler": (sampler, 20),
    "tests": (gpu_tests, 540),
}
