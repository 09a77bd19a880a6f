"""A GPU made of host memory: what is written for CUDA runs here, under CUDA's rules.

A tensor on ``cuda:0`` holds one in host memory, and operations on it are those of the CPU. Refused
is what CUDA refuses: tensors of two devices in one operation, a Triton kernel that gets a tensor in
host memory, a tensor on the GPU read as an array. Triton's kernels are interpreted. A CUDA graph
notes what is done while it is captured, which computes nothing and must not wait for the GPU, and
does it again on the same memory, which others must keep, if they had it before.

Speed, registers, and how compiled kernels round, are not those of a GPU.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests import pretended_kernels

_GPU = torch.device("cuda", 0)
_SIZED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CROSSING = {"_to_copy", "copy_"}
# Of their arguments the indices may be in host memory.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Memory that is not written.
_SET_ASIDE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class GpuTensor(Tensor):
    """A tensor of the pretended GPU; ``held`` is its memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> GpuTensor:
        # Within inference mode too: a view of a wrapper from outside could not be one from inside.
        with torch.inference_mode(False):
            found = Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=_GPU,
            )
        found.held = held
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.held!r} on {self.device}"


class _Mode(TorchDispatchMode):
    """Sees also operations that have no tensor of the GPU yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Named(TorchFunctionMode):
    """Gives the device ``cuda`` its number, for which torch would ask the driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0].clone()
        if name == "cuda":
            return args[0].to(_GPU)
        if func is not torch.device:
            args = tuple(map(_numbered, args))
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _numbered(kwargs["device"])}
        return func(*args, **kwargs)


