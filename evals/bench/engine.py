"""Speed and memory side by side: transformers' own ``generate``, our engine, and its ranks.

Every engine gets the same prompt of random token ids (fixed seed) and generates greedily, past
end-of-sequence tokens, so that lengths are fixed. A run is a list of the moments at which its
tokens came: prefill ends with the first, decode is what lies between the first and the last. Each
engine is warmed up with a whole run; then they take turns, and medians are compared, also with the
least that they can be (`razor_dist.evals.bench.floor`).
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from razor_dist.config.schema import EngineConfig
from razor_dist.evals.baselines.model import load_stock
from razor_dist.evals.bench.floor import Floor, floor, measure_rates
from razor_dist.evals.bench.measure import (
    BenchRecord,
    Generate,
    Rates,
    Table,
    TimedRun,
    Timing,
    random_tokens,
    synchronize,
    take_turns,
)
from razor_dist.evals.bench.peers import open_peers
from razor_dist.evals.bench.settings import Decode, EngineBenchSettings
from razor_dist.evals.one_rank import RankEngine, messages, one_rank_engine, torch_device
from razor_dist.llm.llm import LLM
from razor_dist.models.shape import ModelShape
from razor_dist.plan.deployment import Deployment
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams

log = logging.getLogger(__name__)

STOCK = "transformers generate (sdpa)"
# Razor with settings of few bits.
FEW_BITS: Mapping[str, dict[str, str]] = {
    "int8 keys": {"kv_dtype": "int8"},
    "int4 keys": {"kv_dtype": "int4"},
    "int8 weights": {"weight_dtype": "int8"},
    "int8 both": {"kv_dtype": "int8", "weight_dtype": "int8"},
}
OWN = {attention: f"razor_dist, attention {attention}" for attention in ("razor", "full")}
OWN |= {label: f"razor_dist, razor, {label}" for label in FEW_BITS}

_MODES: tuple[Decode, ...] = ("replicated", "tensor")

# Purposes of the bytes that are sent in each phase; the other counters stay at zero.
_PREFILL = ("ring", "halo", "sinks", "compensation", "control")
_DECODE = ("merge", "tensor", "control")


def run(settings: EngineBenchSettings) -> BenchRecord:
    single, prompt, rates, missing = one_process(settings)
    floors = floors_of(settings, rates)
    parallel = ranks(settings, prompt)
    same = single[OWN["full"]].runs[0].tokens == single[STOCK].runs[0].tokens
    timings = [*single.values(), *parallel.values()]
    compared = [*ratios(single, parallel, settings.ranks), of_floor(single, floors)]
    figures = {
        "prompt": "random token ids",
        "full_attention_generates_the_tokens_of_transformers": same,
        "one_process": [timing.as_json() for timing in single.values()],
        "ranks": [timing.as_json() for timing in parallel.values()],
        "ratios": [ratio._asdict() for ratio in compared],
        "rates": rates._asdict(),
        "floors": {t.name: floors[t.name].as_json(t) for t in timings if t.name in floors},
    }
    times = [["", "prefill, s", "/ floor", "decode, ms/token", "/ floor"]]
    for timing in timings:
        prefill, decode = f"{timing.prefill:.2f}", f"{1000 * timing.decode:.1f}"
        least = floors.get(timing.name)
        over = [""] * 2 if least is None else [f"{ratio:.2f}" for ratio in least.under(timing)]
        times.append([timing.name, prefill, over[0], decode, over[1]])
    bars, verdict = [["", "ratio", "bar", ""]], {None: "", True: "met", False: "missed"}
    for r in compared:
        bar = "" if r.bar is None else f"≤ {r.bar:g}"
        bars.append([r.name, f"{r.value:.2f}", bar, verdict[r.met]])
    tables = [Table("", times), Table("Ratios of medians:", bars)]
    if parallel:
        tables.insert(1, _bytes(list(parallel.values()), settings.prompt_tokens))
    tokens = "the same tokens as" if same else "other tokens than"
    notes = [f"Full attention generates {tokens} transformers.", _about(rates), *missing]
    return BenchRecord("engine", settings, figures, tables, notes)


def own_configs(settings: EngineBenchSettings) -> dict[str, EngineConfig]:
    """Return the settings of our engines in one process, by label of `OWN`."""
    found = {attention: settings.config(attention) for attention in ("razor", "full")}
    if settings.int8:
        found |= {label: settings.config("razor", dtypes=own) for label, own in FEW_BITS.items()}
    return found


def floors_of(settings: EngineBenchSettings, rates: Rates) -> dict[str, Floor]:
    """Return the floors of all engines that are one rank of this model, by name."""
    tokens, found = (settings.prompt_tokens, settings.new_tokens), {}
    for label, config in own_configs(settings).items():
        kind = torch_device(config, 0).type
        d = Deployment.of(config, "cuda" if kind == "cuda" else "cpu")
        found[OWN[label]] = found[rank_name(label, 1)] = floor(d, rates, *tokens)
    return found | {STOCK: found[OWN["full"]]}


def _about(rates: Rates) -> str:
    eight = rates.int8_products
    products = "" if not eight else f" ({eight / 1e9:,.0f} of 8 bits)"
    return (
        f"A floor is the least by rates measured in the same run: {rates.products / 1e9:,.0f} "
        f"GFLOP/s in a matrix product{products}, {rates.attention / 1e9:,.0f} in attention, "
        f"{rates.bandwidth / 1e9:,.1f} GB/s read."
    )


def stock_engine(settings: EngineBenchSettings) -> Generate:
    """Load transformers' own model, and return its ``generate`` with sdpa attention."""
    config = settings.config("full")
    device = torch_device(config, 0)
    model: Any = load_stock(config, device)
    # Lengths are fixed: nothing ends a text.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompt: list[int], new_tokens: int) -> TimedRun:
        ids, stamps = torch.tensor([prompt], device=device), []

        def note(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            """Be asked after each token whether the text ends: never."""
            synchronize(device)
            stamps.append(time.perf_counter())
            return torch.zeros(1, dtype=torch.bool, device=device)

        length = {"max_new_tokens": new_tokens, "do_sample": False}
        mask, begin = torch.ones_like(ids), time.perf_counter()
        [text] = model.generate(ids, attention_mask=mask, stopping_criteria=[note], **length)
        assert len(stamps) == new_tokens
        return TimedRun.from_stamps(begin, stamps, text[len(prompt) :].tolist())

    return generate


class OwnEngine:
    """Our engine in this process, one rank; ``steady`` as `TimedRun.from_stamps` has it."""

    def __init__(self, engine: RankEngine, *, steady: bool = False) -> None:
        self.vocab_size: int = engine.info.vocab_size
        self.runner = engine.runner
        self._core, self._steady = engine.core, steady

    @property
    def in_graphs(self) -> bool:
        return self.runner.graphs is not None and self.runner.graphs.enabled

    def __call__(self, prompt: list[int], new_tokens: int) -> TimedRun:
        return self.timed(self.stream(prompt, new_tokens))

    def timed(self, stream: Iterable[int]) -> TimedRun:
        """Time tokens of a stream that has not begun."""
        synchronize(self.runner.device)
        begin = time.perf_counter()
        tokens, stamps = zip(*((token, time.perf_counter()) for token in stream), strict=True)
        return TimedRun.from_stamps(begin, stamps, tokens, steady=self._steady)

    def stream(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Yield each token once the device has computed it: one step of the engine for each."""
        self._core.add("bench", prompt, greedy(new_tokens))
        for message in messages(self._core):
            if isinstance(message, Token):
                synchronize(self.runner.device)
                yield message.token


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def one_process(
    settings: EngineBenchSettings,
) -> tuple[dict[str, Timing], list[int], Rates, list[str]]:
    """Time transformers, our engine and peers; return also the prompt, rates, and who is missing.

    Rates are measured before and after; the faster wins.
    """
    torch.set_num_threads(settings.threads)
    engines: dict[str, Generate] = {STOCK: stock_engine(settings)}
    owns: dict[str, OwnEngine] = {}
    for label, config in own_configs(settings).items():
        built = one_rank_engine(config)
        owns[OWN[label]] = own = OwnEngine(built)
    peers, missing = open_peers(settings)
    model = built.runner.model
    about = ModelShape.from_config(model.config), model.device, model.dtype
    prompt = random_tokens(own.vocab_size, settings.prompt_tokens, settings.seed)
    rates = measure_rates(*about, int8=settings.int8)
    engines |= owns | peers
    timings = take_turns(engines, prompt, settings.new_tokens, settings.repeats)
    rates = rates.or_better(measure_rates(*about, int8=settings.int8))
    for name, own in owns.items():
        timings[name].stats["kv_bytes"] = own.runner.sequences.peak_kv_bytes
    del engines, owns, peers, built, own, model
    gc.collect()  # the ranks that are timed next want the memory
    return timings, prompt, rates, missing


def ranks(settings: EngineBenchSettings, prompt: list[int]) -> dict[str, Timing]:
    """Time our engine on ranks of this host, razor, then full attention, at every world size.

    Razor's take turns, so that a busy machine slows them alike, with several ranks in both modes of
    decoding; full attention's run once, for bytes, which `Timing.stats` has.
    """
    with ExitStack() as stack:
        llms = {
            rank_name("razor", size, decode): _llm(stack, settings, "razor", size, decode)
            for size in settings.ranks
            for decode in (_MODES if size > 1 else _MODES[:1])
        }
        engines = {name: timed_generate(llm) for name, llm in llms.items()}
        timings = take_turns(engines, prompt, settings.new_tokens, settings.repeats)
        for name, llm in llms.items():
            timings[name].stats = _measure(llm, prompt)
    for size in settings.ranks:
        name = rank_name("full", size)
        with ExitStack() as stack:
            llm = _llm(stack, settings, "full", size)
            run = timed_generate(llm)(prompt, settings.new_tokens)
            log.info("%s, once: %s", name, run)
            timings[name] = Timing(name, [run], _measure(llm, prompt))
    return timings


def rank_name(attention: str, world_size: int, decode: Decode = "replicated") -> str:
    name = f"{attention}, P={world_size}"
    return name if decode == "replicated" else f"{name}, {decode}"


def _llm(stack: ExitStack, settings: EngineBenchSettings, *about: Any) -> LLM:
    return stack.enter_context(LLM(**settings.config(*about).model_dump(exclude_unset=True)))


def timed_generate(llm: LLM) -> Generate:
    """Return an engine of the ranks of ``llm``, timed by its own metrics."""

    def generate(prompt: list[int], new_tokens: int) -> TimedRun:
        [output] = llm.generate(prompt, greedy(new_tokens))
        first, total = output.metrics.time_to_first_token, output.metrics.total_seconds
        assert first is not None and total is not None
        return TimedRun.from_stamps(0.0, [first, total], output.outputs[0].token_ids)

    return generate


def _measure(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Count bytes: KV held at most on each rank, sent for a prompt, sent for one more token."""
    few, more, counters = 1, 9, [llm.stats()]
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
        "rss_per_rank": counters[-1]["peak_rss_per_rank"],
        "prefill_bytes": prefill,
        "decode_bytes": {p: (both[p] - prefill[p]) / (more - few) for p in both},
    }


class Ratio(NamedTuple):
    """A comparison of two medians, and the bar it is held to (None: reported only)."""

    name: str
    value: float
    bar: float | None
    met: bool | None


def ratios(
    single: Mapping[str, Timing], parallel: Mapping[str, Timing], world_sizes: Sequence[int]
) -> list[Ratio]:
    """Return the comparisons that matter, with their bars: prefill's and decode's."""
    bars: dict[Any, tuple[float | None, float | None]] = {
        "razor": (0.75, 0.45),
        "full": (1.0, None),
        "int8 weights": (None, 0.35),
        ("int8 both", "openvino-genai"): (0.9, 1.0),
        (1, 8): (1.5, None),
        (1, 8, "tensor"): (1.5, 2.0),
    }
    pairs: list[tuple[str, Timing, Timing, Any]] = [
        (f"{label} / transformers", single[name], single[STOCK], label)
        for label, name in OWN.items()
        if name in single
    ]
    for peer in [name for name in single if name not in (STOCK, *OWN.values())]:
        pairs += [
            (f"{label} / {peer}", single[OWN[label]], single[peer], (label, peer.split()[0]))
            for label in ("razor", "int8 both")
            if OWN[label] in single
        ]
    for size in world_sizes[1:]:
        first = world_sizes[0]
        one = parallel[rank_name("razor", first)]
        many = parallel[rank_name("razor", size)]
        pairs.append((f"razor, P={size} / P={first}", many, one, (first, size)))
        if shared := parallel.get(rank_name("razor", size, "tensor")):  # one rank has no such mode
            name = f"razor, P={size}, tensor / P={first}"
            pairs.append((name, shared, one, (first, size, "tensor")))
    return [
        Ratio(f"{phase}, {name}", value, bar, None if bar is None else value <= bar)
        for name, a, b, key in pairs
        for phase, bar in zip(("prefill", "decode"), bars.get(key, (None, None)), strict=True)
        for value in [getattr(a, phase) / getattr(b, phase)]
    ]


def of_floor(single: Mapping[str, Timing], floors: Mapping[str, Floor]) -> Ratio:
    """Compare razor's prefill with the least that it can take."""
    value, _ = floors[OWN["razor"]].under(single[OWN["razor"]])
    return Ratio("prefill, razor / its floor", value, 1.1, value <= 1.1)


def _bytes(timings: Sequence[Timing], tokens: int) -> Table:
    rows = [["", *(t.name for t in timings)]]
    for what, key in (("KV", "kv_bytes_per_rank"), ("resident memory", "rss_per_rank")):
        most = [f"{max(t.stats[key]) / 1e6:,.1f}" for t in timings]
        rows.append([f"{what} of the fullest rank at most, MB", *most])
    for phase, purposes, per in (("prefill", _PREFILL, tokens), ("decode", _DECODE, 1)):
        for purpose in purposes:
            sent = [f"{t.stats[f'{phase}_bytes'][purpose] / per:,.0f}" for t in timings]
            rows.append([f"{phase}: {purpose}, B/token", *sent])
    return Table("Bytes, measured; sent by all ranks together:", rows)
