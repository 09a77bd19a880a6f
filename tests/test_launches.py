"""A decode step's kernels: few a layer, that compute what more of them did.

Launching a kernel takes longer than most of a decode step's need to run, in a CUDA graph too. They
are counted on CPU: every operation that makes or changes numbers is a kernel, and so is each of
ours, whatever its definition in torch does.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    PhiConfig,
    PretrainedConfig,
)

from razor_dist.attention import decode
from razor_dist.engine import decode_mode
from razor_dist.kernels import decode_torch, fused
from razor_dist.kernels.compiled import operations
from razor_dist.kernels.linear import use_joined_linear
from razor_dist.models.bridge import run_body
from razor_dist.models.loader import load_model
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from tests import cases
from tests.cases import Case, answer, make_runner, prefill
from tests.logits import POLICY, split_of, tokens_of
from tests.ranks import Ranks
from tests.tiny_models import Tiny

# Memory that is set aside, not written.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided")


class Launches(TorchDispatchMode):
    """Counts kernels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        view = all(x.untyped_storage().data_ptr() in given for x in made)
        name = function.overloadpacket.__name__
        if (function._schema.is_mutable or not view) and name not in _FREE:
            self.found[name] += 1
        return result

    def as_one(self, function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        """Count a function as the kernels ``names``, one of each."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = function(*args, **kwargs)
            if self in _get_current_dispatch_mode_stack():
                self.found.update(names)
            return result

        return call


def step(
    comm: Communicator, path: str, sequences: int, ours: bool
) -> tuple[Counter[str], Tensor | None]:
    """Kernels of one layer, which has heads of both kinds, in a step; and rank 0's logits.

    It is in bfloat16, since in float32 some conversions are none. Ours are the kernels of CUDA.
    """
    model = load_model(path, device=torch.device("cpu"), dtype=torch.bfloat16)
    shape = ModelShape.from_config(model.config)
    some = tuple(head < shape.kv_heads // 2 for head in range(shape.kv_heads))
    prompt = tokens_of(57)
    case = Case(path, (some,) * shape.layers, POLICY, prompt, (0,) * 20)
    case = dataclasses.replace(case, kv_dtype=torch.bfloat16)
    layer, counted = model.base_model.layers[1], Launches()
    family = sys.modules[type(layer).__module__]
    kernels = mock.Mock(
        store=counted.as_one(decode_torch.store, "store"),
        attend=counted.as_one(decode_torch.attend, "attend", "merge splits"),
        merge_ranks=counted.as_one(decode_torch.merge_ranks, "merge ranks"),
    )
    layers = mock.Mock(
        add_rms_norm=counted.as_one(fused.add_rms_norm, "add and norm"),
        rms_norm=counted.as_one(fused.rms_norm, "norm"),
        rotate=counted.as_one(fused.rotate, "rotate"),
        gated=counted.as_one(fused.gated, "gated"),
    )
    kernels.ROTATES = True
    with ExitStack() as patches:

        def patch(where: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(where, name, value))

        patch(cases, "model_and_shape", lambda *_: (model, shape))
        patch(comm, "all_gather", counted.as_one(comm.all_gather, "all-gather"))
        patch(decode, "implementation", lambda device: kernels if ours else decode_torch)
        patch(family, "apply_rotary_pos_emb", family.apply_rotary_pos_emb)
        if ours:
            patch(fused, "_kernels", lambda *_: layers)
            use_joined_linear(model)
            fused.use_fused_layers(model)
        made = make_runner(comm, case, sequences)
        for key in range(sequences):
            prefill(made, key, case)
        layer.register_forward_pre_hook(lambda *_: counted.__enter__() and None)
        layer.register_forward_hook(lambda *_: counted.__exit__(None, None, None))
        logits = made.execute(answer(*((key, 5 + key) for key in range(sequences))))
    return counted.found, logits


@pytest.mark.parametrize("family", ["glm", "llama", "qwen3", "phi3"])
def test_a_layer_is_few_kernels(family: str, ranks: Ranks, tiny: Tiny) -> None:
    path = str(tiny(family))
    for sequences in (1, 8) if family == "glm" else (2,):
        before, want = ranks(2).run(step, path, sequences, False)[0]
        after, got = ranks(2).run(step, path, sequences, True)[0]
        # Qwen3 norms queries and keys as well.
        assert after == Counter(KERNELS) + Counter(norm=2 * (family == "qwen3"))
        assert after.total() * 4 < before.total()
        # bfloat16 rounds to 1/256; fused layers round less often.
        assert (got - want).norm() <= 0.05 * want.norm()


def decoded(comm: Communicator, path: str, rotates: bool) -> Tensor | None:
    """Rank 0's logits after three tokens, with attention that rotates, if it can, and without."""
    kept = ((True, False),) * 2
    case = Case(path, kept, POLICY, tokens_of(57), (0,) * 20)
    kernels = mock.Mock(wraps=decode_torch, ROTATES=rotates)
    with mock.patch.object(decode, "implementation", lambda device: kernels):
        made = make_runner(comm, case)
        assert not decode_mode.postpones_rotations(made.model, comm)
        prefill(made, 0, case)
        logits = [made.execute(answer((0, token))) for token in (5, 6, 7)]
    return torch.cat([row for row in logits if row is not None])


@pytest.mark.parametrize("kind", [PhiConfig, HunYuanDenseV1Config, Ministral3Config])
def test_models_that_change_what_is_rotated_rotate_it_themselves(
    kind: type[PretrainedConfig], ranks: Ranks, tmp_path: Path
) -> None:
    """Phi rotates a part of each head; HunYuan norms behind that, and Ministral scales queries."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = kind(**sizes, **heads, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    want, got = (ranks(1).run(decoded, str(tmp_path), yes)[0] for yes in (False, True))
    torch.testing.assert_close(got, want)


def trials(comm: Communicator, path: str) -> int:
    """Make a runner where rank 0 alone has what rotates; count the passes that try it."""
    case = Case(path, split_of(Path(path)), POLICY, tokens_of(57))
    alone = mock.patch.object(decode_mode, "rotates", lambda device: comm.rank == 0)
    with alone, mock.patch.object(decode_mode, "run_without_attention") as tried:
        make_runner(comm, case)
    return tried.call_count


def test_all_ranks_try_to_rotate_in_attention_or_none(ranks: Ranks, tiny: Tiny) -> None:
    """With sharded weights a rank that tries it alone would wait for the others' shares."""
    assert ranks(2).run(trials, str(tiny("llama"))) == [0, 0]


def test_a_part_that_cannot_be_tried_stays_as_it_is() -> None:
    """BitNet norms between an MLP's products: its MLP fails on numbers of another width."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 192}
    config = BitNetConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    fused.use_fused_layers(model)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "BitNetMLP" in kinds and "FusedBitNetRMSNorm" in kinds


def test_no_mask_is_made_nor_looked_for(tiny: Tiny) -> None:
    """transformers would compare positions, to find packed sequences: six kernels and a wait."""
    for family in ("glm", "llama", "qwen3", "phi3"):
        model = load_model(str(tiny(family)), device=torch.device("cpu"), dtype=torch.float32)
        counted, context = Launches(), mock.Mock()
        context.attend = lambda layer, query, k, v: query.q.flatten(0, 1).transpose(0, 1)
        with torch.inference_mode(), counted:
            run_body(model, torch.tensor([5, 6]), context)
        assert not {"diff", "ne", "cumsum", "eq", "all", "_local_scalar_dense"} & set(counted.found)


# Of two ranks that do not share weights: those who do sum over the ranks twice as well.
KERNELS = {
    "add and norm": 2,
    "linear": 4,
    "store": 1,
    "attend": 1,
    "merge splits": 1,
    "all-gather": 1,
    "merge ranks": 1,
    "gated": 1,
}


OPERATIONS = ("rms_norm", "add_rms_norm", "rotate", "gated")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "glm", "glm4", "phi3"])
def test_fused_layers_are_transformers_own(family: str, tiny: Tiny) -> None:
    path = tiny(family)
    stock = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    ids = torch.tensor([tokens_of(40)])
    modeling = sys.modules[type(stock.base_model).__module__]
    kept = modeling.apply_rotary_pos_emb
    rotate = getattr(kept, "original", kept)  # another model may have replaced it
    with (
        torch.inference_mode(),
        mock.patch.object(modeling, "apply_rotary_pos_emb", rotate),
        mock.patch.object(fused, "_kernels") as kernels,
    ):
        made = {name: mock.Mock(wraps=getattr(fused, name)) for name in OPERATIONS}
        kernels.return_value = mock.Mock(**made)

        want = stock(ids).logits
        fused.use_fused_layers(stock)
        for operation in made.values():
            operation.reset_mock()
        got = stock(ids).logits
    layers = stock.config.num_hidden_layers
    assert made["rotate"].call_count == made["gated"].call_count == layers
    sums = made["add_rms_norm"].call_count
    if family == "glm4":  # it norms what it adds
        assert sums == 0 and made["rms_norm"].call_count == 4 * layers + 1
    else:
        assert sums == 2 * layers
        assert made["rms_norm"].call_count == 1 + 2 * layers * (family == "qwen3")
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert modeling.apply_rotary_pos_emb is kept
    assert rotate.__module__ == modeling.__name__


@pytest.mark.skipif(operations() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [48, 64])
def test_compiled_norms_and_rotary_embeddings_are_their_definitions(
    width: int, interleaved: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.inference_mode():
        x, weight = normal(2, 5, 101)[:, ::2], normal(101)
        assert fused._kernels(x, weight) is operations()
        assert fused._kernels(x, weight.bfloat16()) is None
        for rows, factors in (
            (x, weight),
            (x, weight.repeat_interleave(2)[::2]),
            (x.expand(300, 2, 3, 101), weight),  # by several threads
        ):
            got = operations().rms_norm(rows, factors, 1e-5)
            torch.testing.assert_close(got, fused.rms_norm(rows, factors, 1e-5))
            other = normal(*rows.shape[:-1], 202)[..., ::2]
            summed = operations().add_rms_norm(rows, other, factors, 1e-5)
            for a, b in zip(summed, fused.add_rms_norm(rows, other, factors, 1e-5), strict=True):
                torch.testing.assert_close(a, b)
            both = torch.cat([rows * 30, other], -1)
            gate, up = both.chunk(2, -1)
            torch.testing.assert_close(operations().gated(gate, up), fused.gated(gate, up))
        # As a model makes them: heads of a token are neighbours, of queries and keys too.
        for tokens in (7, 700, 0):
            q, k = normal(1, tokens, 9 + 3, 64).transpose(1, 2).split([9, 3], 1)
            angles = normal(1, tokens, width // 2).repeat(1, 1, 2)
            tables = angles.cos(), angles.sin()
            want = fused.rotate(q, k, *tables, interleaved)
            for queries in (q, q.mT.contiguous().mT):
                got = operations().rotate(queries, k, *tables, interleaved)
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b)
        nothing = q[:, :0]  # of a rank without heads in a layer
        assert operations().rotate(nothing, nothing, *tables, interleaved)[0].shape == nothing.shape
