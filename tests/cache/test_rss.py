"""Dropped tokens of streaming heads are freed, by the process's own memory (RSS)."""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import build_engine
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams

T = TypeVar("T")

# Keys and values of 8 layers with 32 heads of 64 coordinates, in float32: 128 KiB a token, beside
# which a model of hidden size 32 and chunks of 256 tokens are nothing.
LAYERS, HEADS, HEAD_DIM = 8, 32, 64
TOKEN_BYTES = LAYERS * HEADS * HEAD_DIM * 2 * 4
# The short prompt has two chunks: what is kept between chunks is there from the beginning.
SHORT, STEP, CHUNK = 512, 1024, 256
LONG = SHORT + 3 * STEP


class Growth(NamedTuple):
    """Bytes by which a process grew, and what its engine said that it held.

    What is loaded or built only once, or given back late (12 MB on a busy machine), is in one
    difference or with opposite signs in two; what a prompt adds is in each.
    """

    longer: int  # from a prompt to one that is longer by STEP tokens: the median of three
    again: int  # from the longest prompt to another of its length, after its end: the lesser of two
    kv_bytes: int  # of the longest prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose caches outweigh it by far."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        vocab_size=64,
        max_position_embeddings=65536,
    )
    path = tmp_path_factory.mktemp("rss") / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def measure(model: str, attention: str) -> Growth:
    """Prefill ever longer prompts one after the other; run it in a fresh process."""
    # Threads that wait for each other on a busy machine took ten times as long.
    torch.set_num_threads(1)
    config = EngineConfig(
        model=model,
        attention=attention,
        max_model_len=LONG + 8,
        max_num_seqs=1,
        chunked_prefill_size=CHUNK,
        window_min=64,
        window_ratio=None,
        block=64,
        prefix_cache=False,
    )
    core = build_engine(config, Communicator(None), torch.device("cpu")).core
    process = psutil.Process()

    def held(tokens: int) -> tuple[int, int]:
        """Bytes of the process and of the caches while a request holds them; then it ends."""
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        core.add("a", [i % 64 for i in range(tokens)], params)
        while not any(isinstance(message, Token) for message in core.step()):
            pass
        # What the allocator keeps of freed activations comes and goes by tens of MB.
        ctypes.CDLL(None).malloc_trim(0)
        found = process.memory_full_info().uss, core.runner.sequences.kv_bytes
        core.abort("a")
        assert core.runner.sequences.kv_bytes == 0
        return found

    held(SHORT)  # buffers and lazily loaded code come with the first prompt
    used = [held(tokens)[0] for tokens in range(SHORT, LONG, STEP)]
    last, kv_bytes = held(LONG)
    longest = [last, held(LONG)[0], held(LONG)[0]]
    longer = median(after - before for before, after in pairwise([*used, last]))
    again = min(after - before for before, after in pairwise(longest))
    return Growth(longer, again, kv_bytes)


def measure_many(model: str) -> tuple[int, int, int]:
    """Return bytes: reserved by caches, held there by 64 sequences, and the process's growth."""
    torch.set_num_threads(1)
    process = psutil.Process()
    config = EngineConfig(model=model, attention="streaming", block=64, chunked_prefill_size=CHUNK)
    before = process.memory_full_info().uss
    core = build_engine(config, Communicator(None), torch.device("cpu")).core
    for index in range(64):
        core.add(str(index), [index] * 20, SamplingParams(max_tokens=4, ignore_eos=True))
    core.step()
    assert core.scheduler.sequences == 64
    held = core.runner.sequences.kv_bytes
    while core.has_work:
        core.step()
    return core.runner.caches.reserved_bytes, held, process.memory_full_info().uss - before


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    # Spawned: a fork would share this process's pages until it writes to them.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


@pytest.mark.long
def test_what_is_reserved_is_not_resident(model: Path) -> None:
    reserved, held, grown = in_fresh_process(measure_many, str(model))
    # One sequence's, with a window of a fifth of 65,536 tokens, is 1.7 GB.
    assert reserved > 13000 * TOKEN_BYTES
    assert held == 64 * 30 * TOKEN_BYTES  # of each 24, and five places more; the sums
    assert grown < held + 0.1 * reserved


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")
def test_what_local_heads_drop_is_freed(model: Path) -> None:
    full = in_fresh_process(measure, str(model), "full")
    computed = STEP * TOKEN_BYTES
    assert full.kv_bytes == pytest.approx(LONG * TOKEN_BYTES, rel=0.05)
    assert full.longer == pytest.approx(computed, rel=0.05)
    assert full.again < 0.05 * computed
    streaming = in_fresh_process(measure, str(model), "streaming")
    assert streaming.kv_bytes < 0.1 * LONG * TOKEN_BYTES
    assert streaming.longer < 0.05 * full.longer
    assert streaming.again < 0.05 * computed
