"""Sharded weights: the same logits, a rank's share of the memory, every byte counted."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build, graph
from razor_dist.engine.worker import follow
from razor_dist.kernels.query import Query
from razor_dist.models.loader import (
    layer_classes,
    load_model,
    stored_dtype,
)
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.zero import ShardedWeights, join_ranks
from razor_dist.protocol.messages import PromptLogprobs, Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.ranks import Ranks
from tests.tiny_models import Tiny, make_tiny, save_head_map

CPU = torch.device("cpu")
# Short prompts leave ranks without a token; long ones take several chunks, so that rings and halos
# of one rank run beside the gathers of another.
PROMPTS = (1, 150, 40)
THRESHOLD = 10_000  # numbers; a weight of fewer stays whole


def prompt(count: int) -> list[int]:
    return torch.randint(3, 190, (count,), generator=torch.manual_seed(count)).tolist()


def with_head_map(folder: Path) -> Path:
    """Write a map that keeps every other KV head, and give its path."""
    shape = ModelShape.from_config(AutoConfig.from_pretrained(folder))
    every = tuple(
        tuple((layer + head) % 2 == 0 for head in range(shape.kv_heads))
        for layer in range(shape.layers)
    )
    return save_head_map(folder, every, folder / "head_map.json")


def answers(comm: Communicator, settings: dict[str, Any]) -> Any:
    """Rank 0: what prompts are answered with, and the bytes sent for weights in four steps."""
    # Ranks that share steps add up in another order than those that each compute all.
    config = EngineConfig(world_size=comm.size, decode="replicated", **settings)
    engine = build.build_engine(config, comm, CPU)
    if comm.rank > 0:
        follow(engine)
        return None
    core = engine.core
    asked = [(str(n), prompt(n), sampling(max_tokens=3, logprobs=4)) for n in PROMPTS]
    asked.append(("scored", prompt(30), sampling(max_tokens=1, prompt_logprobs=2)))
    told: dict[str, list[Any]] = defaultdict(list)
    # One after the other, and in chunks: how prompts in company are cut, and whether all ranks read
    # all of a prompt, depends on the time that steps take, and the last bits on the cuts.
    core.scheduler.prefill_policy.is_short = lambda *_: False
    for request in asked:
        core.add(*request)
        while core.has_work:
            for message in core.step():
                if isinstance(message, Token | PromptLogprobs):
                    told[message.id].append(message)
    core.idle()
    before = core.stats().bytes_sent["weights"]
    core.add("again", prompt(5), sampling(max_tokens=4))  # one chunk, three decode steps
    while core.has_work:
        core.step()
    sent = core.stats().bytes_sent["weights"] - before
    core.stop()
    return told, sent


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **values)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "weights", "dtype"), [(4, "zero3", "fp32"), (2, "zero3-offload", "bf16")]
)
def test_answers_are_those_of_replicated_weights(
    world: int, weights: str, dtype: str, ranks: Ranks, tmp_path: Path
) -> None:
    path = make_tiny("glm", tmp_path)
    settings = {
        "model": str(path),
        "head_map": str(with_head_map(path)),
        "window_min": 16,
        "window_ratio": None,
        "block": 8,
        "chunked_prefill_size": 64,
        "max_model_len": 160,
        "page_size": 8,
        "dtype": dtype,
    }
    want, nothing = ranks(world).run(answers, settings)[0]
    got, sent = ranks(world).run(answers, {**settings, "weights": weights})[0]
    assert got == want  # log-probabilities too, to the last bit
    assert nothing == 0
    # A step gathers every weight once: each rank sends its share to the others.
    sizes = [p.numel() for p in load_model(path, device=CPU, dtype=torch.float32).parameters()]
    item = {"fp32": 4, "bf16": 2}[dtype]
    shares = sum(-(-size // world) * item for size in sizes if size > THRESHOLD)
    assert sent == 4 * world * (world - 1) * shares


LARGER = LlamaConfig(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=6144,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
MB = 2**20


def of_process(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


class Peak:
    """The most memory that the process had within."""

    def __enter__(self) -> Peak:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        return self

    def __exit__(self, *_: Any) -> None:
        self.bytes = of_process("VmHWM")


def resident_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that this rank holds now: its shares, and what is gathered."""
    params: list[Any] = list(model.parameters())
    return sum(p.ds_tensor.nbytes + p.data.nbytes for p in params)


