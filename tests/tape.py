"""A CUDA graph's stand-in on CPU: operations recorded once, replayed on the same tensors.

A replay runs no Python of the step: a number that was read from a Python variable while recording
stays as it was, and what was computed from a tensor is computed from what that tensor holds now.
Recording sends nothing. Whatever a capture forbids, a read of a tensor by the host above all, is
an error here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from razor_dist.parallel import comm

_all_gather = comm.gather_into

# They wait for the device or copy from the host's pageable memory.
_FORBIDDEN = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "lift_fresh")


class Tape:
    """A `razor_dist.engine.graph.Recorder` for CPU.

    Attributes
    ----------
    recorded, replayed : int
        How often.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self._gathered: list[Tensor] = []

    def warm_up(self, step: Callable[[], Tensor]) -> None:
        """Run the step, and keep what its collectives brought."""
        self._gathered = []

        def gather(out: Tensor, tensor: Tensor, group: Any) -> None:
            _all_gather(out, tensor, group=group)
            self._gathered.append(out.clone())

        with mock.patch("razor_dist.parallel.comm.gather_into", gather):
            step()

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record the step.

        Unlike a capture this runs it as well; the collectives' results are the warm-up's.
        """
        self.recorded += 1
        log = _Log()

        def gather(out: Tensor, tensor: Tensor, group: Any) -> None:
            with _disable_current_modes():
                out.copy_(self._gathered.pop(0))
            log.calls.append(lambda: _all_gather(out, tensor, group=group))

        # transformers looks at positions on the host unless CUDA tells it that it is captured.
        tracing = mock.patch("transformers.masking_utils.is_tracing", return_value=True)
        with tracing, mock.patch("razor_dist.parallel.comm.gather_into", gather), log:
            logits = step()

        def replay() -> Tensor:
            self.replayed += 1
            for call in log.calls:
                call()
            return logits.clone()

        return replay


class _Log(TorchDispatchMode):
    """Runs operations and notes how to repeat each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        masked = name == "index" and any(x.dtype == torch.bool for x in given[1:])
        if name in _FORBIDDEN or masked:
            raise RuntimeError(f"{name} cannot be captured")
        result = function(*args, **kwargs)
        storages = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        views = [x.untyped_storage().data_ptr() in storages for x in made]
        # A view looks at the memory that later replays write to: nothing to repeat.
        if function._schema.is_mutable or not all(views):

            def repeat() -> None:
                again = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
                for old, new, view in zip(made, again, views, strict=True):
                    if not view:
                        old.copy_(new)

            self.calls.append(repeat)
        return result
