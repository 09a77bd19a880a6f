"""Speed and memory side by side: transformers' own ``generate``, our engine, and its ranks.

Every engine gets the same prompt of random token ids (fixed seed) and generates greedily, past
end-of-sequence tokens, so that lengths are fixed. A run is a list of the moments at which its
tokens came: prefill ends with the first, decode is what lies between the first and the last. Each
engine is warmed up with a whole run; then they take turns, and medians are compared.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from razor_dist.engine.build import RankEngine, build_engine
from razor_dist.engine.device import torch_device
from razor_dist.engine.messages import exception_of
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.evals.bench.measure import synchronize
from razor_dist.evals.bench.record import BenchRecord, Table
from razor_dist.evals.bench.settings import EngineBenchSettings
from razor_dist.evals.bench.timing import Generate, TimedRun, Timing, random_tokens, take_turns
from razor_dist.evals.stock import load_stock
from razor_dist.llm.llm import LLM
from razor_dist.parallel.comm import Communicator

log = logging.getLogger(__name__)

STOCK = "transformers generate (sdpa)"
OWN = {attention: f"razor_dist, attention {attention}" for attention in ("razor", "full")}

# Purposes of the bytes that are sent in each phase; the other counters stay at zero.
_PREFILL = ("ring", "halo", "sinks", "compensation", "control")
_DECODE = ("merge", "control")


def run(settings: EngineBenchSettings) -> BenchRecord:
    """Measure transformers, our engine and its ranks."""
    single, vocab_size = one_process(settings)
    parallel = ranks(settings, vocab_size)
    same = single[OWN["full"]].runs[0].tokens == single[STOCK].runs[0].tokens
    compared = ratios(single, parallel, settings.ranks)
    figures = {
        "prompt": "random token ids",
        "full_attention_generates_the_tokens_of_transformers": same,
        "one_process": [timing.as_json() for timing in single.values()],
        "ranks": [timing.as_json() for timing in parallel.values()],
        "ratios": [{**vars(ratio), "met": ratio.met} for ratio in compared],
    }
    tables = [
        _times([*single.values(), *parallel.values()]),
        _bytes(list(parallel.values()), settings.prompt_tokens),
        _comparison(compared),
    ]
    tokens = "the same tokens as" if same else "other tokens than"
    note = f"Full attention generates {tokens} transformers."
    return BenchRecord("engine", settings, figures, tables, [note])


# ------------------------------------------------------------------- one process


class StockModel:
    """transformers' own model and ``generate``, with sdpa attention."""

    def __init__(self, settings: EngineBenchSettings) -> None:
        config = settings.config("full")
        self._device = torch_device(config, 0)
        self._model: Any = load_stock(config, self._device)
        # Lengths are fixed: nothing ends a text.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def __call__(self, prompt: list[int], new_tokens: int) -> TimedRun:
        """Return one run."""
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
        return TimedRun.from_stamps(begin, clock.stamps, clock.tokens)


