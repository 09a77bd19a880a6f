"""The first nine minutes on a GPU: every path that only CUDA runs, measured by one command.

Each part runs in a process of its own and for a limited time: a kernel that hangs, or an illegal
access that ends a CUDA context, costs its part and no other. Figures and page are written anew
after every part. Without a GPU the parts run at small sizes, and what needs CUDA says so.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import razor_dist
from razor_dist.evals.bench import shape
from razor_dist.evals.bench.attention import measure_attention, recorded
from razor_dist.evals.bench.measure import BenchRecord, Table, fastest, random_tokens
from razor_dist.evals.bench.process import call
from razor_dist.evals.bench.settings import GpuBenchSettings, ShapeBenchSettings
from razor_dist.plan.deployment import Deployment

log = logging.getLogger(__name__)

_PACKAGE = Path(razor_dist.__file__).parent
_SHAPES = _PACKAGE / "configs" / "shapes"
# A part's figures and tables; ``failed`` or ``skipped`` among the figures gives a reason.
PartResult = tuple[dict[str, Any], list[Table]]

_OPS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
    "_flash_attention_forward",
)
_PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "ring-flash-attn")


def versions(device: torch.device) -> PartResult:
    """Return versions, the device's properties, and the schemas of the attention ops."""
    found = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device.type == "cuda":
        found["device"] = str(torch.cuda.get_device_properties(device))
    for name in _OPS:
        packet = getattr(torch.ops.aten, name, None)
        found[name] = "not in this torch" if packet is None else str(packet.default._schema)
    return {"versions": found}, [Table("Versions and schemas:", [["", ""], *found.items()], "left")]


def launch(device: torch.device) -> PartResult:
    """Measure the cost of a small kernel: launched one by one, and replayed in a CUDA graph."""
    number, count = torch.zeros(1, device=device), 1000

    def step() -> Tensor:
        for _ in range(count):
            number.add_(1)
        return number

    found = {"eager": fastest(step, device, 0.2) / count}
    if device.type == "cuda":
        found["in a graph"] = fastest(recorded(step, device), device, 0.2) / count
    rows = [[name, f"{1e6 * seconds:.2f}"] for name, seconds in found.items()]
    table = Table(f"{count} kernels of one number:", [["", "µs a kernel"], *rows])
    return {"seconds_per_kernel": found}, [table]


def decode(device: torch.device) -> PartResult:
    return measure_attention(device, (1, 2), 1, 131072 if device.type == "cuda" else 4096)


def prefill(device: torch.device) -> PartResult:
    queries, keys = (32768, 131072) if device.type == "cuda" else (256, 4096)
    return measure_attention(device, (1,), queries, keys)


def shape_settings(device: torch.device) -> ShapeBenchSettings:
    large, small = (str(_SHAPES / name) for name in ("glm-4-9b-chat-1m", "glm-quarter"))
    if device.type == "cuda":
        return ShapeBenchSettings(shape=large, tokens="128K", device="cuda", repeats=2)
    return ShapeBenchSettings(shape=small, tokens="512", device="cpu", repeats=1, new_tokens=4)


def model_shape(device: torch.device) -> PartResult:
    """Run ``bench shape``: prefill and decode with a model's sizes, razor against full."""
    record = shape.run(shape_settings(device))
    return record.as_json(), record.tables


def replay(device: torch.device) -> PartResult:
    """Profile one decode step of the model: kernels of a replay, or ops on CPU, by name."""
    settings = shape_settings(device)
    [length], cuda = settings.lengths, device.type == "cuda"
    config = settings.config(length + 16)
    d = Deployment.of(config, "cuda" if cuda else "cpu", settings.kept)
    model = shape.random_model(settings.shape, device, d.dtype)
    engine = shape.engine_around(model, d)
    tokens = engine.stream(random_tokens(engine.vocab_size, length, 0), 16)
    for _ in range(8):  # the second step is recorded, the others are replayed
        next(tokens)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiled:
        next(tokens)
    count, micro = Counter[str](), Counter[str]()
    for event in profiled.events():
        leaf = event.name.startswith("aten::") and not event.cpu_children
        if event.device_type == DeviceType.CUDA if cuda else leaf:
            count[event.name] += 1
            micro[event.name] += round(event.time_range.elapsed_us())
    launches = sum(count.values())
    per_layer = launches / d.shape.layers
    figures = {
        "tokens": length,
        "in_graphs": engine.in_graphs,
        "launches": launches,
        "launches_per_layer": per_layer,
        "microseconds": micro,
        "count": count,
    }
    rows = [["kernel" if cuda else "op", "count", "µs"]]
    rows += [[name[:80], str(count[name]), f"{us:,}"] for name, us in micro.most_common(12)]
    title = (
        f"One decode step after {length:,} tokens, {'' if engine.in_graphs else 'not '}replayed "
        f"from a recording: {launches:,} launches, {per_layer:.0f} a layer, "
        f"{sum(micro.values()) / 1e3:.2f} ms:"
    )
    return figures, [Table(title, rows)]


