"""The decode kernel's constants: each tried, timed, and held against float64."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from razor_dist.config.cores import usable_cores
from razor_dist.evals.bench.attention import (
    GROUP,
    HEAD_DIM,
    ROTATED_BYTES,
    by_tables,
    measure,
    reference,
)
from razor_dist.evals.bench.gpu import Bench
from razor_dist.evals.bench.measure import Table
from razor_dist.kernels.quantized import KeysOrValues, quantize, row_bytes

# What is tried; on CPU, where the kernel is interpreted, the first of each.
_TILES, _STAGES, _WARPS = (64, 32, 128), (3, 2, 4, 5), (4, 2, 8)
_SPLITS = (256, 512, 1024, 2048, 4096)
_SECONDS = 0.02  # for which a variant is repeated
_FEW_KEYS = 1024  # that a kernel is compiled with
_COMPILING = 0.6  # of the time, at most
_MOST_PROCESSES = 16  # that compile
_SHOWN = 5  # variants of a size on the page; the others are in the JSON file


class Variant(NamedTuple):
    """Constants of `razor_dist.kernels.decode_triton`."""

    tile: int  # keys
    stages: int
    warps: int
    split: int = 0  # keys of a program; 0: as the module chooses

    def __str__(self) -> str:
        return ", ".join(map(str, self if self.split else self[:3]))


@contextmanager
def constants(variant: Variant | None) -> Iterator[None]:
    """Within this, the decode kernel has a variant's constants; None: its own."""
    if variant is None:
        yield
        return
    module = import_module("razor_dist.kernels.decode_triton")
    tiles: dict[int, int] = dict.fromkeys(module.TILES, variant.tile)
    changed: dict[str, Any] = {"TILES": tiles, "STAGES": variant.stages, "WARPS": variant.warps}
    if variant.split:
        changed["_SPLITS"] = (variant.split, variant.split)
    with mock.patch.multiple(module, **changed):
        yield


def problem(
    device: torch.device, keys: int, heads: int, int8: bool, copies: int = 1
) -> tuple[Tensor, list[tuple[KeysOrValues, KeysOrValues]]]:
    """Queries of one token, and ``copies`` of keys and values, in bf16 or 8 bits."""

    def normal(*size: int) -> Tensor:
        return torch.randn(heads, *size, HEAD_DIM, device=device).to(torch.bfloat16)

    def kept() -> KeysOrValues:
        return quantize(normal(keys)) if int8 else normal(keys)

    return normal(GROUP, 1), [(kept(), kept()) for _ in range(copies)]


def compile_variant(kind: str, variant: Variant, int8: bool) -> None:
    """Run a variant once with few keys: what it is compiled to stays in Triton's cache."""
    q, [(k, v)] = problem(torch.device(kind), _FEW_KEYS, 1, int8)
    with constants(variant), torch.inference_mode():
        by_tables(q, k, v, HEAD_DIM**-0.5)


def sweep(bench: Bench, keys: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[Table]]]:
    """Time all constants at the first number of keys, then the best and the shipped at all.

    Variants are compiled beforehand, in as many processes as there are cores. One that cannot be
    compiled or run is found out when it is timed.
    """
    grid = (_TILES, _STAGES, _WARPS) if bench.cuda else (_TILES[:1], _STAGES[:1], _WARPS[:1])
    variants = list(itertools.starmap(Variant, itertools.product(*grid)))
    # Each has a CUDA context, which takes half a gigabyte of the GPU and more of the host.
    count = min(_MOST_PROCESSES, usable_cores())
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    compiled = [
        pool.submit(compile_variant, bench.device.type, variant, int8)
        for variant in variants
        for int8 in (False, True)
    ]
    wait(compiled, timeout=_COMPILING * bench.left)
    pool.shutdown(wait=False, cancel_futures=True)
    for int8 in (False, True):
        found = _Sweep(bench, int8)
        shipped = found.time(None, 1, keys[0])
        best = min((found.time(variant, 1, keys[0]), variant) for variant in variants)
        splits = [best[1]._replace(split=split) for split in _SPLITS if bench.cuda]
        best = min([best, *((found.time(variant, 1, keys[0]), variant) for variant in splits)])
        for heads, count in itertools.product((1, 2), keys):
            if (heads, count) != (1, keys[0]):
                found.time(None, heads, count)
                found.time(best[1], heads, count)
        figures: dict[str, Any] = {"tried": found.results}
        if shipped < math.inf:
            figures["shipped_seconds"] = shipped
        if best[0] < math.inf:
            figures["best"] = best[1]._asdict()
        yield {f"sweep_{found.name}": figures}, [found.table()]


class _Sweep:
    """Results for keys and values of one dtype."""

    def __init__(self, bench: Bench, int8: bool) -> None:
        self._bench, self._int8 = bench, int8
        self.name = "int8" if int8 else "bf16"
        self.results: list[dict[str, Any]] = []

    def time(self, variant: Variant | None, heads: int, keys: int) -> float:
        """Return seconds of one call, infinite if it fails or no time is left."""
        if self._bench.is_late:
            return math.inf
        device, dtype = self._bench.device, torch.int8 if self._int8 else torch.bfloat16
        nbytes = 2 * heads * keys * row_bytes(HEAD_DIM, dtype)
        copies = math.ceil(ROTATED_BYTES[device.type] / nbytes) if self._bench.cuda else 1
        q, pairs = problem(device, keys, heads, self._int8, copies)
        want = reference(q, *(x.to(torch.float64) for x in pairs[0]))
        with constants(variant):
            found = measure(by_tables, q, pairs, want, _SECONDS)
        found |= {"variant": "as shipped" if variant is None else str(variant)}
        self.results.append(found | {"kv_heads": heads, "keys": keys, "bytes": nbytes})
        print(f"{self.name}: {self.results[-1]}", flush=True)  # if a later variant hangs
        return float(found.get("seconds", math.inf))

    def table(self) -> Table:
        """The fastest variants of each size, the shipped one, and what failed."""
        rows = [["tile, stages, warps, split", "KV heads", "keys", "µs", "GB/s", "lse error", ""]]
        ordered = sorted(self.results, key=lambda one: one.get("seconds", math.inf))
        sizes = dict.fromkeys((one["kv_heads"], one["keys"]) for one in self.results)
        for heads, keys in sizes:
            of_size = [one for one in ordered if (one["kv_heads"], one["keys"]) == (heads, keys)]
            for index, one in enumerate(of_size):
                done = "seconds" in one
                if index < _SHOWN or not done or one["variant"] == "as shipped":
                    rows.append([one["variant"], str(heads), f"{keys:,}", *_cells(one)])
        return Table(f"Decode attention alone, {self.name}, G = {GROUP}, D = {HEAD_DIM}:", rows)


def _cells(one: Mapping[str, Any]) -> list[str]:
    if "seconds" not in one:
        return ["", "", "", one["status"]]
    read = one["bytes"] / one["seconds"]
    return [f"{1e6 * one['seconds']:,.1f}", f"{read / 1e9:,.1f}", f"{one['lse_error']:.1e}", ""]
