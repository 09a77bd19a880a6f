"""What `razor_dist.evals.bench` compares: transformers' model, our engine, our engine's ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from razor_dist.engine.build import Engine, build_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.device import torch_device
from razor_dist.engine.messages import exception_of
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.evals.peak import synchronize
from razor_dist.evals.stock import load_stock
from razor_dist.evals.timing import BenchSettings, Generate, Run, Say, Timing, take_turns
from razor_dist.llm.llm import LLM
from razor_dist.parallel.comm import Communicator

STOCK = "transformers generate (sdpa)"
OWN = {attention: f"razor_dist, attention {attention}" for attention in ("razor", "full")}

# ------------------------------------------------------------------- one process


class StockModel:
    """transformers' own model and ``generate``, with sdpa attention.

    Parameters
    ----------
    settings : BenchSettings
    """

    def __init__(self, settings: BenchSettings) -> None:
        config = settings.config("full")
        device = torch_device(config, 0)
        self._model: Any = load_stock(config, device)
        # Lengths are fixed: nothing ends a text.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._device = device

    def __call__(self, prompt: list[int], new_tokens: int) -> Run:
        """One run."""
        ids = torch.tensor([prompt], device=self._device)
        clock = _Clock()
        begin = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
        )
        assert len(clock.stamps) == new_tokens
        return Run.from_stamps(begin, clock.stamps, clock.tokens)


class _Clock:
    """A streamer for ``generate`` that notes when each token comes."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.tokens: list[int] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """The prompt first, then every token."""
        if self._prompt_seen:
            self.tokens += value.flatten().tolist()
            self.stamps.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to do."""


class Trace(NamedTuple):
    """What `Run` is made from: seconds of the clock, and the tokens that came then."""

    begin: float
    stamps: list[float]
    tokens: list[int]


class OwnEngine:
    """Our engine in this process, one rank.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self.vocab_size: int = engine.info["vocab_size"]
        self._core: EngineCore = engine.core

    @property
    def in_graphs(self) -> bool:
        """Whether decode steps are replayed from CUDA graphs."""
        graphs = self._core.runner.graphs
        return graphs is not None and graphs.enabled

    @property
    def peak_kv_bytes(self) -> int:
        """Most bytes of keys and values held at once."""
        return self._core.runner.peak_kv_bytes

    def __call__(self, prompt: list[int], new_tokens: int) -> Run:
        """One run."""
        return Run.from_stamps(*self.trace(prompt, new_tokens))

    def trace(self, prompt: list[int], new_tokens: int) -> Trace:
        """One run: when it began, when its tokens came, and the tokens.

        Raises
        ------
        EngineError
            If the model computes no numbers.
        """
        stamps: list[float] = []
        tokens: list[int] = []
        device = self._core.runner.device
        synchronize(device)
        begin = time.perf_counter()
        self._core.add("bench", prompt, _greedy(new_tokens))
        while self._core.has_work:
            for message in self._core.step():
                if message["t"] == "error":
                    raise exception_of(message)
                if message["t"] == "token":
                    synchronize(device)
                    stamps.append(time.perf_counter())
                    tokens.append(message["token"])
        return Trace(begin, stamps, tokens)


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def one_process(settings: BenchSettings, say: Say) -> tuple[dict[str, Timing], int]:
    """transformers against our engine, razor and full, in this process.

    Returns
    -------
    timings : dict of name to Timing
        Under `STOCK` and the values of `OWN`.
    vocab_size : int
        The model's.
    """
    torch.set_num_threads(settings.threads)
    engines: dict[str, Generate] = {STOCK: StockModel(settings)}
    own = {}
    for attention, name in OWN.items():
        config = settings.config(attention)
        own[name] = OwnEngine(build_engine(config, Communicator(None), torch_device(config, 0)))
    engines.update(own)
    vocab_size = own[OWN["razor"]].vocab_size
    timings = take_turns(
        engines, settings.prompt(vocab_size), settings.new_tokens, settings.repeats, say
    )
    del engines, own
    gc.collect()  # the ranks that are timed next want the memory
    return timings, vocab_size


# ------------------------------------------------------------------------ ranks


def ranks(settings: BenchSettings, vocab_size: int, say: Say) -> dict[str, Timing]:
    """Our engine on ranks of this host: every world size with razor, then with full attention.

    Razor's are timed in turn, so that a busy machine slows them alike; full attention's run once,
    for bytes. What is measured besides time is in each `Timing.stats`.

    Returns
    -------
    dict of name to Timing
        Under `rank_name` of attention and world size.
    """
    prompt = settings.prompt(vocab_size)
    with ExitStack() as stack:
        llms = {
            rank_name("razor", size): stack.enter_context(_llm(settings, "razor", size))
            for size in settings.world_sizes
        }
        engines = {name: _generate_with(llm) for name, llm in llms.items()}
        timings = take_turns(engines, prompt, settings.new_tokens, settings.repeats, say)
        for name, llm in llms.items():
            timings[name].stats = _measure(llm, prompt)
    for size in settings.world_sizes:
        name = rank_name("full", size)
        with _llm(settings, "full", size) as llm:
            run = _generate_with(llm)(prompt, settings.new_tokens)
            say(f"{name}, once: {run}")
            timings[name] = Timing(name, [run], _measure(llm, prompt))
    return timings


def rank_name(attention: str, world_size: int) -> str:
    """What an engine on ranks is called."""
    return f"{attention}, P={world_size}"


def _llm(settings: BenchSettings, attention: str, world_size: int) -> LLM:
    config = settings.config(attention, world_size)
    return LLM(**config.model_dump(exclude_unset=True))


def _generate_with(llm: LLM) -> Generate:
    def generate(prompt: list[int], new_tokens: int) -> Run:
        [output] = llm.generate(prompt, _greedy(new_tokens))
        first, total = output.metrics.time_to_first_token, output.metrics.total_seconds
        assert first is not None and total is not None
        return Run.from_totals(first, total, output.outputs[0].token_ids)

    return generate


def _measure(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Bytes: KV held at most on each rank, and what one prompt and one more token send."""
    few, more = 1, 9
    counters = [llm.stats()]
    for new_tokens in (few, more):
        llm.generate(prompt, _greedy(new_tokens))
        counters.append(llm.stats())
    prefill = _sent(counters[0], counters[1])
    both = _sent(counters[1], counters[2])
    return {
        "world_size": llm.config.world_size,
        "kv_bytes_per_rank": counters[-1]["peak_kv_bytes_per_rank"],
        "prefill_bytes": prefill,
        "decode_bytes": {p: (both[p] - prefill[p]) / (more - few) for p in both},
    }


def _sent(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Bytes sent by purpose between two readings of the counters."""
    return {p: sent - before["bytes_sent"][p] for p, sent in after["bytes_sent"].items()}