def gpu_tests(device: torch.device) -> PartResult:
    """Run the tests that need a GPU; their output is the part's log."""
    return _run_tests(device, _TESTS)


def correct(device: torch.device) -> PartResult:
    """Compare the compiled decode kernels with float64: if they are wrong, no figure counts."""
    return _run_tests(device, _KERNEL_TESTS)


def _run_tests(device: torch.device, files: Sequence[str]) -> PartResult:
    folder = _PACKAGE.parent / "tests"
    if device.type != "cuda":
        return {"skipped": "needs a CUDA device"}, []
    if not folder.is_dir():
        return {"skipped": f"there is no folder {folder}; run from a checkout"}, []
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        return {"skipped": "needs pytest and hypothesis: make gpu-wheels"}, []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += files
    tests = subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    lines = [""]
    for line in tests.stdout:  # shown as they come, for the case that time runs out
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    failed = [[line] for line in lines if line.startswith(("FAILED", "ERROR"))]
    figures: dict[str, Any] = {"command": command, "closing_line": lines[-1]}
    if tests.wait():
        figures["failed"] = lines[-1]
    return figures, [Table("Tests:", [[lines[-1]], *failed], "left")]


# The only files that have tests for a GPU: collecting others would need more packages.
_TESTS = ["tests/test_cuda.py", "tests/heads/test_razor.py", "tests/engine/test_graph.py"]
_TESTS += ["tests/test_kernels.py"]
_KERNEL_TESTS = ["tests/test_kernels_decode.py"]

# The parts, and the largest share of the whole time that each may take.
PARTS: dict[str, tuple[Callable[[torch.device], PartResult], float]] = {
    "versions": (versions, 0.15),
    "correct": (correct, 0.2),
    "launch": (launch, 0.15),
    "decode": (decode, 0.25),
    "prefill": (prefill, 0.25),
    "shape": (model_shape, 0.4),
    "replay": (replay, 0.3),
    "tests": (gpu_tests, 1.0),
}


def run(settings: GpuBenchSettings) -> BenchRecord:
    """Run every part; ``gpu.json``, ``gpu.md`` and ``gpu.log`` are written on the way."""
    out, device = settings.out, settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    said = out / "gpu.log"
    said.write_text("")
    began = time.monotonic()
    parts: dict[str, dict[str, Any]] = {}
    rows, tables = [["part", "s", "status"]], []
    for name, (_, share) in PARTS.items():
        start, whole = time.monotonic(), 60 * settings.minutes
        limit = min(began + whole - start, share * whole)
        found: dict[str, Any] = {"failed": "no time was left"}
        if limit > 0:
            found = call(__name__, "run_part", name, device, seconds=limit, log=said)
        bad = next((word for word in ("failed", "skipped") if word in found), None)
        status = f"{bad}: {found[bad]}" if bad else "done"
        tables += [Table(**table) for table in found.pop("tables", ())]
        parts[name] = {"status": status, **found}
        rows.append([name, f"{time.monotonic() - start:.0f}", status])
        log.info("%s: %s", name, status)
        record = BenchRecord("gpu", settings, {"parts": parts}, [Table("", rows, "left"), *tables])
        record.write()
    return record


def run_part(name: str, device: str) -> dict[str, Any]:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"--- {name}", flush=True)
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    measure, _ = PARTS[name]
    figures, tables = measure(where)
    return {**figures, "tables": [asdict(table) for table in tables]}