class _Clock:
    """A streamer for ``generate`` that notes when each token comes."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.tokens: list[int] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then every token."""
        if self._prompt_seen:
            self.tokens += value.flatten().tolist()
            self.stamps.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing at the end."""


class OwnEngine:
    """Our engine in this process, one rank."""

    def __init__(self, engine: RankEngine) -> None:
        self.vocab_size: int = engine.info["vocab_size"]
        self.core = engine.core

    @property
    def in_graphs(self) -> bool:
        """Whether decode steps are replayed from CUDA graphs."""
        graphs = self.core.runner.graphs
        return graphs is not None and graphs.enabled

    @property
    def peak_kv_bytes(self) -> int:
        """Most bytes of keys and values held at once."""
        return self.core.runner.peak_kv_bytes

    def __call__(self, prompt: list[int], new_tokens: int) -> TimedRun:
        """Return one run."""
        return TimedRun.from_stamps(*self.trace(prompt, new_tokens))

    def trace(self, prompt: list[int], new_tokens: int) -> tuple[float, list[float], list[int]]:
        """Return when one run began, when its tokens came, and the tokens.

        Raises
        ------
        EngineError
            If the model computes no numbers.
        """
        stamps: list[float] = []
        tokens: list[int] = []
        device = self.core.runner.device
        synchronize(device)
        begin = time.perf_counter()
        self.core.add("bench", prompt, greedy(new_tokens))
        while self.core.has_work:
            for message in self.core.step():
                if message["t"] == "error":
                    raise exception_of(message)
                if message["t"] == "token":
                    synchronize(device)
                    stamps.append(time.perf_counter())
                    tokens.append(message["token"])
        return begin, stamps, tokens


def greedy(new_tokens: int) -> SamplingParams:
    """Return parameters that generate exactly so many tokens."""
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def one_process(settings: EngineBenchSettings) -> tuple[dict[str, Timing], int]:
    """Time transformers against our engine, razor and full, in this process.

    Returns
    -------
    timings : dict of name to Timing
        Under `STOCK` and the values of `OWN`.
    vocab_size : int
    """
    torch.set_num_threads(settings.threads)
    engines: dict[str, Generate] = {STOCK: StockModel(settings)}
    for attention, name in OWN.items():
        config = settings.config(attention)
        own = OwnEngine(build_engine(config, Communicator(None), torch_device(config, 0)))
        engines[name] = own
    prompt = random_tokens(own.vocab_size, settings.prompt_tokens, settings.seed)
    timings = take_turns(engines, prompt, settings.new_tokens, settings.repeats)
    vocab_size = own.vocab_size
    del engines, own
    gc.collect()  # the ranks that are timed next want the memory
    return timings, vocab_size


# ------------------------------------------------------------------------ ranks


def ranks(settings: EngineBenchSettings, vocab_size: int) -> dict[str, Timing]:
    """Time our engine on ranks of this host, razor, then full attention, at every world size.

    Razor's are timed in turn, so that a busy machine slows them alike; full attention's run once,
    for bytes. What is measured besides time is in each `Timing.stats`.

    Returns
    -------
    dict of name to Timing
        Under `rank_name` of attention and world size.
    """
    prompt = random_tokens(vocab_size, settings.prompt_tokens, settings.seed)
    with ExitStack() as stack:
        llms = {
            rank_name("razor", size): stack.enter_context(_llm(settings, "razor", size))
            for size in settings.ranks
        }
        engines = {name: _generate_with(llm) for name, llm in llms.items()}
        timings = take_turns(engines, prompt, settings.new_tokens, settings.repeats)
        for name, llm in llms.items():
            timings[name].stats = _measure(llm, prompt)
    for size in settings.ranks:
        name = rank_name("full", size)
        with _llm(settings, "full", size) as llm:
            run = _generate_with(llm)(prompt, settings.new_tokens)
            log.info("%s, once: %s", name, run)
            timings[name] = Timing(name, [run], _measure(llm, prompt))
    return timings


def rank_name(attention: str, world_size: int) -> str:
    """Return the name of an engine on ranks."""
    return f"{attention}, P={world_size}"


def _llm(settings: EngineBenchSettings, attention: str, world_size: int) -> LLM:
    config = settings.config(attention, world_size)
    return LLM(**config.model_dump(exclude_unset=True))


def _generate_with(llm: LLM) -> Generate:
    def generate(prompt: list[int], new_tokens: int) -> TimedRun:
        [output] = llm.generate(prompt, greedy(new_tokens))
        first, total = output.metrics.time_to_first_token, output.metrics.total_seconds
        assert first is not None and total is not None
        return TimedRun.from_stamps(0.0, [first, total], output.outputs[0].token_ids)

    return generate


def _measure(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Count bytes: KV held at most on each rank, sent for a prompt, sent for one more token."""
    few, more = 1, 9
    counters = [llm.stats()]
    for new_tokens in (few, more):
        llm.generate(prompt, greedy(new_tokens))
        counters.append(llm.stats())
    prefill, both = (
        {p: sent - before["bytes_sent"][p] for p, sent in after["bytes_sent"].items()}
        for before, after in itertools.pairwise(counters)
    )
    return {
        "world_size": llm.config.world_size,
        "kv_bytes_per_rank": counters[-1]["peak_kv_bytes_per_rank"],
        "prefill_bytes": prefill,
        "decode_bytes": {p: (both[p] - prefill[p]) / (more - few) for p in both},
    }


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Ratio:
    """One comparison of two medians, and the bar it is held to (None: reported only)."""

    name: str
    value: float
    bar: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        return None if self.bar is None else self.value <= self.bar


def ratios(
    single: Mapping[str, Timing], parallel: Mapping[str, Timing], world_sizes: Sequence[int]
) -> list[Ratio]:
    """Return the comparisons that matter, with their bars."""
    stock = single[STOCK]
    found = []
    for attention, name in OWN.items():
        own, held = single[name], attention == "razor"
        against = f"{attention} / transformers"
        found += [
            Ratio(f"prefill, {against}", own.prefill / stock.prefill, 0.75 if held else None),
            Ratio(f"decode, {against}", own.decode / stock.decode, 0.6 if held else None),
        ]
    first, *others = world_sizes
    one = parallel[rank_name("razor", first)]
    for size in others:
        many = parallel[rank_name("razor", size)]
        against = f"razor, P={size} / P={first}"
        bar = 1.5 if (first, size) == (1, 8) else None
        found.append(Ratio(f"prefill, {against}", many.prefill / one.prefill, bar))
        found.append(Ratio(f"decode, {against}", many.decode / one.decode))
    return found


def _times(timings: Sequence[Timing]) -> Table:
    rows = [[t.name, f"{t.prefill:.2f}", f"{1000 * t.decode:.1f}"] for t in timings]
    return Table("", [["", "prefill, s", "decode, ms/token"], *rows])


def _bytes(timings: Sequence[Timing], tokens: int) -> Table:
    held = [f"{max(t.stats['kv_bytes_per_rank']) / 1e6:.1f}" for t in timings]
    rows = [["", *(t.name for t in timings)], ["KV on the fullest rank, MB", *held]]
    for purpose in _PREFILL:
        sent = [f"{t.stats['prefill_bytes'][purpose] / tokens:,.0f}" for t in timings]
        rows.append([f"prefill: {purpose}, B/token", *sent])
    for purpose in _DECODE:
        sent = [f"{t.stats['decode_bytes'][purpose]:,.0f}" for t in timings]
        rows.append([f"decode: {purpose}, B/token", *sent])
    return Table("Bytes, measured; sent by all ranks together:", rows)


def _comparison(ratios: Sequence[Ratio]) -> Table:
    verdict = {None: "", True: "met", False: "missed"}
    rows = [
        [r.name, f"{r.value:.2f}", "" if r.bar is None else f"≤ {r.bar:g}", verdict[r.met]]
        for r in ratios
    ]
    return Table("Ratios of medians:", [["", "ratio", "bar", ""], *rows])
