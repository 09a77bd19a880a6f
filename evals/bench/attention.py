"""Every way to attend on a device, timed and held against float64.

Letters: K key-value heads, G query heads of each, T queries, S keys, D head dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from razor_dist import kernels
from razor_dist.engine.graph import CudaRecorder
from razor_dist.evals.bench.measure import Rates, Table, fastest
from razor_dist.kernels.decode import Pages
from razor_dist.kernels.quantized import Codes, KeysOrValues

# (q [K, G, T, D], k [K, S, D], v, scale) to out [K, G, T, D] and lse [K, G, T].
Attend = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

GROUP, HEAD_DIM = 8, 128
# Queries for which the reference is computed in float64.
_CHECKED_QUERIES = 8
# Decode reads other keys at every call; bytes of all of them, more than the CPU's caches hold.
ROTATED_BYTES = {"cuda": 1 << 29, "cpu": 1 << 25}
_SECONDS = {"cuda": 0.3, "cpu": 0.1}
_PAGE = 64


def measure_attention(
    device: torch.device, ceilings: Rates, kv_heads: Sequence[int], queries: int, keys: int
) -> tuple[dict[str, Any], list[Table]]:
    """Measure every path of `paths`: in bf16 and in a graph on CUDA, in float32 on CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measured: list[dict[str, Any]] = []
    rows = [["path", "KV heads", "µs", "GB/s", "of read", "TFLOP/s", "of matmul", "lse error", ""]]
    for heads in kv_heads:
        nbytes = 2 * heads * keys * HEAD_DIM * dtype.itemsize
        operations = 4 * heads * GROUP * queries * keys * HEAD_DIM
        copies = math.ceil(ROTATED_BYTES[device.type] / nbytes) if queries == 1 else 1
        q, *kv = (
            torch.randn(heads, *size, HEAD_DIM, device=device).to(dtype)
            for size in [(GROUP, queries), *[(keys,)] * (2 * copies)]
        )
        pairs = list(zip(kv[::2], kv[1::2], strict=True))
        want = reference(q, *pairs[0])
        for name, attend in paths(device).items():
            found = {"path": name, "kv_heads": heads, **measure(attend, q, pairs, want)}
            cells = [""] * 6
            if seconds := found.get("seconds"):
                read, multiplied = nbytes / seconds, operations / seconds
                found |= {"bytes_per_second": read, "operations_per_second": multiplied}
                cells = [f"{1e6 * seconds:,.1f}", f"{read / 1e9:,.1f}"]
                cells += [f"{read / ceilings.bandwidth:.2f}", f"{multiplied / 1e12:,.3f}"]
                cells += [f"{multiplied / ceilings.products:.2f}", f"{found['lse_error']:.1e}"]
            measured.append(found)
            rows.append([name, str(heads), *cells, found["status"]])
    most = {"bandwidth": ceilings.bandwidth, "matmul": ceilings.products}
    figures = {"queries": queries, "keys": keys, "ceilings": most, "paths": measured}
    title = f"T = {queries:,} over S = {keys:,}, G = {GROUP}, D = {HEAD_DIM}, {dtype}:"
    return figures, [Table(title, rows)]


@torch.inference_mode()
def measure(
    attend: Attend,
    q: Tensor,
    pairs: Sequence[tuple[Any, Any]],
    want: tuple[Tensor, Tensor],
    repeat: float | None = None,
) -> dict[str, Any]:
    """Time one path and compare it; a path that fails costs its own line only."""
    scale, rows, device = q.shape[-1] ** -0.5, _checked(q), q.device

    def step() -> Tensor:
        for k, v in pairs:
            result, _ = attend(q, k, v, scale)
        return result

    try:
        out, lse = attend(q, *pairs[0], scale)
        errors = {
            "out_error": (out[:, :, rows].double() - want[0]).abs().max().item(),
            "lse_error": (lse[:, :, rows].double() - want[1]).abs().max().item(),
        }
        graph = recorded(step, device) if device.type == "cuda" else step
        seconds = fastest(graph, device, repeat or _SECONDS[device.type]) / len(pairs)
    except Exception as error:  # whatever a kernel or a driver raises
        absent = device.type == "cpu" or isinstance(error, ImportError | NotImplementedError)
        said = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {said[:120]}"
        return {"status": f"{'skipped' if absent else 'failed'}: {reason}"}
    return {"status": "done", "seconds": seconds, **errors}


