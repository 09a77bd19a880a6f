"""The kernels of decode steps, compiled for GPUs: bounds on instructions, and no spills."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch

from razor_dist.kernels.quantized import INT4, INT8
from tests.triton_processes import Resources, resources

POINTERS = {
    **dict.fromkeys(
        ["order", "stored", "places", "position", "start", "offset", "capacity", "at"], "*i64"
    ),
    "table": "*i32",
    **dict.fromkeys(["scale", "eps"], "fp32"),
    **dict.fromkeys(["slopes", "lse", "parts", "packed", "gathered"], "*fp32"),
    **dict.fromkeys(["a", "a_lse", "b_lse"], "*fp32"),
    "b": "*bf16",
    **{f"page_{part}_scale": "*fp32" for part in "kv"},
}


def pointers(queries: str, keys: str, out: str) -> dict[str, str]:
    stores = {f"{store}_{part}": f"*{keys}" for store in ("page", "ring") for part in "kv"}
    new = dict.fromkeys(
        [
            *("k", "v", "cos", "sin", "out_q", "out_k", "turned"),
            *("x", "residual", "weight", "normed", "total", "gate", "up"),
        ],
        f"*{out}",
    )
    return {**POINTERS, **stores, **new, "q": f"*{queries}", "out": f"*{out}"}


def attending(
    capability: int, queries: str, keys: str, group: int, dim: int, slopes: bool
) -> Resources:
    from razor_dist.kernels import decode_triton

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "i8": INT8, "u8": INT4}
    constants = {
        **decode_triton.tile(group, dim, dtypes[queries], dtypes[keys], slopes=slopes),
        **{"SINKS": 4, "COMPENSATION": True, "PAGE": 64, "UPCAST": False},
        **{"BITS": decode_triton.bits_of(dtypes[keys]), "SLOPES": slopes},
    }
    types = pointers(queries, keys, "fp32")
    return resources("attend_kernel", capability, types, constants)


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "queries", "keys", "group", "dim", "slopes"),
    [
        (80, "bf16", "bf16", 8, 128, False),
        (90, "bf16", "bf16", 8, 128, False),
        (90, "bf16", "bf16", 1, 128, True),
        (90, "bf16", "i8", 8, 128, True),
        (80, "bf16", "i8", 8, 128, False),
        (86, "bf16", "bf16", 8, 128, False),
        (86, "bf16", "i8", 8, 128, False),
        (89, "bf16", "bf16", 8, 128, False),
        (89, "bf16", "i8", 8, 128, False),
        (89, "bf16", "bf16", 4, 256, False),
        (90, "bf16", "i8", 8, 128, False),
        (80, "bf16", "u8", 8, 128, True),
        (89, "bf16", "u8", 4, 256, False),
        (90, "bf16", "u8", 8, 128, False),
        (90, "fp32", "u8", 3, 64, False),
        (80, "fp32", "fp32", 3, 64, False),
        (80, "fp32", "fp32", 8, 128, True),
        (90, "fp32", "fp32", 8, 128, False),
        (80, "bf16", "fp32", 8, 128, False),
        (80, "bf16", "bf16", 2, 8, False),
    ],
)
def test_attending_compiles_without_spills(
    capability: int, queries: str, keys: str, group: int, dim: int, slopes: bool,
    compiler: ProcessPoolExecutor,
) -> None:  # fmt: skip
    call = compiler.submit(attending, capability, queries, keys, group, dim, slopes)
    made = call.result(120)
    assert made.spilled == 0
    assert made.registers <= 255
    # Two programs fit a multiprocessor of an A100 (164 KB), three of an H100 (228 KB), and one of
    # GPUs with 100 KB.
    assert made.shared <= 75 << 10


# What a multiprocessor has one pipe for, half as wide as the one that issues.
INTEGER = ("IMAD", "IADD3", "VIADD", "LEA", "LOP3", "SHF", "ISETP", "SEL", "PRMT", "IMNMX")


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("keys", "most", "most_integer"), [("bf16", 300, 75), ("i8", 820, 425), ("u8", 820, 500)]
)
def test_a_tile_of_keys_is_few_instructions(
    keys: str, most: int, most_integer: int, capability: int, compiler: ProcessPoolExecutor
) -> None:  # fmt: skip
    """A multiprocessor of an H200 reads 64 keys of bfloat16 in 1 us, of 8 bits in 0.5 us."""
    call = compiler.submit(attending, capability, "bf16", keys, 8, 128, False)
    loops = call.result(120).loops
    # Over pages; and, where these are no codes, over the two runs of a window in its ring.
    assert len(loops) == (3 if keys == "bf16" else 1)
    for loop in loops:
        assert loop.count("HMMA") == 32  # 64 keys of 128 numbers: 2 products, by 4 warps
        assert len(loop) <= most
        assert sum(name in INTEGER for name in loop) <= most_integer
        # While a tile is computed, the next comes into shared memory by itself.
        assert "LDGSTS" in loop and "LDG" not in loop


def test_codes_are_the_mantissa_of_a_bfloat16() -> None:
    """As `razor_dist.kernels.codes_triton.levels` makes halves of levels of them."""
    codes = torch.arange(16, dtype=torch.int16)
    halves = (codes << 3 | 0x4180).view(torch.bfloat16) - 23.5
    assert (2 * halves).tolist() == list(range(-15, 16, 2))


def programs_of_one(sequences: int) -> int:
    """Count the programs of a head's 131,072 keys, the longest of a batch, on an H200."""
    module = import_module("razor_dist.kernels.decode_triton")
    keys = 1 << 17
    with mock.patch.object(module, "multiprocessors", lambda device: 132):
        return -(-keys // module.split_length(sequences * keys, torch.device("cuda", 0)))


@pytest.mark.long
@pytest.mark.parametrize("sequences", [1, 8])
def test_a_long_sequence_keeps_the_device_busy_beside_short_ones(
    sequences: int, compiler: ProcessPoolExecutor
) -> None:
    assert compiler.submit(programs_of_one, sequences).result(120) >= 128


STORE = {"SINKS": 4, "D": 128, "WIDTH": 128, "num_warps": 1, "G": 8, "GROUP": 8}
STORE |= {"R": 64, "INTERLEAVED": True}
SMALL: dict[str, dict[str, Any]] = {
    "store_kernel": STORE | {"BITS": 0},
    "store_kernel, i8": STORE | {"BITS": 8},
    "store_kernel, u8": STORE | {"BITS": 4},
    "merge_splits_kernel": {
        "G": 8, "D": 128, "WIDTH": 32, "SPLITS": 64, "PACKED": True,
        "PLACED": True,
    },
    "merge_pair_kernel": {"D": 128, "WIDTH": 128, "ROWS": 16},
    "merge_ranks_kernel": {"RANKS": 8, "PARTS": 8, "G": 8, "D": 128, "WIDTH": 128, "PLACED": True},
    "rotate_kernel": {
        "H": 32, "K": 4, "R": 64, "D": 128, "INTERLEAVED": True, "WIDTH": 128, "num_warps": 1,
    },
    "add_rms_norm_kernel": {"D": 4096, "WIDTH": 4096, "num_warps": 8},
    "gated_kernel": {"BLOCK": 1024},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kernel", SMALL)
def test_small_kernels_compile_without_spills(kernel: str, compiler: ProcessPoolExecutor) -> None:
    name, _, keys = kernel.partition(", ")
    types = pointers("bf16", keys or "bf16", "bf16")
    call = compiler.submit(resources, name, 90, types, SMALL[kernel])
    made = call.result(120)
    assert made.spilled == 0
    assert made.registers <= 72  # rounded division takes 66 with Triton 3.6, fewer with 3.7
    assert made.shared <= 4 << 10
    assert not (keys and made.rough), "codes are those of `quantize`"
