"""Retrieval heads that read the blocks which their queries choose: `razor_dist.kernels.chosen`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PhiConfig

from razor_dist.attention import chosen as by_blocks
from razor_dist.cache import pages
from razor_dist.cache.pages import PagePool
from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.checks import check_settings
from razor_dist.engine.tape import Tape
from razor_dist.evals.selection import SELECTORS, attend_selected
from razor_dist.kernels import chosen
from razor_dist.models.slower_half import slower_half
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zigzag import chunks
from razor_dist.plan.allocations import Allocations
from razor_dist.protocol.step_plan import BatchEntry, Close, Compute, Fork
from tests.cases import (
    Case,
    all_full,
    answer,
    logits_of,
    make_runner,
    model_and_shape,
    one_chunk,
    prefill,
)
from tests.logits import (
    POLICY,
    assert_any_cut,
    assert_same,
    register,
    split_of,
    stock_logits,
    tokens_of,
)
from tests.ranks import Ranks
from tests.tiny_models import Tiny, write_random

SLOW = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])  # of 16 dimensions of a Llama
N, K = 1400, 6


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, scaling: float, given: dict[str, Any]) -> Tensor:
    slow = given.get("slow", SLOW)
    return attend_selected(q * scaling, k, v, given["share"], SELECTORS["slower"], slow)[0]


register("by_blocks", _by_blocks)


@pytest.mark.long
def test_logits_are_those_of_stock_transformers_with_the_definition(
    ranks: Ranks, tiny: Tiny
) -> None:
    """For any number of ranks and any cut; the last tokens are answers, or of the prompt."""
    path, tokens, share = tiny("llama"), tokens_of(N + K), 1 / 300
    want, full, none = (
        stock_logits(path, tokens, "by_blocks", share=of)[N - 1 :] for of in (share, 1e-30, 0.99)
    )
    assert min((want - other).abs().max() for other in (full, none)) > 1e-3
    case = Case(str(path), all_full(path), POLICY, tokens[:N], tokens[N:], share=share)
    worlds = (1, 2, 4, 8)
    assert_any_cut(ranks, case, want, worlds, (8192, 300))
    assert_any_cut(ranks, dataclasses.replace(case, tensor=True), want, worlds, (1000,))
    assert_any_cut(ranks, dataclasses.replace(case, prompt=tokens, forced=()), want[-1:], worlds)


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_beside_streaming_heads_and_in_8_bits(
    kv_dtype: torch.dtype, ranks: Ranks, tiny: Tiny
) -> None:
    path, tokens = tiny("glm"), tokens_of(N + K, seed=3)
    case = Case(
        str(path), split_of(path), POLICY, tokens[:N], tokens[N:], share=1 / 300, kv_dtype=kv_dtype
    )
    want = ranks(1).run(logits_of, case)[0]
    full = ranks(1).run(logits_of, dataclasses.replace(case, share=0.0))[0]
    assert (want - full).abs().max() > 1e-3
    for world, cut in ((1, 300), (2, 8192), (4, 300)):
        of = dataclasses.replace(case, chunked_prefill_size=cut, tensor=world == 2)
        got = ranks(world).run(logits_of, of)[0]
        if kv_dtype == torch.float32:
            assert_same(got, want)
        else:  # a number that is rounded the other way moves a key by a level
            torch.testing.assert_close(got, want, rtol=0, atol=5e-3)


@pytest.mark.long
def test_a_model_that_turns_a_part_of_each_head_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    config = PhiConfig(
        hidden_size=64, intermediate_size=96, vocab_size=192, max_position_embeddings=4096,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        },
    )  # fmt: skip
    path, tokens = str(write_random(config, tmp_path / "phi")), tokens_of(N + K)
    model, shape = model_and_shape(path)
    # Of 12 that are turned, i with i + 6, the two slowest pairs; and the 4 that are not.
    slow = torch.tensor([4, 5, 10, 11, 12, 13, 14, 15])
    assert torch.equal(slower_half(model, shape.head_dim), slow)
    want = stock_logits(path, tokens, "by_blocks", share=1 / 300, slow=slow)[N - 1 :]
    case = Case(path, ((True, True),) * 2, POLICY, tokens[:N], tokens[N:], share=1 / 300)
    assert_any_cut(ranks, case, want, (2,))


def runs_of(
    comm: Communicator, case: Case, texts: tuple[tuple[tuple[int, ...], ...], ...], most: int
) -> tuple[Tensor | None, list[Counter[str]], int]:
    """Rank 0's logits of two steps with a run of each text, all in one step; what was gathered.

    A text is its prompt, a run of which the first two tokens stay, and the run after these. At
    most ``most`` estimates are in memory at once: the last number is the largest that were.
    """
    longest = max(len(prompt) for prompt, *_ in texts) + 20
    case = dataclasses.replace(case, prompt=tuple(range(longest)))
    runner = make_runner(comm, case, len(texts), recorder=Tape(comm))
    assert runner.most_decoded == 64  # though a step of so many is not recorded
    for key, (prompt, *_) in enumerate(texts):
        prefill(runner, key, dataclasses.replace(case, prompt=prompt, forced=(1,) * 20))
    gather, gathered, largest = comm.all_gather, [Counter[str](), Counter[str]()], [0]
    rows, kept = [], ()
    with mock.patch.object(by_blocks, "ESTIMATES", most):
        for step, count in enumerate(gathered):

            def counted(
                tensor: Tensor, purpose: Any, count: Counter[str] = count, step: int = step
            ) -> Tensor:
                count[purpose] += 1
                found = gather(tensor, purpose)
                if tensor.dim() == 1:
                    largest[0] = max(largest[0], found.numel())
                return found

            entries = [BatchEntry(key, text[1 + step], run=True) for key, text in enumerate(texts)]
            plan = msgspec.structs.replace(Compute.of(entries), kept=kept)
            with mock.patch.object(comm, "all_gather", counted):
                logits = runner.execute(plan)
            rows += [] if logits is None else [logits.clone()]
            kept = (2,) * len(texts)
    for key in range(len(texts)):
        runner.execute(Close(key, kept=() if key else kept))
    assert runner.sequences.kv_bytes == 0
    return (torch.cat(rows) if rows else None), gathered, largest[0]


@pytest.mark.long
def test_runs_of_several_sequences_in_one_step(ranks: Ranks, tiny: Tiny) -> None:
    """Some of which are long enough to choose, in three all-gathers a layer."""
    path = tiny("llama")
    case = Case(str(path), all_full(path), POLICY, (), share=1 / 300)
    texts, want = [], ([], [])
    for seed, n in enumerate((765, 1000, 60)):
        tokens, wrong = tokens_of(n + 8, seed), (5, 7)
        texts.append((tokens[:n], (*tokens[n : n + 2], *wrong), tokens[n + 2 : n + 6]))
        for rows, before in zip(want, ((), tokens[n : n + 2]), strict=True):
            run = texts[-1][2 if before else 1]
            alone = dataclasses.replace(case, prompt=(*tokens[:n], *before), forced=run)
            rows.append(ranks(1).run(logits_of, alone)[0][1:])
    expected = torch.cat([*want[0], *want[1]])
    layers, row = len(case.retrieval), 8 * 8  # estimates of a token of 1000
    for world, most in ((1, 1 << 24), (2, 1 << 24), (2, 2 * 4 * row)):
        logits, gathered, largest = ranks(world).run(runs_of, case, tuple(texts), most)[0]
        assert_same(logits, expected)
        if world > 1:
            assert largest <= most
            few = most == 1 << 24
            assert all((count["merge"] == 3 * layers) == few for count in gathered)


def cut_logits(comm: Communicator, case: Case, cut: int) -> Tensor | None:
    """Rank 0's logits of a prompt after a fork of another one that has its first tokens."""
    runner, n = make_runner(comm, case, 2), len(case.prompt)
    other = (*case.prompt[:cut], *tokens_of(n - cut, seed=8))
    prefill(runner, 0, dataclasses.replace(case, prompt=other))
    runner.execute(Fork(1, begin=cut, end=n, total=n, source=0))
    logits = None
    for chunk in chunks(cut, n, case.chunked_prefill_size, comm.size):
        tokens = case.prompt[chunk.begin : chunk.end]
        logits = runner.execute(one_chunk(1, tokens, last=chunk.end == n))
    for key in range(2):
        runner.execute(Close(key))
    return logits


