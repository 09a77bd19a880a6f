"""On a GPU that is pretended (`tests.pretended_gpu`), engines answer as on the CPU.

What a GPU alone can show is in the tests marked ``gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from razor_dist.protocol.sampling_params import SamplingParams
from tests import pretended_gpu
from tests.histories import Action, Ask, History, Restart, Steps, play
from tests.prefix.engines import ids
from tests.ranks import RankPool, Ranks
from tests.test_kernels_linear import needs_compiler
from tests.tiny_models import Tiny
from tests.triton_processes import SPAWN

pytestmark = [needs_compiler, pytest.mark.long]


@pytest.fixture(scope="module")
def gpu() -> Iterator[ProcessPoolExecutor]:
    """A process that sees the GPU."""
    with ProcessPoolExecutor(1, SPAWN, pretended_gpu.install) as pool:
        yield pool


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Ranks]:
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size, gpu=True))
    for pool in pools.values():
        pool.close()


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


def launch_on_host() -> None:
    from razor_dist.kernels.store_triton import store_kernel

    store_kernel[(1,)](torch.ones(1))


def capture_of(step: Callable[[Tensor], object]) -> None:
    x = ones(3)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(x)


# By its name: code, and the error that CUDA, or torch for it, raises.
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "two devices": (lambda: ones(2) + torch.ones(2), "same device"),
    "written on the host": (lambda: torch.ones(2).add_(ones(2)), "same device"),
    "indices on the GPU": (lambda: torch.ones(2)[ones(1).long()], "same device as self"),
    "an array": (lambda: ones(2).numpy(), "can't convert"),
    "a kernel on the host": (launch_on_host, "cannot be accessed"),
    "flash attention in float32": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(
            *[ones(1, 1, 8, 8)] * 3, scale=1.0
        ),
        "no kernel for torch.float32",
    ),
    "a number read in a capture": (lambda: capture_of(lambda x: x.sum().item()), "capturing"),
    "a mask in a capture": (lambda: capture_of(lambda x: x[x > 0]), "capturing"),
    "numbers from the host in a capture": (
        lambda: capture_of(lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cuda")),
        "capturing",
    ),
}


def make_mistake(name: str) -> None:
    MISTAKES[name][0]()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_as_with_cuda(name: str, gpu: ProcessPoolExecutor) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError)) as found:
        gpu.submit(make_mistake, name).result()
    assert MISTAKES[name][1] in str(found.value)


def record_and_replay() -> tuple[list[float], list[float], list[float], str]:
    graph, x = torch.cuda.CUDAGraph(), ones(2)
    with torch.cuda.graph(graph):
        y = x.view(1, 2) * 2
        y += 1
        x.add_(1)
        first = y[0]
    before = [*x.tolist(), *first.tolist()]
    graph.replay()
    once = [*x.tolist(), *first.tolist()]
    x.fill_(10)
    graph.replay()
    twice = [*x.tolist(), *first.tolist()]
    del x, y
    try:
        graph.replay()
    except RuntimeError as error:
        return before, once, twice, str(error)
    return before, once, twice, ""


def test_a_graph_computes_when_it_is_replayed_from_memory_that_others_keep(
    gpu: ProcessPoolExecutor,
) -> None:
    before, once, twice, error = gpu.submit(record_and_replay).result()
    assert before[:2] == [1, 1] and abs(before[2]) > 1e30
    assert once == [2, 2, 3, 3] and twice == [11, 11, 21, 21]
    assert "illegal memory access" in error


ENGINE: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 32,
    "kv_tokens": 400,
    "prefix_tail_tokens": 24,
    "max_num_seqs": 4,
    "max_step_ms": 1e6,
}
COMMON: dict[str, Any] = {
    "max_model_len": 400,
    "window_min": 12,
    "window_ratio": 5,
    "block": 4,
    "sink_tokens": 4,
    "kv_dtype": "auto",
    "prefill": "local",
    "compensation": True,
    "retrieval_share": 0.0,
}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=4, temperature=0.8, seed=1, n=2, logprobs=2, prompt_logprobs=1, return_sources=2,
    top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, logit_bias={7: 3.0}, ignore_eos=True,
)  # fmt: skip
ACTIONS = (
    (0, Ask(ids((0, 50)), GREEDY)),
    (0, Ask((*ids((0, 50)), *ids((2, 5)) * 3), DRAWN)),
    (0, Steps(100)),
    (0, Ask(ids((0, 40), (3, 30)), GREEDY)),
    (0, Restart()),
    (0, Ask(ids((0, 50), (4, 9)), GREEDY)),
)
LOOKUP = {"method": "lookup", "prompt_lookup_min": 1}
TIERS = {"prefix_host_gb": 2e-4, "prefix_store_gb": 1.0, "kv_tokens": 250}
# Longer than what is read in any case.
CHOOSING = ((0, Ask(ids((0, 900)), GREEDY)), (0, Ask(ids((0, 850), (1, 40)), DRAWN)))
LONG = {"max_model_len": 1000, "kv_tokens": 2000, "chunked_prefill_size": 500}


@pytest.mark.parametrize(
    ("world", "family", "settings", "actions"),
    [
        (1, "llama", {"speculative_config": LOOKUP, **TIERS}, ACTIONS),
        (1, "llama", {"kv_dtype": "int4", "compensation": False}, ACTIONS),
        (1, "bloom", {"speculative_config": LOOKUP}, ACTIONS),
        (2, "llama", {"kv_dtype": "int8", "decode": "tensor"}, ACTIONS),
        pytest.param(
            1, "llama", {"retrieval_share": 1e-30, **LONG}, CHOOSING, marks=pytest.mark.slow
        ),
        pytest.param(1, "qwen2", {"prefill": "exact"}, ACTIONS, marks=pytest.mark.slow),
        pytest.param(2, "llama", TIERS, ACTIONS, marks=pytest.mark.slow),
    ],
)
def test_engines_on_a_gpu_answer_as_on_the_cpu(
    world: int,
    family: str,
    settings: dict[str, Any],
    actions: tuple[tuple[int, Action], ...],
    gpu_ranks: Ranks,
    tiny: Tiny,
    tmp_path: Path,
) -> None:
    common = {name: settings.get(name, value) for name, value in COMMON.items()}
    engine = {**ENGINE, **{name: x for name, x in settings.items() if name not in COMMON}}
    if common["prefill"] == "exact":
        engine["prefix_cache"] = False
    history = History(world, family, None, False, common, (engine,), actions, device="cuda")
    [problem, found], *_ = gpu_ranks(world).run(
        play, str(tiny(family)), history, str(tmp_path), timeout=3000
    )
    assert problem is None, problem
    assert found["answers"] == sum(act.params.n for _, act in actions if isinstance(act, Ask))
