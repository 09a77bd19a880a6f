"""Linear layers on CPUs: in float32 by the fastest of several ways, or with 8-bit weights.

On x86 `torch.nn.functional.linear` calls MKL, which on processors of other makers than Intel keeps
to slower code: on an AMD EPYC with two threads a matrix-vector product reads its matrix at 15 GB/s
where the machine reads 40, and a product of many rows runs at 190 GFLOP/s where oneDNN, which torch
carries too, has 420. On an Intel Xeon it is the other way round (docs/LOG.md). Up to `FEW` rows the
compiled operation (`razor_dist.kernels.compiled`) is the fastest where it was measured: eight rows
take it a sixth longer than one, and oneDNN 1.5 times as long. So the ways are timed, once in a
process.

``mkldnn::_linear_pointwise`` is the op that torch's own compiler emits, and private; pyproject.toml
pins torch and ``tests/test_kernels_linear.py`` checks what we rely on.
"""

from __future__ import annotations

import functools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from razor_dist.kernels.compiled import operations

# For the product with one vector, a matrix is cut into up to this many blocks of rows: MKL computes
# a batch of products side by side and by better code than a single one.
_BLOCKS = 16

# The largest integer of a rounded input. Without VNNI the sum of two products is kept in 16 bits,
# which 127 could overflow.
_MOST = 127 if torch.cpu._is_vnni_supported() else 63
# Added to rounded inputs to make them unsigned: on processors with VNNI but without AMX, oneDNN
# multiplies signed ones by reference code (docs/LOG.md).
_ZERO = _MOST + 1

_AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()

