"""Engines of others, which read the embedded model's GGUF file, timed as ours are.

Each computes as it does by default, with our number of threads and nothing kept from one run to the
next. Their packages are the extra ``peers``. OpenVINO's pipeline reads a prompt in one piece unless
it is given a ``SchedulerConfig``, whose own default is pieces of 256 tokens; ours, which turns the
prefix cache off, has the pipeline's limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from razor_dist.evals.bench.measure import Generate, TimedRun
from razor_dist.evals.bench.settings import PEERS, EngineBenchSettings
from razor_dist.models.smollm2 import gguf_file

_ONE_PIECE = 2**64 - 1  # tokens of a step: the pipeline's own limit, the largest size_t


def open_peers(settings: EngineBenchSettings) -> tuple[dict[str, Generate], list[str]]:
    """Return engines by name and version, and a sentence for each whose package is missing."""
    engines, missing = {}, []
    for name in settings.peer_names:
        package = PEERS[name]
        context = settings.prompt_tokens + settings.new_tokens
        try:
            engine = _OPEN[name](gguf_file(), context, settings.threads)
            engines[f"{package} {version(package)}"] = engine
        except ImportError as error:
            missing.append(f"{name} was left out: {error}; pip install {package} (extra: peers).")
    return engines, missing


def openvino_pipeline(gguf: Path, threads: int, **scheduling: Any) -> Any:
    """Return OpenVINO's pipeline of the model, with fields of its ``SchedulerConfig``."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # what is measured is read
    scheduler.max_num_batched_tokens = _ONE_PIECE
    for name, value in scheduling.items():
        setattr(scheduler, name, value)
    settings = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
    return genai.LLMPipeline(str(gguf), "CPU", **settings)


def openvino_greedy(new_tokens: int) -> Any:
    import openvino_genai as genai

    return genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)


def openvino(gguf: Path, context: int, threads: int) -> Generate:
    import openvino
    import openvino_genai as genai

    pipeline = openvino_pipeline(gguf, threads)

    class Stamps(genai.StreamerBase):
        def __init__(self) -> None:
            super().__init__()
            self.stamps: list[float] = []

        def write(self, token: int) -> Any:
            self.stamps.append(time.perf_counter())
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def generate(prompt: list[int], new_tokens: int) -> TimedRun:
        config = openvino_greedy(new_tokens)
        ids, streamer = openvino.Tensor(np.array([prompt], dtype=np.int64)), Stamps()
        begin = time.perf_counter()
        [tokens] = pipeline.generate(ids, config, streamer).tokens
        assert len(tokens) == len(streamer.stamps) == new_tokens
        return TimedRun.from_stamps(begin, streamer.stamps, tokens)

    return generate


def llama_cpp(gguf: Path, context: int, threads: int) -> Generate:
    from llama_cpp import Llama

    model = Llama(
        str(gguf),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )

    def generate(prompt: list[int], new_tokens: int) -> TimedRun:
        model.reset()  # else it goes on from what the last prompt has in common with this one
        begin, stamps, tokens = time.perf_counter(), [], []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            stamps.append(time.perf_counter())
            tokens.append(token)
            if len(tokens) == new_tokens:
                break
        return TimedRun.from_stamps(begin, stamps, tokens)

    return generate


_OPEN: Mapping[str, Callable[[Path, int, int], Generate]] = {
    "openvino": openvino,
    "llama-cpp": llama_cpp,
}
