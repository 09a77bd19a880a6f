"""Tensor-parallel decode: ranks share heads and weights in short steps; each has all in long ones.

A rank computes the queries, keys and values of its heads (`razor_dist.heads.layout.ShortHeads`),
the columns of the out-projection that belong to them, a range of the MLP's inner features, whole
experts of its own, and a range of the vocabulary. What ranks compute of the same numbers is added
up: two all-reduces a layer. A rank's part of a weight is a view of the whole one, which long steps
need; a copy, one part in P of the matrix, where its rows are not together, and of columns on CPU.

Which layers are split how is read from transformers' own plan (``base_model_tp_plan``). A model
without one, or whose plan does not name what is looked for, is not shared (`why_not`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from razor_dist.heads.layout import HeadLayout, ShortHeads
from razor_dist.kernels.linear import Joined, joins, linear
from razor_dist.models.shape import ModelShape, routed_of
from razor_dist.parallel.comm import Communicator

# Inner features and rows of the vocabulary are dealt out in units of a vector's length.
_UNIT = 16

_QKV = ("q_proj", "k_proj", "v_proj")
_FUSED_QKV = "qkv_proj"

Forward = Callable[..., Tensor]


@dataclass
class _Block:
    """An attention or MLP of one layer: its linear layers by what the plan says of them."""

    inputs: dict[str, nn.Linear] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)  # inputs whose outputs are wanted whole
    output: nn.Linear | None = None
    others: list[nn.Parameter] = field(default_factory=list)  # of an attention, in no linear layer


@dataclass
class _Layer:
    attention: _Block
    mlp: _Block
    experts: nn.Module | None


def _layers(model: PreTrainedModel) -> list[_Layer] | str:
    """The parts of a model's layers that its plan splits, or why they are unknown."""
    body = model.base_model
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        return f"transformers has no tensor-parallel plan for {model.config.model_type}"
    blocks: dict[str, _Block] = {}
    experts: dict[str, nn.Module] = {}
    attentions: dict[int, str] = {}
    for name, module in body.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name), "")
        parent, _, leaf = name.rpartition(".")
        if isinstance(getattr(module, "layer_idx", None), int):
            attentions[module.layer_idx] = name
        if style == "moe_tp_experts":
            experts[parent] = module
        elif isinstance(module, nn.Linear) and style.startswith(("colwise", "rowwise")):
            block = blocks.setdefault(parent, _Block())
            if style.startswith("rowwise"):
                block.output = module
            else:
                block.inputs[leaf] = module
                if style != "colwise":
                    block.gathered.add(leaf)
    found = []
    for layer in range(model.config.num_hidden_layers):
        name = attentions.get(layer, "")
        attention = blocks.get(name)
        if attention is None or attention.output is None:
            return f"the plan of {model.config.model_type} does not split its attention"
        linear = (*attention.inputs.values(), attention.output)
        split = {id(parameter) for module in linear for parameter in module.parameters()}
        own_parameters = body.get_submodule(name).parameters()
        attention.others = [p for p in own_parameters if id(p) not in split]
        prefix = name.rpartition(".")[0] + "."
        others = [b for n, b in blocks.items() if n.startswith(prefix) and n != name]
        if len(others) > 1:
            return f"the plan of {model.config.model_type} has layers of an unknown kind"
        own = [module for n, module in experts.items() if n.startswith(prefix)]
        mlp = others[0] if others else _Block()
        found.append(_Layer(attention, mlp, own[0] if own else None))
    return found


def why_not(model: PreTrainedModel) -> str | None:
    """Why the ranks cannot share a model's short steps, as the end of a sentence; or None."""
    found = _layers(model)
    return found if isinstance(found, str) else None


def is_compact(model: PreTrainedModel) -> bool:
    """Return whether a model's attention takes any number of heads, so that others can be left out.

    Others read their queries, keys and values from fixed places of one product, norm all heads
    together, or have weights of each head (Command R+'s norms).
    """
    found, dim = _layers(model), ModelShape.from_config(model.config).head_dim
    assert not isinstance(found, str)
    return all(
        set(block.inputs) == set(_QKV)
        and not block.gathered
        and all(parameter.shape == (dim,) for parameter in block.others)
        for block in (layer.attention for layer in found)
    )