# The most rows for which the compiled operation is timed: with more it is bound by arithmetic.
FEW = 24
# Up to this many rows, as in the longest step with drafts, a row's product is rounded as if it were
# alone. Not so of experts and GPT-2's `Conv1D`, which transformers computes.
ALIKE = 8
# The most rows that the compiled operation multiplies in 8 bits, as in the longest recorded step.
# oneDNN takes half its time for 32, but other operations before and after take more (docs/LOG.md).
_FEW_INT8 = 32

Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # takes the arguments of `linear`
# Ways are timed three times, on nine matrices one after the other (32 MB).
_MATRICES, _ROUNDS = (9, 1536, 576), 3
# Numbers of rows that are timed (others go by the next larger one, or the last), and the share of
# the first way's time that another way must stay below. Times of many rows vary less.
_SHARE = {1: 0.8, 4: 0.8, 8: 0.8, FEW: 0.8, 64: 0.8, 256: 0.95}
_ROWS = tuple(_SHARE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as `torch.nn.functional.linear` but for rounding.

    ``x`` is ``[..., I]``, ``weight`` ``[O, I]``, ``bias`` ``[O]`` and the result ``[..., O]``.
    """
    if not _served(x, weight):
        return functional.linear(x, weight, bias)
    rows = x.numel() // weight.shape[1]
    timed = _ROWS[min(bisect_left(_ROWS, rows), len(_ROWS) - 1)]
    return fastest_way(timed)(x, weight, bias)


def by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row's product, as a batch of products with blocks of the matrix."""
    outputs, inputs = weight.shape
    blocks = math.gcd(outputs, _BLOCKS)
    # A transposed row, not a reshaped one: strides (1, I) lead MKL to the faster of its two ways.
    column = x.reshape(1, inputs).t().expand(blocks, inputs, 1)
    product = torch.bmm(weight.unflatten(0, (blocks, -1)), column).view(*x.shape[:-1], outputs)
    return product if bias is None else product + bias


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def by_compiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a few rows, none of which depends on the others; needs `operations`."""
    out: Tensor = operations().linear(x, weight, bias)
    return out


@functools.cache
def fastest_way(rows: int) -> Way:
    """Time the ways on this machine; return the first, unless another is much faster.

    The first is `by_compiled` for up to `FEW` rows if it is available, else torch's own. The choice
    stays for the whole process, even if some steps have fewer threads, because ways round
    differently. For the same reason up to `ALIKE` rows go by `by_compiled` if one row does: the
    logits of an answer's tokens are the same whether a step reads one of them or several.
    """
    if 1 < rows <= ALIKE and fastest_way(1) is by_compiled:
        return by_compiled
    few = rows <= FEW and operations() is not None
    ways: list[Way] = [by_compiled] if few else []
    ways.append(functional.linear)
    if _AVAILABLE:
        ways += [by_onednn, by_blocks] if rows == 1 else [by_onednn]
    matrices, x = torch.ones(_MATRICES), torch.ones(rows, _MATRICES[-1])
    least = _least_seconds(ways, x, matrices)
    best = least.index(min(least))
    return ways[best if least[best] < _SHARE[rows] * least[0] else 0]


def choose_ways() -> None:
    """Time the ways for all numbers of rows now, and not during the first steps."""
    for rows in _ROWS:
        fastest_way(rows)


@torch.inference_mode()
def _least_seconds(ways: Sequence[Way], x: Tensor, matrices: Tensor) -> list[float]:
    """The least seconds of each way for the products of ``x`` with all matrices."""
    rounds = [[_seconds(way, x, matrices) for way in ways] for _ in range(_ROUNDS)]
    return [min(of_way) for of_way in zip(*rounds, strict=True)]


def _seconds(way: Way, x: Tensor, matrices: Tensor) -> float:
    began = time.perf_counter()
    for matrix in matrices:
        way(x, matrix, None)
    return time.perf_counter() - began


def _served(x: Tensor, weight: Tensor) -> bool:
    """True if ways other than torch's default can compute this; they have no gradients."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and (_AVAILABLE or operations() is not None)  # which may compile
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Int8Linear(nn.Linear):
    """A linear layer of 8-bit integers: ``y = s_x s_w (q_x . q_w)``, added up in 32 bits.

    ``q_w = round(w / s_w)`` with a scale for each output, ``q_x = round(x / s_x)`` with one for
    each row, so that a row's result does not depend on the other rows. `use_int8_linear` makes it
    from a float32 layer on CPU, whose ``weight`` stays as it was and is not read.

    ``onednn::qlinear_pointwise`` is the op that torch's compiler emits for quantized models. Where
    it is slow the integers are multiplied as float32, whose sums are exact below 2^24.
    """

    _codes: Tensor | None  # [O, I]; None where only oneDNN multiplies
    _packed: Tensor | None  # the same for oneDNN
    _scales: Tensor
    _zeros: Tensor

    def pack(self) -> None:
        weight = self.weight.detach()
        self._scales = _step(weight, 127).flatten()
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        codes = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed = None if _onednn_is_slow() else _packed_weights(codes)
        self._codes = codes if self._packed is None or operations() is not None else None

    def forward(self, input: Tensor) -> Tensor:
        compiled = operations()
        if compiled is not None and input.numel() <= _FEW_INT8 * self.in_features:
            of = self._codes, self._scales, self.bias, _MOST
            few: Tensor = compiled.linear_int8(input, *of)
            return few
        quantized, step = _rounded(input.reshape(-1, self.in_features))
        product = self._product(quantized).mul_(step)
        out: Tensor = product.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _product(self, rows: Tensor) -> Tensor:
        """``s_w (q_x . q_w)`` of the rows ``q_x + _ZERO``, uint8."""
        if self._packed is None:
            assert self._codes is not None
            return linear(rows.float() - _ZERO, self._codes.float()).mul_(self._scales)
        if len(rows) != 1:
            return _by_onednn_int8(rows, self._packed, self._scales, self._zeros)
        # Of one row oneDNN computes the product by slow code: 199 ms where two take 38
        # (docs/LOG.md).
        return _by_onednn_int8(rows.repeat(2, 1), self._packed, self._scales, self._zeros)[:1]


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``round(x / step) + _ZERO`` of each row, uint8, and its step, ``[n, 1]``."""
    if operations() is not None:
        found: tuple[Tensor, Tensor] = operations().round_rows(rows, _MOST, _ZERO)
        return found
    step = _step(rows, _MOST)
    return (rows / step).round_().add_(_ZERO).to(torch.uint8), step


def _packed_weights(codes: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes, None)
    return packed


def _by_onednn_int8(rows: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    weights = packed, scales, zeros
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        *(rows, 1.0, _ZERO, *weights, None, 1.0, 0, torch.float32, "none", [], "")
    )
    return product


@functools.cache
def _onednn_is_slow() -> bool:
    """True if oneDNN's 8-bit products take twice as long as float32's; on an EPYC, 300 times."""
    weight = torch.ones(_MATRICES[1:])
    packed, scales = _packed_weights(weight.to(torch.int8)), torch.ones(len(weight))
    zeros = torch.zeros(len(weight), dtype=torch.int32)

    def by_onednn_int8(x: Tensor, *_: Tensor | None) -> Tensor:
        return _by_onednn_int8(x.to(torch.uint8), packed, scales, zeros)

    ways: list[Way] = [by_onednn_int8, functional.linear]
    eight_bits, float32 = _least_seconds(ways, torch.ones(16, weight.shape[1]), weight[None])
    return eight_bits > 2 * float32


def _step(x: Tensor, most: int) -> Tensor:
    """The scale of each row's integers, ``[n, 1]``, of which the largest is ``most``."""
    return x.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny * most) / most


