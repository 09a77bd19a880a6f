"""Tensors of the pretended GPU (`tests.pretended_gpu`), operations on them, and CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended_kernels import ATTENTION

GPU = torch.device("cuda", 0)
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
                device=GPU,
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


class Mode(TorchDispatchMode):
    """Sees also operations that have no tensor of the GPU yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Named(TorchFunctionMode):
    """Gives the device ``cuda`` its number, for which torch would ask the driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0].clone()
        if name == "cuda":
            return args[0].to(GPU)
        if func is not torch.device:
            args = tuple(map(_numbered, args))
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _numbered(kwargs["device"])}
        return func(*args, **kwargs)


def _numbered(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "cuda" and x.index is None:
        return GPU
    return GPU if isinstance(x, str) and x == "cuda" else x


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
def capture(graph: Graph, **settings: Any) -> Iterator[None]:
    assert Graph.capturing is None
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None
        graph.void()


def waits(what: object) -> None:
    """Refuse, in a capture, an operation that waits for the GPU."""
    if Graph.capturing is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def held_by(x: Any) -> Any:
    return x.held if isinstance(x, GpuTensor) else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of torch where its arguments and ``device`` say."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_gpu = [x for x in given if isinstance(x, GpuTensor)]
    if func._can_decompose():  # which torch does by itself outside inference mode
        with Mode():
            return func.decompose(*args, **kwargs)
    device = kwargs.get("device")
    wanted = on_gpu if device is None else torch.device(device).type == "cuda"
    if not on_gpu and not wanted:
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    _check(func, name, given, on_gpu, bool(wanted))
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    func = ATTENTION.get(func, func)
    plain_args, plain_kwargs = tree_map(held_by, (args, kwargs))
    known = {id(held_by(x)): x for x in given}
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
            waits(func)
        return
    if name in _INDEXING:
        if not isinstance(given[0], GpuTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as self")
        masks = any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if masks or any(not isinstance(x, GpuTensor) and x.dim() for x in given[1:]):
            waits(func)
        return
    if name in ("item", "_local_scalar_dense", "is_nonzero", "equal") or _SIZED & set(func.tags):
        waits(func)
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
