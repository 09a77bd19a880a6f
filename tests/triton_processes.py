"""Processes that interpret Triton's kernels, or compile them for GPUs; neither needs one.

Triton decides as it is imported whether it interprets, so that one process runs the kernels on CPU
tensors and another compiles them.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

# A fork would have imported what its parent has.
SPAWN = multiprocessing.get_context("spawn")


def _begin(interpret: bool) -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    torch.set_num_threads(1)


def pool_that(interprets: bool) -> Iterator[ProcessPoolExecutor]:
    if find_spec("triton") is None:
        pytest.skip("needs triton")
    with ProcessPoolExecutor(1, SPAWN, _begin, (interprets,)) as pool:
        yield pool


def unaligned(function: Any, argument: str) -> bool:
    [param] = [param for param in function.params if param.name == argument]
    return bool(param.do_not_specialize_on_alignment)


@dataclass(frozen=True)
class Resources:
    """Registers, memory and spills of a compiled kernel."""

    registers: int  # of a thread
    spilled: int  # bytes
    shared: int  # bytes of a program
    rough: int  # quotients that are not those of the definition, rounded to the nearest
    loops: tuple[tuple[str, ...], ...]  # instructions of each loop with matrix products, in order


def loops_of(sass: str) -> Iterator[tuple[str, ...]]:
    """Yield the instructions of each loop that has matrix products: one tile of keys."""
    labels: dict[str, int] = {}
    made: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(made)
        found = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)([^;]*);", line)
        if found is None:
            continue
        made.append(found[1])
        target = re.search(r"\.L_\w+", found[2]) if found[1] == "BRA" else None
        # Only a loop goes back to a label that has been seen.
        body = made[labels[target[0]] :] if target and target[0] in labels else []
        # What ends the kernel, a jump to itself, has none.
        if "HMMA" in body:
            yield tuple(body)


def resources(
    kernel: str, capability: int, types: dict[str, str], constants: dict[str, int]
) -> Resources:
    """Compile a kernel, and say what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    modules = {
        "rotate": "fused_triton",
        "add": "fused_triton",
        "gated": "fused_triton",
        "merge": "merge_triton",
        "store": "store_triton",
        **dict.fromkeys(["largest", "list", "chosen"], "chosen_triton"),
    }
    name = modules.get(kernel.partition("_")[0], "decode_triton")
    function = getattr(import_module(f"razor_dist.kernels.{name}"), kernel)
    constants = dict(constants)
    options = {
        name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    # As torch allocates: pointers and the strides of rows are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if (signature[name].startswith("*") and not unaligned(function, name))
        or name.endswith(("_row", "_slot", "_head", "_token"))
    }
    target = GPUTarget("cuda", capability, 32)
    made = compile(
        ASTSource(function, signature, constants, aligned), target=target, options=options
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        shown, sass = (
            subprocess.run(
                [*command, cubin.name], capture_output=True, text=True, check=True
            ).stdout
            for command in ([f"{tools}/cuobjdump", "-res-usage"], [f"{tools}/nvdisasm", "-c"])
        )
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
    spilled = usage["STACK"] + usage["LOCAL"]
    rough, loops = made.asm["ptx"].count("div.full"), tuple(loops_of(sass))
    return Resources(usage["REG"], spilled, made.metadata.shared, rough, loops)