def recorded(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    recorder = CudaRecorder(device)
    recorder.warm_up(lambda: (step(),))
    replay = recorder.record(lambda: (step(),))
    return lambda: replay()[0]


def _checked(q: Tensor) -> Tensor:
    count = min(_CHECKED_QUERIES, q.shape[2])
    return torch.linspace(0, q.shape[2] - 1, count, device=q.device).long()


def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse in float64, of the queries that are checked."""
    rows = q[:, :, _checked(q)].double()
    scores = torch.einsum("kgtd,ksd->kgts", rows, k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("kgts,ksd->kgtd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def paths(device: torch.device) -> dict[str, Attend]:
    """Return them by name; no CPU's on CUDA, whose compilation would take the time of others."""
    backends = [name for name in kernels.BACKENDS if name not in ("meta", "reference")]
    if device.type == "cuda":
        backends = [name for name in backends if not name.endswith("_cpu")]
    return {
        "kernels.attend": _own,
        **{f"kernels.attend, {name}": partial(_own, backend=name) for name in backends},
        "Triton, block tables": _block_tables,
        "Triton, scattered pages": partial(_block_tables, scattered=True),
        "flash": partial(_scaled_dot_product, cudnn=False),
        "cuDNN": partial(_scaled_dot_product, cudnn=True),
    }


def _own(
    q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    return kernels.attend(q, k, v, scale=scale, backend=backend)


def _block_tables(
    q: Tensor, k: Tensor, v: Tensor, scale: float, scattered: bool = False
) -> tuple[Tensor, Tensor]:
    if q.device.type != "cuda" or q.shape[2] != 1:
        raise NotImplementedError("decode steps only, on CUDA")
    return by_tables(q, k, v, scale, scattered)


def by_tables(
    q: Tensor, k: KeysOrValues, v: KeysOrValues, scale: float, scattered: bool = False
) -> tuple[Tensor, Tensor]:
    """Call what a decode step calls: the attending kernel and the one that merges its splits."""
    module = import_module("razor_dist.kernels.decode_triton")
    order, table, stored, at = _tables(k.shape[0], k.shape[1], q.device, scattered)
    if isinstance(k, Codes) and isinstance(v, Codes):
        scales = k.scale, v.scale
        pages = Pages(k.codes, v.codes, _PAGE, table, stored, at, at, None, *scales)
    else:
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        pages = Pages(k, v, _PAGE, table, stored, at, at)
    out = q.new_empty(1, q.shape[0] * q.shape[1], q.shape[3])
    found = module.attend(q, order, pages, None, out, scale=scale, pack=True)
    return found[..., :-1], found[..., -1]


@functools.cache
def _tables(
    heads: int, keys: int, device: torch.device, scattered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return order, block table and the other numbers, made once and not while recording."""
    count = keys // _PAGE
    table = torch.randperm(count) if scattered else torch.arange(count)
    stored, at = (torch.tensor([n], device=device) for n in (keys, keys - 1))
    order = torch.arange(heads, device=device)
    return order, table.int().unsqueeze(0).to(device), stored, at


def _scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cudnn: bool
) -> tuple[Tensor, Tensor]:
    """Call flash or cuDNN; one query's group is folded into rows, so that a key is read once."""
    heads, group, queries, dim = q.shape
    if queries == 1:
        q4, k4, v4 = q.reshape(heads, 1, group, dim), k.unsqueeze(1), v.unsqueeze(1)
    else:
        q4 = q.reshape(1, heads * group, queries, dim)
        k4, v4 = k.unsqueeze(0), v.unsqueeze(0)  # cuDNN takes fewer heads than of queries
        if not cudnn:
            k4, v4 = (x.unsqueeze(1).expand(heads, group, -1, dim) for x in (k, v))
            q4 = q
    if cudnn:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        out, lse, *_ = op(q4, k4, v4, None, True, 0.0, False, False, scale=scale)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = flash(q4, k4, v4, 0.0, False, False, scale=scale)
        lse = lse[..., : q4.shape[2]]
    return out.reshape(q.shape), lse.reshape(q.shape[:3])  # cuDNN's lse is [B, H, T, 1]
