"""A GPU made of host memory: what is written for CUDA runs here, under CUDA's rules.

A tensor on ``cuda:0`` holds one in host memory, and operations on it are those of the CPU. Refused
is what CUDA refuses: tensors of two devices in one operation, a Triton kernel that gets a tensor in
host memory, a tensor on the GPU read as an array. Triton's kernels are interpreted. A CUDA graph
notes what is done while it is captured, which computes nothing and must not wait for the GPU, and
does it again on the same memory, which others must keep, if they had it before.

Speed, registers, and how compiled kernels round, are not those of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tests import pretended_kernels
from tests.pretended_tensors import GPU, GpuTensor, Graph, Mode, Named, capture, held_by, waits


class Stream:
    """A queue of work that is done at once."""

    current: Stream

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.device_index = GPU, 0

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def synchronize(self) -> None:
        waits("synchronize")


Stream.current = Stream()


class Event:
    """A time."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        waits("query")
        return True

    def synchronize(self) -> None:
        waits("synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=2, total_memory=4 << 30,
    uuid=uuid.UUID(int=1), L2_cache_size=50 << 20,
)  # fmt: skip


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Interpret a kernel of Triton, or note it in a capture."""
    for n, x in enumerate([*args, *kwargs.values()]):
        if isinstance(x, Tensor) and not isinstance(x, GpuTensor):
            raise ValueError(
                f"Pointer argument (at {n}) cannot be accessed from Triton (cpu tensor?)"
            )
    args, kwargs = tree_map(held_by, (args, kwargs))
    if Graph.capturing is not None:
        Graph.capturing.note(_interpret, (executor, *args), kwargs)
        return
    with _disable_current_modes():
        _interpret(executor, *args, **kwargs)


_interpret: Any = None


def _patching_once(interpreter: Any) -> None:
    """Have Triton patch its language once a launch, not at every call of a function in it."""
    patch, language = interpreter._patch_lang, interpreter.tl
    patched: set[frozenset[str]] = set()

    def patch_once(function: Any) -> Any:
        names = frozenset(
            n for n, x in function.__globals__.items() if x is language or x is language.core
        )
        if names in patched:
            return None
        scope = patch(function)
        patched.add(names)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


# torch asks for it before it slices a tensor on CUDA, and its builds for CPUs have none.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
"""


def _guard() -> Path:
    """Compile a device guard that does nothing, once; return the library."""
    root = Path(torch.__file__).parent
    library = Path(tempfile.gettempdir()) / f"razor-dist-guard-{torch.__version__}-{os.getuid()}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / "guard.so"
            flags = (
                f"-shared -fPIC -std=c++20 -I{root}/include -L{root}/lib -xc++ - -lc10 -o {made}"
            )
            subprocess.run(["c++", *flags.split()], input=_GUARD.encode(), check=True)
            made.replace(library)
    return library


def _replace(module: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(module, name, value)


def install() -> None:
    """Have this process see the GPU, in all its threads."""
    global _interpret
    assert "triton" not in sys.modules, "triton has decided already whether it interprets"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    from razor_dist.kernels import decode

    executor = interpreter.GridExecutor
    _interpret, executor.__call__ = executor.__call__, _launch
    _patching_once(interpreter)
    pretended_kernels.install()
    decode._triton = lambda: True
    torch.ops.load_library(_guard())
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)

    def set_stream(stream: Stream) -> None:
        Stream.current = stream

    _replace(
        torch.cuda,
        _lazy_init=lambda: None, init=lambda: None, is_available=lambda: True,
        is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda device: None, get_device_properties=lambda device=None: _PROPERTIES,
        get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: _PROPERTIES.name,
        mem_get_info=lambda device=None: (2 << 30, 4 << 30),
        memory_allocated=lambda device=None: 0, max_memory_allocated=lambda device=None: 0,
        reset_peak_memory_stats=lambda device=None: None, empty_cache=lambda: None,
        synchronize=lambda device=None: waits("synchronize"),
        Stream=Stream, Event=Event, stream=_on,
        current_stream=lambda device=None: Stream.current, set_stream=set_stream,
        CUDAGraph=Graph, graph=capture, graph_pool_handle=lambda: (0, 1),
        is_bf16_supported=lambda including_emulation=True: True,
        is_current_stream_capturing=lambda: Graph.capturing is not None,
    )  # fmt: skip
    torch.backends.cuda.can_use_cudnn_attention = lambda params, debug=False: True
    dist.get_backend = lambda group=None: "nccl"  # which gloo stands for
    Mode().__enter__()
    Named().__enter__()
    run = threading.Thread.run

    def with_gpu(thread: threading.Thread) -> None:
        with Mode(), Named():
            run(thread)

    threading.Thread.run = with_gpu  # type: ignore[method-assign]
