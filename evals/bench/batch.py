"""Tokens per second of several answers at once, beside one answer.

Each turn has prompts of its own. They are read and answered, which is timed as a whole. Then they
are asked again with one token each and with all, now from the prefix cache: the difference is the
seconds of the answers alone. All of that is the same for any engine. Engines take turns.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from razor_dist.evals.bench.engine import greedy
from razor_dist.evals.bench.measure import BenchRecord, Table, random_tokens
from razor_dist.evals.bench.peers import openvino_greedy, openvino_pipeline
from razor_dist.evals.bench.settings import PEERS, BatchBenchSettings
from razor_dist.llm.llm import LLM
from razor_dist.models.smollm2 import gguf_file

log = logging.getLogger(__name__)

# An engine: takes prompts and tokens of each answer; returns the least number of a prompt's tokens
# that were cached, None if the engine does not say.
Answers = Callable[[list[list[int]], int], int | None]


class Taken(NamedTuple):
    """Seconds of some prompts with their answers, and of the answers alone."""

    whole: float
    answers: float


# Eight answers at once should give this many times the tokens per second of one.
_BARS = {8: 5.0}
_INT8 = {"kv_dtype": "int8", "weight_dtype": "int8"}
_VOCAB = 49152  # of the embedded model


@contextmanager
def _razor(settings: BatchBenchSettings, **dtypes: str) -> Iterator[Answers]:
    longest = settings.prompt_tokens + settings.new_tokens
    most = 2 * max(settings.counts)  # a prompt stays in the cache beside the sequence that goes on
    with LLM(
        "smollm2",
        world_size=settings.world_size,
        threads=max(1, settings.threads // settings.world_size),
        max_num_seqs=most,
        max_model_len=longest,
        kv_tokens=most * (longest + 256),  # some pages are not full
        speculative_config=None,
        **dtypes,
    ) as llm:

        def answer(prompts: list[list[int]], new_tokens: int) -> int:
            outputs = llm.generate(prompts, greedy(new_tokens))
            assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
            return min(output.num_cached_tokens for output in outputs)

        yield answer


@contextmanager
def _openvino(settings: BatchBenchSettings) -> Iterator[Answers]:
    import openvino
    import openvino_genai as genai

    most = max(settings.counts)
    scheduling = {"max_num_seqs": most, "enable_prefix_caching": True}
    pipeline = openvino_pipeline(gguf_file(), settings.threads, **scheduling)

    def answer(prompts: list[list[int]], new_tokens: int) -> None:
        config, ids = openvino_greedy(new_tokens), np.array(prompts, dtype=np.int64)
        tensors = openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        found = pipeline.generate(genai.TokenizedInputs(*tensors), config).tokens
        assert [len(tokens) for tokens in found] == [new_tokens] * len(prompts)

    yield answer


def timed(answer: Answers, prompts: list[list[int]], new_tokens: int) -> Taken:
    """Time prompts that the engine has not read before."""
    seconds: list[float] = []
    for tokens in (new_tokens, 1, new_tokens):
        began = time.perf_counter()
        cached = answer(prompts, tokens)
        # The first time they are read, and then they are cached.
        assert cached is None or not seconds or cached >= len(prompts[0]) - 1
        seconds.append(time.perf_counter() - began)
    whole, first, all_tokens = seconds
    return Taken(whole, all_tokens - first)


def run(settings: BatchBenchSettings) -> BenchRecord:
    """Time all engines at every number of answers."""
    seconds: dict[str, dict[int, list[Taken]]] = {}
    missing, seeds = [], itertools.count(settings.seed)
    with ExitStack() as stack:
        engines: dict[str, Answers] = {
            "razor": stack.enter_context(_razor(settings)),
            "razor, int8": stack.enter_context(_razor(settings, **_INT8)),
        }
        if settings.openvino:
            package = PEERS["openvino"]
            try:
                engines[f"{package} {version(package)}"] = stack.enter_context(_openvino(settings))
            except ImportError as error:
                missing.append(f"openvino was left out: {error}; pip install {package}")
        for count in settings.counts:
            for turn in range(settings.repeats + 1):  # the first records steps
                prompts = [
                    random_tokens(_VOCAB, settings.prompt_tokens, next(seeds)) for _ in range(count)
                ]
                for name, answer in engines.items():
                    taken = timed(answer, prompts, settings.new_tokens)
                    log.info("%s, %d at once: %.2f s, answers %.2f s", name, count, *taken)
                    if turn:
                        seconds.setdefault(name, {}).setdefault(count, []).append(taken)
    return BenchRecord("batch", settings, *_figures(settings, seconds), notes=missing)


def _figures(
    settings: BatchBenchSettings, seconds: Mapping[str, Mapping[int, list[Taken]]]
) -> tuple[dict[str, Any], list[Table]]:
    speeds = {
        name: {
            count: count * (settings.new_tokens - 1) / statistics.median(t.answers for t in taken)
            for count, taken in by_count.items()
        }
        for name, by_count in seconds.items()
    }
    first = settings.counts[0]
    rows = [["tokens/s (of one answer's)", *(f"{count} at once" for count in settings.counts)]]
    for name, of in speeds.items():
        cells = [f"{speed:.1f} ({speed / of[first]:.2f} x)" for speed in of.values()]
        rows.append([name, *cells])
    bars = [f"≥ {_BARS[count]:g} x" if count in _BARS else "" for count in settings.counts]
    rows.append(["bar", *bars])
    read = [["s, prompts and answers", *rows[0][1:]]]
    for name, by_count in seconds.items():
        wholes = (statistics.median(t.whole for t in taken) for taken in by_count.values())
        read.append([name, *(f"{whole:.1f}" for whole in wholes)])
    turns = {
        name: {count: [t._asdict() for t in taken] for count, taken in of.items()}
        for name, of in seconds.items()
    }
    figures = {"seconds": turns, "tokens_per_second": speeds}
    return figures, [Table("", rows), Table("", read)]