# The most rows for which `Joined` layers are one product. With more, launches do not matter, and a
# layer's output would stay in memory until those of all layers are freed.
_FEW_JOINED = 64


class Joined:
    """Several linear layers of one input, computed as one product to save launches.

    The layers must be called in their order with the same tensor. The first call computes all
    outputs, and the others return theirs. More than 64 rows are computed layer by layer.

    Parameters
    ----------
    weights : sequence of Tensor
        ``[O_i, I]``. They are copied to one matrix, `weights`, of which they may become views.
    biases : sequence of (Tensor or None)
        ``[O_i]``.
    """

    @torch.no_grad()  # else an input's gradients would include those of the weights
    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._sizes, self._biases = [len(weight) for weight in weights], list(biases)
        self._weight, self._bias = torch.cat(list(weights)), None
        if any(bias is not None for bias in biases):
            pairs = zip(weights, biases, strict=True)
            self._bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        self._waiting: list[Tensor] = []  # the input, and the outputs of the layers to come

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self._weight.split(self._sizes)

    def forward(self, index: int, x: Tensor) -> Tensor:
        """The output of the ``index``-th layer."""
        if x.shape[-2] > _FEW_JOINED:
            return linear(x, self.weights[index], self._biases[index])
        if index == 0:
            self._waiting = [x, *linear(x, self._weight, self._bias).split(self._sizes, -1)]
        given, out = self._waiting[0], self._waiting.pop(1)
        left = len(self._sizes) - index
        assert given is x and len(self._waiting) == left, "layers of one input, in their order"
        if left == 1:
            self._waiting = []  # activations that no other layer needs
        return out


def joins(kind: str) -> bool:
    """True for devices on which launches take so long that `Joined` layers are faster."""
    return kind == "cuda"


# The layers of an attention or MLP that have one input, in the order in which they are called.
_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def use_joined_linear(model: nn.Module) -> None:
    """Compute layers of one input as one product; their weights become views of one matrix."""
    for module in model.modules():
        for names in _OF_ONE_INPUT:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if not all(type(layer) is Linear for layer in layers):
                continue
            joined = Joined([layer.weight for layer in layers], [layer.bias for layer in layers])
            for index, (layer, weight) in enumerate(zip(layers, joined.weights, strict=True)):
                layer.weight.data = weight
                layer.forward = functools.partial(joined.forward, index)


def use_fast_linear(model: nn.Module) -> None:
    """Compute a model's plain `torch.nn.Linear` layers, but no subclasses, by `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def use_int8_linear(model: nn.Module) -> int:
    """Turn a model's linear layers, including the output head, into `Int8Linear`.

    Return the number of their parameters. Others, such as a mixture's experts, stay as they are.
    """
    packed = 0
    for module in model.modules():
        if type(module) in (nn.Linear, Linear):
            module.__class__ = Int8Linear
            assert isinstance(module, Int8Linear)
            module.pack()
            packed += module.weight.numel()
    return packed
