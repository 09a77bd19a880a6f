"""Count the bytes that code allocates, tensor by tensor, on any device, also the meta device."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)
# On the meta device these run Python for strides and dtypes, which takes milliseconds each, and
# merges of partial results are hundreds of them. Here only the result's size matters.
_COMPARISONS = frozenset({_aten.gt.Scalar, _aten.eq.Scalar, _aten.eq.Tensor})
_POINTWISE = _COMPARISONS | {
    *(getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(getattr(_aten, name).default for name in ("exp", "log", "reciprocal", "maximum")),
    _aten.masked_fill.Scalar,
    _aten.where.self,
    _aten.where.ScalarOther,
}
_IN_PLACE = _aten.addcmul_.default
# A mixture's experts; on the meta device it refuses all dtypes but bfloat16.
_GROUPED = _aten._grouped_mm.default


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists.

    torch's pytrees would do it, but took half of a plan's time.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _like_pointwise(func: Any, inputs: Sequence[Tensor]) -> Tensor:
    """A meta tensor of the size of a pointwise operation's result."""
    shapes = {tensor.shape for tensor in inputs}
    shape = shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in inputs))
    if func in _COMPARISONS:
        dtype = torch.bool
    return torch.empty(shape, dtype=dtype, device="meta")


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active, until they are freed.

    Every operation's results pass through `__torch_dispatch__`; a storage that was not seen before
    counts from then until Python frees it. Memory that a kernel allocates and frees itself, or that
    an allocator keeps, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = "model"  # of new tensors; see `labelled`
        self.live = self.peak = 0  # bytes now, and the most so far
        self.at_peak: dict[int, tuple[str, int]] = {}  # label and bytes of storages at the peak
        self._alive: dict[int, tuple[str, int]] = {}
        self._numbers = itertools.count()
        # Numbers of storages; -1 for storages from outside, which are not counted.
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The meta device has no numbers to read, so they are zero: transformers looks whether
        # positions are of several packed sequences, which would need a mask.
        if func in _READS and args[0].is_meta:
            return 0
        inputs = list(_tensors_in((*args, *(kwargs or {}).values())))
        for tensor in inputs:
            self._known.setdefault(tensor.untyped_storage(), -1)
        if func is _IN_PLACE and args[0].is_meta:
            result = args[0]
        elif func is _GROUPED and args[0].is_meta:
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        elif func in _POINTWISE and inputs[0].is_meta:
            result = _like_pointwise(func, inputs)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in([result]):
            self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        number, size = next(self._numbers), storage.nbytes()
        self._known[storage] = number
        self._alive[number] = (self.label, size)
        weakref.finalize(storage, self._free, number)
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
            self.at_peak = dict(self._alive)

    def _free(self, number: int) -> None:
        self.live -= self._alive.pop(number)[1]

    def relabel(self, tensor: Tensor, label: str) -> None:
        number = self._known.get(tensor.untyped_storage())
        if number in self._alive:
            self._alive[number] = (label, self._alive[number][1])

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def transient(self) -> Counter[str]:
        """Bytes at the peak by label, without storages that are still alive."""
        sizes: Counter[str] = Counter()
        for number, (label, size) in self.at_peak.items():
            if number not in self._alive:
                sizes[label] += size
        return sizes