def _numbered(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "cuda" and x.index is None:
        return _GPU
    return _GPU if isinstance(x, str) and x == "cuda" else x


class Graph:
    """A CUDA graph: what to do again.

    Its own memory, made during the capture, lives as long as the graph does. It keeps no other.
    """

    capturing: Graph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._calls: list[Callable[[], object]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # by address
        self._others: dict[int, list[Tensor]] = {}  # that the calls hold, by address

    def replay(self) -> None:
        for tensors in self._others.values():
            storage = tensors[0].untyped_storage()
            # The graph's tensors, and this storage.
            if torch._C._storage_Use_Count(storage._cdata) <= len(tensors) + 1:
                raise RuntimeError(
                    "an illegal memory access was encountered: a graph reads a "
                    f"tensor that is gone, of {tuple(tensors[0].shape)}"
                )
        with _disable_current_modes():
            for call in self._calls:
                call()

    def note(self, call: Callable[..., object], args: Any, kwargs: Any) -> Callable[[], object]:
        """Have the graph do ``call(*args, **kwargs)``; return that."""
        args, kwargs = tree_map(self._alias, (args, kwargs))

        def again() -> object:
            return call(*args, **kwargs)

        self._calls.append(again)
        return again

    def _alias(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = torch.ops.aten.alias(x)
        if x.numel() and not self.owns(x):
            self._others.setdefault(_address(x), []).append(x)
        return x

    def owns(self, held: Tensor) -> bool:
        return _address(held) in self._made

    def own(self, held: Tensor) -> None:
        self._made[_address(held)] = held.untyped_storage()

    def void(self) -> None:
        """Overwrite its memory: a capture computes nothing."""
        for storage in self._made.values():
            storage.fill_(0x7F)


def _address(held: Tensor) -> int:
    return held.untyped_storage().data_ptr()


@contextmanager
def _capture(graph: Graph, **settings: Any) -> Iterator[None]:
    assert Graph.capturing is None
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None
        graph.void()


def _waits(what: object) -> None:
    """Refuse, in a capture, an operation that waits for the GPU."""
    if Graph.capturing is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def _held(x: Any) -> Any:
    return x.held if isinstance(x, GpuTensor) else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch where its arguments and ``device`` say."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_gpu = [x for x in given if isinstance(x, GpuTensor)]
    if func._can_decompose():  # which torch does by itself outside inference mode
        with _Mode():
            return func.decompose(*args, **kwargs)
    device = kwargs.get("device")
    wanted = on_gpu if device is None else torch.device(device).type == "cuda"
    if not on_gpu and not wanted:
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    _check(func, name, given, on_gpu, bool(wanted))
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    func = pretended_kernels.ATTENTION.get(func, func)
    plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
    known = {id(_held(x)): x for x in given}
    with _disable_current_modes():
        found = _done(func, name, plain_args, plain_kwargs, [x.held for x in on_gpu])
    if not wanted:
        return found

    def back(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return known[id(x)] if id(x) in known else GpuTensor(x)

    return tree_map(back, found)


def _check(func: Any, name: str, given: list[Tensor], on_gpu: list[Any], wanted: bool) -> None:
    """Refuse what CUDA refuses."""
    apart = [x for x in given if not isinstance(x, GpuTensor)]
    if func.namespace == "c10d":
        if apart:
            raise RuntimeError("No backend type associated with device type cpu")
        return
    if name in _CROSSING:
        if apart or not wanted or not on_gpu:
            _waits(func)
        return
    if name in _INDEXING:
        if not isinstance(given[0], GpuTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as self")
        masks = any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if masks or any(not isinstance(x, GpuTensor) and x.dim() for x in given[1:]):
            _waits(func)
        return
    if name in ("item", "_local_scalar_dense", "is_nonzero", "equal") or _SIZED & set(func.tags):
        _waits(func)
    if on_gpu and any(x.dim() for x in apart):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! (in {func})"
        )
    if apart and func._schema.is_mutable and given[0] is apart[0]:
        raise RuntimeError(f"Expected all tensors to be on the same device (in {func})")


def _done(func: Any, name: str, args: Any, kwargs: Any, held: list[Tensor]) -> Any:
    """Run an operation on host memory; in a capture, note it and write to the graph's own alone."""
    graph = Graph.capturing
    if graph is None:
        return func(*args, **kwargs)
    if name in _SET_ASIDE:
        graph.own(found := func(*args, **kwargs))
        return found
    if getattr(func, "namespace", "") == "c10d":
        # It runs while it is captured, too: there is no other `Work` to return.
        return graph.note(_collective, (func, *args), kwargs)()
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.is_mutable:
        again = graph.note(func, args, kwargs)
        if all(map(graph.owns, held)):
            again()
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        results = [given[each] for each in written]
        return results[0] if len(results) == 1 else tuple(results)
    found = func(*args, **kwargs)
    before = set(map(_address, held))
    results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    new = [_address(x) not in before for x in results]
    for x in itertools.compress(results, new):
        graph.own(x)
    if any(new):
        graph.note(_copied, (func, results, new, args, kwargs), {})
    return found


def _collective(func: Any, *args: Any, **kwargs: Any) -> Any:
    found = func(*args, **kwargs)
    (found[-1] if isinstance(found, tuple) else found).wait()
    return found


def _copied(func: Any, results: list[Tensor], new: list[bool], args: Any, kwargs: Any) -> None:
    """Compute again, into the memory of the first results."""
    made = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for old, x, is_new in zip(results, made, new, strict=True):
        if is_new:
            old.copy_(x)


class Stream:
    """A queue of work that is done at once."""

    current: Stream

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.device_index = _GPU, 0

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def synchronize(self) -> None:
        _waits("synchronize")


Stream.current = Stream()


class Event:
    """A time."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        _waits("query")
        return True

    def synchronize(self) -> None:
        _waits("synchronize")

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
    args, kwargs = tree_map(_held, (args, kwargs))
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
        synchronize=lambda device=None: _waits("synchronize"),
        Stream=Stream, Event=Event, stream=_on,
        current_stream=lambda device=None: Stream.current, set_stream=set_stream,
        CUDAGraph=Graph, graph=_capture, graph_pool_handle=lambda: (0, 1),
        is_bf16_supported=lambda including_emulation=True: True,
        is_current_stream_capturing=lambda: Graph.capturing is not None,
    )  # fmt: skip
    torch.backends.cuda.can_use_cudnn_attention = lambda params, debug=False: True
    dist.get_backend = lambda group=None: "nccl"  # which gloo stands for
    _Mode().__enter__()
    _Named().__enter__()
    run = threading.Thread.run

    def with_gpu(thread: threading.Thread) -> None:
        with _Mode(), _Named():
            run(thread)

    threading.Thread.run = with_gpu  # type: ignore[method-assign]