@cache
def expected_most(experts: tuple[int, ...], routed: int) -> float:
    """Return how many of a token's ``routed`` experts the rank with most of them computes.

    It is the mean over all choices of experts, of which ranks have ``experts`` each:
    the sum over m of P(some rank has more than m of them), counted by the products of
    ``sum_{j <= m} C(n, j) x^j`` over the ranks.
    """
    every, found = math.comb(sum(experts), routed), 0.0
    for most in range(routed):
        ways = [1] + [0] * routed  # of choosing 0, 1, ... experts of the ranks so far
        for n in experts:
            own = [math.comb(n, j) for j in range(most + 1)]
            ways = [
                sum(c * ways[t - j] for j, c in enumerate(own[: t + 1])) for t in range(routed + 1)
            ]
        found += 1 - ways[routed] / every
    return found


def part_of(n: int, rank: int, size: int) -> tuple[int, int]:
    """The range of n features that a rank computes: whole units, as even as they go."""
    units = -(-n // _UNIT)
    return min(n, units * rank // size * _UNIT), min(n, units * (rank + 1) // size * _UNIT)


class TensorParallel:
    """Makes a model compute this rank's part of a step, while `sharing`.

    ``layout`` is that of tensor-parallel decode. All ranks run the same shared steps, whose logits
    `gather_logits` gathers. ``kind`` is the kind of device that is planned, if not the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        layout: HeadLayout,
        comm: Communicator,
        kind: str | None = None,
    ) -> None:
        layers, share = _layers(model), layout.share
        assert not isinstance(layers, str) and share is not None
        self._comm, self._shape, self._part = comm, shape, share
        kind = kind or model.device.type
        self._copies_columns, self._joins = kind == "cpu", joins(kind)
        self._active = False
        self._changed: list[tuple[nn.Module, Forward]] = []
        # Parameters that one token is multiplied by: of this rank, by layer, then of the head; and
        # of the same matrices as a whole. Of experts, those of the busiest rank: `expected_most`.
        self.parameters: list[int] = []
        self.whole_parameters = 0
        self.sums = 0  # over all ranks, of a step's hidden states
        for layer, heads in zip(layers, layout.short, strict=True):
            self.parameters.append(0)
            self._share_attention(layer.attention, heads)
            self._share_mlp(layer.mlp)
            if layer.experts is not None:
                routed = round(routed_of(model.config)) or 1
                self._share_experts(layer.experts, routed)
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self._vocabulary = [
            part_of(head.out_features, rank, share.size) for rank in range(share.size)
        ]
        self.parameters.append(0)
        self._change_rows(head, [self._vocabulary[share.rank]])

    @contextmanager
    def sharing(self) -> Iterator[None]:
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def remove(self) -> None:
        """Leave the model as it was."""
        for module, whole in self._changed:
            module.forward = whole

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Rank 0: ``[n, V]`` from every rank's columns; the others get none of the rows."""
        widths = [end - begin for begin, end in self._vocabulary]
        padded = functional.pad(logits, (0, max(widths) - logits.shape[-1]))
        found = self._comm.all_gather(padded, "tensor")
        if self._comm.rank:
            return logits.new_empty(0, sum(widths))
        return torch.cat([part[:, :width] for part, width in zip(found, widths, strict=True)], -1)

    def _change(self, module: nn.Module, shared: Forward, own: int, of: int) -> None:
        """Have a module run ``shared`` while `sharing`, with its ``own`` parameters ``of`` all."""
        whole = module.forward
        self.parameters[-1] += own
        self.whole_parameters += of

        def forward(*inputs: Tensor) -> Tensor:
            return shared(*inputs) if self._active else whole(*inputs)

        module.forward = forward
        self._changed.append((module, whole))

    def _change_rows(
        self, module: nn.Linear, runs: Sequence[tuple[int, int]], *, in_place: bool = False
    ) -> None:
        own = module.in_features * sum(end - begin for begin, end in runs)
        shared = _rows(module, runs, in_place=in_place)
        self._change(module, shared, own, module.weight.numel())

    def _change_all_rows(
        self, modules: Sequence[nn.Linear], runs: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """The same for layers of one input, which are called in this order."""
        if not self._joins or len(modules) == 1 or not all(runs):
            for module, of_module in zip(modules, runs, strict=True):
                self._change_rows(module, of_module)
            return
        pairs = list(zip(modules, runs, strict=True))
        joined = Joined(
            [_run(module.weight, of_module) for module, of_module in pairs],
            [None if m.bias is None else _run(m.bias, of_module) for m, of_module in pairs],
        )
        for index, (module, weight) in enumerate(zip(modules, joined.weights, strict=True)):
            shared = partial(joined.forward, index)
            self._change(module, shared, weight.numel(), module.weight.numel())

    def _share_attention(self, block: _Block, heads: ShortHeads) -> None:
        dim, group = self._shape.head_dim, self._shape.group
        kv = _runs(heads.retrieval + heads.streaming, dim)
        q = [(begin * group, end * group) for begin, end in kv]
        if self._part.compact:
            self._change_all_rows([block.inputs[name] for name in _QKV], [q, kv, kv])
        elif set(block.inputs) == {_FUSED_QKV}:
            after_q = dim * self._shape.query_heads
            after_k = after_q + dim * self._shape.kv_heads
            moved = [(begin + at, end + at) for at in (after_q, after_k) for begin, end in kv]
            self._change_rows(block.inputs[_FUSED_QKV], q + moved, in_place=True)
        assert block.output is not None
        self._change_columns(block.output, _runs(heads.outputs, dim))

    def _share_mlp(self, block: _Block) -> None:
        if block.output is None or not block.inputs:
            return
        inner = block.output.in_features
        begin, end = part_of(inner, self._part.rank, self._part.size)
        # Gate and up may be one matrix, one after the other.
        runs = [
            [(at + begin, at + end) for at in range(0, module.out_features, inner) if begin < end]
            for module in block.inputs.values()
        ]
        self._change_all_rows(list(block.inputs.values()), runs)
        self._change_columns(block.output, [(begin, end)] if begin < end else [])

    def _share_experts(self, experts: nn.Module, routed: int) -> None:
        """Compute the experts of this rank; a token's other experts are those of other ranks."""
        whole, count = experts.forward, int(experts.num_experts)  # type: ignore[arg-type]
        device = next(experts.parameters()).device  # a copy to it could not be recorded
        owner = torch.arange(count, device=device) * self._part.size // count
        others = owner != self._part.rank
        each = sum(parameter.numel() for parameter in experts.parameters()) // count

        def shared(states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            left = others[index]
            # With the flag below, transformers skips an index beyond the last expert.
            index, weights = index.masked_fill(left, count), weights.masked_fill(left, 0.0)
            experts._is_expert_parallel = True  # type: ignore[assignment]
            try:
                found = whole(states, index, weights)
            finally:
                experts._is_expert_parallel = False  # type: ignore[assignment]
            return self._sum(found)

        counts = Counter(expert * self._part.size // count for expert in range(count))
        busiest = expected_most(tuple(counts.values()), routed)
        self.sums += 1
        self._change(experts, shared, round(busiest * each), routed * each)

    def _change_columns(self, module: nn.Linear, runs: Sequence[tuple[int, int]]) -> None:
        """Multiply by these columns of the weight, in order, and add up all ranks' products."""
        whole, bias = module.weight, module.bias
        if not runs:
            weight = None
        elif len(runs) == 1 and not self._copies_columns:
            weight = whole[:, slice(*runs[0])]
        else:  # a copy, but of one part in P of the matrix; on CPU rows apart are read slowly
            weight = torch.cat([whole[:, slice(*run)] for run in runs], dim=1)

        def shared(x: Tensor) -> Tensor:
            if weight is not None:
                total = self._sum(linear(x, weight))
            else:
                total = self._sum(x.new_empty(*x.shape[:-1], len(whole)).zero_())
            return total if bias is None else total + bias

        own = len(whole) * sum(end - begin for begin, end in runs)
        self.sums += 1
        self._change(module, shared, own, whole.numel())

    def _sum(self, part: Tensor) -> Tensor:
        return self._comm.sum(part, "tensor")


def _runs(heads: Sequence[int], dim: int) -> list[tuple[int, int]]:
    """Ranges of features, of ``dim`` for each head; heads that follow each other make one."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and runs[-1][1] == head * dim:
            runs[-1] = (runs[-1][0], (head + 1) * dim)
        else:
            runs.append((head * dim, (head + 1) * dim))
    return runs


def _run(whole: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return runs of rows, one after the other: a view of one, a copy of several."""
    parts = [whole[begin:end] for begin, end in runs] or [whole[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(module: nn.Linear, runs: Sequence[tuple[int, int]], *, in_place: bool = False) -> Forward:
    """Compute some outputs of a linear layer: end to end, or ``in_place`` among zeros."""
    weight = _run(module.weight, runs)
    bias = None if module.bias is None else _run(module.bias, runs)
    outputs = module.out_features

    def compact(x: Tensor) -> Tensor:
        return linear(x, weight, bias) if runs else x.new_empty(*x.shape[:-1], 0)

    def placed(x: Tensor) -> Tensor:
        out, found = x.new_zeros(*x.shape[:-1], outputs), compact(x)
        parts = found.split([end - begin for begin, end in runs], dim=-1)
        for (begin, end), part in zip(runs, parts, strict=True):
            out[..., begin:end] = part
        return out

    return placed if in_place else compact
