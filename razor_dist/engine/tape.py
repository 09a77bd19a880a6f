"""Decode steps on CPU as lists of operations: recorded once, repeated without the model's Python.

What a short step takes on a CPU is half Python: modules, their hooks, shapes and views, thirty
layers of them. A tape notes the operations that are left of a step, with the memory that each reads
and writes, and repeats these alone, from C++ (`kernels/cpu/tape.h`). Like a CUDA graph
(`razor_dist.engine.graph`), it repeats the same work on the same memory: a number that was read
from a Python variable while recording stays as it was, and what was computed from a tensor is
computed from what that tensor holds now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.device import drafts_config
from razor_dist.kernels.linear import ALIKE
from razor_dist.parallel.comm import Communicator

Call = Callable[[], object]
StepFunction = Callable[[], tuple[Tensor, ...]]

# Numbers that come from the host, or go to it, or decide on shapes, would be recorded as they were.
_FORBIDDEN = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "lift_fresh")
_FORBIDDEN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_FORBIDDEN_METHODS = ("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__")
# Memory that is set aside, not written: nothing to repeat.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Tape:
    """A `razor_dist.engine.graph.Recorder` for CPU, and for the collectives of ``comm``.

    A recording keeps all that its operations compute (`razor_dist.engine.capacity.recorded_bytes`),
    so it is of few sequences. That its lengths are padded costs nothing: what is read of a cache
    follows from how long a sequence is.
    """

    most_sequences = 32
    pad = 1 << 14

    def __init__(self, comm: Communicator, most_rows: int = 1 << 30) -> None:
        self._comm, self.most_rows = comm, most_rows
        self._found: list[list[Tensor]] = []  # by collectives of the last `warm_up`

    def rows(self, sequences: int) -> int:
        """As many as there are if more rows would round otherwise, else a multiple of `ALIKE`."""
        return _rows(sequences)

    def warm_up(self, step: StepFunction) -> None:
        """Run the step, and keep what its collectives bring."""
        self._found = []

        def collective(call: Call, results: Sequence[Tensor]) -> None:
            call()
            self._found.append([result.clone() for result in results])

        with self._comm.handing_to(collective):
            step()

    def record(self, step: StepFunction) -> StepFunction:
        """Run the step again, and return what repeats it.

        Its collectives bring what they brought in `warm_up`: nothing is sent, and no rank waits for
        one that cannot record.
        """
        log, found = _Log(), iter(self._found)

        def collective(call: Call, results: Sequence[Tensor]) -> None:
            with _disable_current_modes():
                for result, was in zip(results, next(found), strict=True):
                    result.copy_(was)
            log.calls.append(call)

        try:
            with _as_if_traced(), self._comm.handing_to(collective), log, _NoReads():
                results = step()
        finally:
            self._found = []
        calls = _compiled(log.calls)

        def replay() -> tuple[Tensor, ...]:
            for call in calls:
                call()
            return tuple(x.clone() for x in results)  # the next replay writes over these

        return replay


def _rows(sequences: int) -> int:
    return sequences if sequences <= ALIKE else -(-sequences // ALIKE) * ALIKE


def recorded_rows(config: EngineConfig) -> int:
    """Rows that a rank's recordings on CPU may have together: at most 108, the same on all ranks.

    A batch whose answers end one after another has a step of each size, and all of them stay.
    """
    most = config.max_num_seqs
    if drafts_config(config, torch.device("cpu")) is not None:
        # Drafts bring a step to that many tokens (`ModelRunner.most_decoded`).
        most = max(most, Tape.most_sequences if config.retrieval_share else ALIKE)
    return sum({_rows(tokens + 1) for tokens in range(min(most, Tape.most_sequences))})


@contextmanager
def _as_if_traced() -> Iterator[None]:
    """Keep transformers from looking at positions on the host, as when it is compiled."""
    before = masking_utils.is_tracing
    masking_utils.is_tracing = lambda *_, **__: True
    try:
        yield
    finally:
        masking_utils.is_tracing = before


class _NoReads(TorchFunctionMode):
    """Refuses what reads a tensor without an operation that `_Log` would see."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _FORBIDDEN_METHODS:
            raise RuntimeError(f"{name} cannot be recorded")
        return function(*args, **(kwargs or {}))


class _Log(TorchDispatchMode):
    """Runs operations and notes how to repeat each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Operation | Call] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        masks = (torch.bool, torch.uint8)
        masked = name == "index" and any(x.dtype in masks for x in given[1:])
        counted = name == "repeat_interleave" and len(given) > 1  # by a tensor
        sized = name != "index" and _FORBIDDEN_TAGS & set(function.tags)  # index: by masks only
        if name in _FORBIDDEN or masked or counted or sized:
            raise RuntimeError(f"{name} cannot be recorded")
        result = function(*args, **kwargs)
        storages = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        # A view looks at the memory that later replays write to: nothing to repeat.
        new = [x.untyped_storage().data_ptr() not in storages for x in made]
        if function._schema.is_mutable or (any(new) and name not in _FREE):
            self.calls.append(_operation(function, args, kwargs, made, new))
        return result


class _Operation(NamedTuple):
    """An operation with its arguments, and the tensors to which its results are copied, or None."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Tensor | None]


def _operation(
    function: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor], new: list[bool]
) -> _Operation:
    """Return what computes the same again, into the memory that has it now."""
    if not any(new):
        return _Operation(function, args, kwargs, [])
    written = _writing(function, len(made)) if all(new) else None
    if written is None:
        returns = [str(result.type) for result in function._schema.returns]
        if returns != ["Tensor"] * len(made):
            raise RuntimeError(f"{function} cannot be recorded: it returns {returns}")
        results = [old if is_new else None for old, is_new in zip(made, new, strict=True)]
        return _Operation(function, args, kwargs, results)
    names = [argument.name for argument in written._schema.arguments[-len(made) :]]
    return _Operation(written, args, kwargs | dict(zip(names, made, strict=True)), [])


def _writing(function: Any, results: int) -> Any:
    """Return the overload of an operation that writes its results to ``out``, if there is one.

    One that is made of others may choose them differently then, and round otherwise.
    """
    if function._can_decompose():
        return None

    def arguments(of: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in of._schema.arguments]

    outs = ["out"] if results == 1 else [f"out{number}" for number in range(results)]
    wanted = [*arguments(function), *((name, "Tensor") for name in outs)]
    for overload in ("out", f"{function._overloadname}_out"):
        found = getattr(function.overloadpacket, overload, None)
        if found is not None and arguments(found) == wanted:
            return found
    return None


def _compiled(calls: Sequence[_Operation | Call]) -> list[Call]:
    """Return the calls with each run of operations as one."""
    found: list[Call] = []
    for noted, run in groupby(calls, lambda call: isinstance(call, _Operation)):
        if not noted:
            found += cast("Iterator[Call]", run)
            continue
        tape = torch.classes.razor_dist_cpu.Tape()  # of kernels/cpu/tape.h
        for operation in cast("Iterator[_Operation]", run):
            tape.note(True)
            try:
                operation.function(*operation.args, **operation.kwargs)
            finally:
                tape.note(False)
            tape.copy_to(operation.results)
        found.append(tape.run)
    return found