class Watch:
    """Attends to nothing, and notes what weights are in memory while each layer runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self.bytes = model, list[int]()

    def attend(self, layer: int, query: Query, *_: torch.Tensor) -> torch.Tensor:
        self.bytes.append(resident_bytes(self._model))
        return torch.zeros_like(query.q).flatten(0, 1).transpose(0, 1)


def warm_up() -> None:
    """Have the process load the code that it needs, which counts as its memory too."""
    small = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False)).requires_grad_(False)
    ShardedWeights(small, CPU).gather_when_run()
    with torch.inference_mode():
        for _ in range(3):
            small(torch.ones(1, 128))


def memory(comm: Communicator, path: str) -> dict[str, int]:
    """Rise of a rank's memory: while it loads, when it has, while the model runs."""
    join_ranks(CPU)
    warm_up()
    gc.collect()
    before = of_process("VmRSS")
    with Peak() as loading:
        model = load_model(path, device=CPU, dtype=stored_dtype(path))
        shares = ShardedWeights(model, CPU, together=layer_classes(model))
    loaded = of_process("VmRSS")
    shares.gather_when_run()
    token = torch.ones(1, 1, dtype=torch.int64)

    for _ in range(3):  # at first DeepSpeed learns the order of layers
        watch = Watch(model)
        with torch.inference_mode():
            logits = model(token, position_ids=token, attention_context=watch).logits
    assert logits.isfinite().all() and logits.std() > 0
    return {
        "loading": loading.bytes - before,
        "loaded": loaded - before,
        "running": max(watch.bytes),
        "idle": resident_bytes(model),
    }


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_rank_holds_its_share_and_one_layer(ranks: Ranks, tmp_path: Path) -> None:
    """Measured in the processes; at no time does one hold the whole model."""
    world, slack = 4, 16 * MB
    model = AutoModelForCausalLM.from_config(LARGER, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="16MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    whole = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert whole > 80 * MB and layer > 10 * MB
    for found in ranks(world).run(memory, str(tmp_path)):
        assert found["loaded"] <= whole / world + slack
        # Its share of the mapped files is in memory beside what is made of it.
        assert found["loading"] <= 2 * whole / world + slack
        assert found["idle"] == pytest.approx(whole / world, rel=0.02)
        assert found["running"] == pytest.approx(whole / world + layer, rel=0.02)


def when_loaded(comm: Communicator, path: str, met: str) -> list[float]:
    """Load a rank's share where ranks have met in a file; return when it began and ended."""
    times, load, cut = [], build.load_model, build.ShardedWeights

    def began(*given: Any, **named: Any) -> Any:
        times.append(time.monotonic())
        return load(*given, **named)

    def ended(*given: Any, **named: Any) -> Any:
        shares = cut(*given, **named)
        times.append(time.monotonic())
        return shares

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAZOR_RENDEZVOUS", f"file://{met}")
        patch.setattr(build, "load_model", began)
        patch.setattr(build, "ShardedWeights", ended)
        settings = {"model": path, "attention": "full", "weights": "zero3"}
        build.load(EngineConfig(**settings, world_size=comm.size), comm, CPU)
    return times


def test_ranks_of_a_host_load_a_mixture_one_after_the_other(
    ranks: Ranks, tiny: Tiny, tmp_path: Path
) -> None:
    """Its experts are copies of each rank's own until they are cut."""
    met = tmp_path / "met"
    ranks(2).run(when_loaded, str(tiny("llama")), str(met))
    assert not list(tmp_path.iterdir()), "views of files take no turns"
    first, second = sorted(ranks(2).run(when_loaded, str(tiny("qwen3_moe")), str(met)))
    assert first[1] <= second[0]


@pytest.mark.long
def test_one_rank_can_keep_its_weights_in_cpu_memory(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    code = f"""
import torch
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import build_engine
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams
told = []
for weights in ("replicated", "zero3-offload"):
    config = EngineConfig(model={str(path)!r}, attention="full", weights=weights, max_model_len=64)
    core = build_engine(config, Communicator(None), torch.device("cpu")).core
    core.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))
    told.append([])
    while core.has_work:
        told[-1] += [m for m in core.step() if isinstance(m, Token)]
assert len(told[0]) == 3 and told[0] == told[1]
assert core.stats().bytes_sent["weights"] == 0
"""
    # In a process of its own: it makes itself a process group.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # where DeepSpeed would print what it takes for its accelerator


def test_what_cannot_be_sharded_is_refused(tiny: Tiny) -> None:
    config = EngineConfig(model=str(tiny("llama")), attention="full", weights="zero3")
    with pytest.raises(ConfigError, match=r"world_size is 1; use replicated, or zero3-offload"):
        build.build_engine(config, Communicator(None), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", None)
        alone = config.model_copy(update={"weights": "zero3-offload"})
        with pytest.raises(
            ConfigError,
            match=r"weights: zero3-offload needs DeepSpeed.*pip install .*\[zero3\]'",
        ):
            build.build_engine(alone, Communicator(None), CPU)


def test_no_cuda_graphs_beside_sharded_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    comm, cuda = Communicator(None), torch.device("cuda")
    monkeypatch.setattr(graph, "CudaRecorder", lambda _: "a recorder")
    monkeypatch.setattr(graph, "available", lambda _: True)
    recorder_of: Callable[..., Any] = graph.recorder_of
    assert recorder_of(EngineConfig(), comm, cuda) == "a recorder"
    assert recorder_of(EngineConfig(cuda_graphs=False, weights="zero3"), comm, cuda) is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert recorder_of(EngineConfig(weights="zero3"), comm, cuda) is None
    assert "not recorded in CUDA graphs: with weights: zero3" in caplog.text


def test_the_stored_dtype_is_the_files(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "fp32")
    assert stored_dtype(path) == torch.float32
    save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == torch.bfloat16
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"of dtype I8; only F32, BF16, F16 are served"):
        stored_dtype(tmp_path)