@pytest.mark.long
def test_a_prefix_is_cut_within_a_block(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama")
    case = Case(str(path), all_full(path), POLICY, tokens_of(N), share=1 / 300)
    want = ranks(1).run(logits_of, case)[0]
    for world, cut in ((2, 1001), (4, 777)):
        of = dataclasses.replace(case, chunked_prefill_size=300)
        assert_same(ranks(world).run(cut_logits, of, cut)[0], want)


def logits_of_scattered(comm: Communicator, case: Case) -> tuple[Tensor | None, int, int]:
    """`logits_of` with pages in any order; and of the last token, the parts read and those whole.

    Short runs of pages are copied 128 tokens at a time.
    """
    generator, read = torch.Generator().manual_seed(1), Counter[str]()
    at, keys, in_order = PagePool.at, PagePool.keys, PagePool._take

    def take(pool: PagePool, need: int) -> list[int]:
        taken = in_order(pool, need)
        return [taken[i] for i in torch.randperm(need, generator=generator).tolist()]

    def counted(of: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            read[name] += 1
            return of(*args)

        return call

    with mock.patch.multiple(PagePool, _take=take), mock.patch.object(pages, "_COPIED", 128):
        runner = make_runner(comm, case)
        rows = [prefill(runner, 0, case)]
        rows += [runner.execute(answer((0, token))) for token in case.forced[:-1]]
        with mock.patch.multiple(PagePool, at=counted(at, "at"), keys=counted(keys, "keys")):
            rows.append(runner.execute(answer((0, case.forced[-1]))))
        runner.execute(Close(0))
    found = None if comm.rank else torch.cat([row for row in rows if row is not None])
    return found, read["at"], read["keys"] - read["at"]


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_pages_that_are_not_contiguous(kv_dtype: torch.dtype, ranks: Ranks, tiny: Tiny) -> None:
    path, tokens = tiny("llama"), tokens_of(N + K, seed=5)
    case = Case(
        str(path), all_full(path), POLICY, tokens[:N], tokens[N:], share=1 / 300,
        chunked_prefill_size=600, kv_dtype=kv_dtype,
    )  # fmt: skip
    want = ranks(1).run(logits_of, case)[0]
    for world in (1, 2):
        got, whole, keys = ranks(world).run(logits_of_scattered, case)[0]
        # Of 8 bits a number that is rounded the other way moves a key by a level.
        bound = 2e-2 if kv_dtype == torch.int8 else 1e-4
        torch.testing.assert_close(got, want, rtol=0, atol=bound)
        # Keys are read once in each layer, and values of no part from which nothing is chosen.
        parts = -(-(N + K) // (128 * world))
        assert keys == len(case.retrieval) * parts and whole < 2 * keys


def logits_in_rounds(comm: Communicator, case: Case, most: int) -> tuple[Tensor | None, int]:
    """`logits_of`, and the bytes at its peak, with chunks' attention in ``most`` bytes at once."""
    with mock.patch.object(by_blocks, "ROUND_BYTES", most), Allocations() as made:
        return logits_of(comm, case), made.peak


def test_heads_are_taken_a_few_at_a_time(ranks: Ranks, tiny: Tiny) -> None:
    path = tiny("llama2")  # four KV heads
    case = Case(str(path), all_full(path), POLICY, tokens_of(1200), share=1 / 120)
    (want, whole), (got, few) = (
        ranks(2).run(logits_in_rounds, case, most)[0] for most in (1 << 40, 1)
    )
    assert torch.equal(got, want)
    assert few < 0.7 * whole


def shards_made(comm: Communicator, case: Case) -> int:
    """Count how often it is found where keys stand, while an answer is decoded."""
    runner = make_runner(comm, case)
    prefill(runner, 0, case)
    with mock.patch.object(chosen.Shard, "of", wraps=chosen.Shard.of) as made:
        for token in case.forced:
            runner.execute(answer((0, token)))
    runner.execute(Close(0))
    return made.call_count


def test_where_keys_stand_is_found_once_for_an_answer(ranks: Ranks, tiny: Tiny) -> None:
    path, tokens = tiny("llama"), tokens_of(N + K)
    case = Case(str(path), all_full(path), POLICY, tokens[:N], tokens[N:], share=1 / 300)
    assert ranks(2).run(shards_made, case) == [1, 1]


def test_what_is_refused(tiny: Tiny) -> None:
    bloom, learned, model = str(tiny("bloom")), str(tiny("gpt2")), str(tiny("llama"))
    for settings_, message in (
        ({"model": bloom}, "is for models with rotary embeddings, and .*bloom has ALiBi"),
        ({"model": learned}, "is for models with rotary embeddings, and .*gpt2 has none"),
        ({"model": model, "kv_dtype": "int4"}, "kv_dtype: int4 mixes"),
        ({"model": model, "attention": "streaming"}, "attention: streaming there are none"),
    ):
        config = EngineConfig(**{"attention": "full", "retrieval_share": 0.1, **settings_})
        with pytest.raises(ConfigError, match=f"retrieval_share .*{message}"):
            check_settings(config, Path(config.model), torch.device("cpu"))
    config = EngineConfig(model=model, attention="full", retrieval_share="1/32")
    assert config.retrieval_share == 1 / 32
    for device in ("cpu", "cuda"):
        check_settings(config, Path(model), torch.device(device))
    # Dual chunk attention begins after 3,968 tokens.
    chunked = {"model": str(tiny("qwen2_1m")), "attention": "full", "retrieval_share": 0.1}
    check_settings(
        EngineConfig(**chunked, max_model_len=3968), tiny("qwen2_1m"), torch.device("cpu")
    )
    with pytest.raises(ConfigError, match="retrieval_share does not know the dual chunk attention"):
        check_settings(
            EngineConfig(**chunked, max_model_len=3969), tiny("qwen2_1m"), torch.device("cpu")
        )
    for wrong in (1, -0.1, "1/0", "much", None):
        with pytest.raises(ConfigError, match="retrieval_share must be a number between 0 and 1"):
            EngineConfig(retrieval_share=wrong)
