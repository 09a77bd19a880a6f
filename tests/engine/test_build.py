"""Settings that are refused when an engine is built, before any request."""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from razor_dist.cache.accounting import CacheAccounts
from razor_dist.cache.caches import CacheConfig, new_caches
from razor_dist.config.errors import ConfigError, ModelError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.engine import build, capacity
from razor_dist.engine.cache_need import CacheNeed
from razor_dist.engine.capacity import RankSizes, chunk_length, free_memory
from razor_dist.engine.request import Answer, Request
from razor_dist.engine.worker import check_loaded
from razor_dist.frontend.prompts import PromptLimits
from razor_dist.heads.layout import HeadLayout
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import PromptLogprobs, Token, as_tokens
from razor_dist.protocol.sampling_params import SamplingParams
from tests.engine.cores import run
from tests.ranks import RankPool
from tests.tiny_models import save_head_map

CPU = torch.device("cpu")


def build_full(path: Path, **settings: Any) -> build.RankEngine:
    config = EngineConfig(model=str(path), attention="full", max_model_len=64, **settings)
    return build.build_engine(config, Communicator(None), CPU)


def test_without_a_seed_every_start_draws_differently(tiny: Callable[[str], Path]) -> None:
    def drawn(**settings: Any) -> list[int]:
        core = build_full(tiny("llama"), **settings).core
        core.add("a", [5, 6], SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True))
        return [message.token for message in run(core)["a"] if isinstance(message, Token)]

    assert drawn() != drawn()
    assert drawn(seed=3) == drawn(seed=3) != drawn(seed=4)


def test_attention_that_cannot_be_honoured_is_refused_at_start(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = build.load_model

    def with_dropout(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
            layer.self_attn.training = True
        return model

    monkeypatch.setattr(build, "load_model", with_dropout)
    with pytest.raises(ModelError, match=r"cannot be served: .*drops out"):
        build_full(tiny("llama"))


def test_8_bit_weights_are_near_and_for_float32_on_the_cpu(tiny: Callable[[str], Path]) -> None:
    def logprobs(**settings: Any) -> torch.Tensor:
        core = build_full(tiny("llama"), **settings).core
        core.add("a", list(range(3, 40)), SamplingParams(max_tokens=1, prompt_logprobs=0))
        [told] = [m for _ in range(9) for m in core.step() if isinstance(m, PromptLogprobs)]
        return torch.tensor([entry[0] for entry in told.logprobs[1:]])

    exact, rounded = logprobs(), logprobs(weight_dtype="int8")
    # Of random weights, of which a row's few numbers are rounded to a 127th of the largest.
    assert 1e-4 < (exact - rounded).abs().mean() < 0.2
    with pytest.raises(ConfigError, match="weight_dtype: int8 is for device: cpu with dtype: fp32"):
        build_full(tiny("llama"), weight_dtype="int8", dtype="bf16")
    with pytest.raises(ConfigError, match="which weights: zero3-offload has on no rank"):
        build_full(tiny("llama"), weight_dtype="int8", weights="zero3-offload")


def test_a_mixture_of_which_little_is_packed(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for family, told in (("llama", False), ("mixtral", True)):
        build_full(tiny(family), weight_dtype="int8")
        assert ("have 24% of this model's parameters" in caplog.text) == told


def test_caches_that_do_not_fit_are_refused_with_the_settings_to_change(
    tiny: Callable[[str], Path],
) -> None:
    settings = r"max_model_len 64, window_max None and kv_tokens \d+; lower"
    with pytest.raises(ConfigError, match=rf"do not fit .* {settings}"):
        build_full(tiny("llama"), max_num_seqs=1, kv_tokens=2**44)


def test_prefixes_in_host_memory_leave_less_to_caches_on_cpu(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "free_memory", lambda *_: 2.0**30 + 2.0**24)
    without, held = (
        build_full(tiny("llama"), max_num_seqs=1000, prefix_host_gb=gb).runner.caches.reserved_bytes
        for gb in (0.0, 1.0)
    )
    assert held < 2**24 < without


@pytest.mark.parametrize("windows", [(), (None,), (7, None)])
def test_caches_are_as_large_as_memory_allows(windows: tuple[int | None, ...]) -> None:
    shape, tokens = ModelShape(2, 8, 2, 16, 100, 4096), 1000
    row = (*windows, None) if len(windows) == 1 else windows or (None, None)
    layout = HeadLayout.from_decision([[True] * 2, [not windows] * 2], CPU, [(None, None), row])

    def sized(room: float, **settings: Any) -> tuple[CacheConfig, int]:
        config = EngineConfig(window_min=20, block=8, page_size=4, kv_dtype="bf16", **settings)
        cache = RankSizes(config, shape, layout, 2, torch.float32).caches(tokens, room)
        return cache, new_caches(layout, shape, cache, torch.device("meta")).reserved_bytes

    one, least = sized(0.0)
    assert one.num_pages == 126  # 125 of each rank, and one for what differs between ranks
    assert [arena.places for arena in one.arenas] == [a.width(tokens) for a in one.arenas]
    for room in (least, 1.5 * least, 7.3 * least):
        some, nbytes = sized(room)
        assert 0.98 * room <= nbytes <= room
        assert some.max_sequences == 64
    most, nbytes = sized(math.inf)
    assert most.num_pages == 64 * 126
    assert sized(nbytes) == (most, nbytes)
    assert sized(2 * nbytes, max_num_seqs=64) == (most, nbytes)
    given, _ = sized(3 * least, kv_tokens=4000)
    assert given.num_pages == 500 + 64
    config = EngineConfig(window_min=20, block=8, page_size=4, kv_dtype="bf16")
    sizes = RankSizes(config, shape, layout, 2, torch.float32)
    sizes.check_one_fits(tokens, least)
    own = "the head map's windows of up to 7 tokens" if 7 in windows else "window_max None"
    with pytest.raises(ConfigError, match=rf"do not fit into .* 1000, {own} .*; lower"):
        sizes.check_one_fits(tokens, least - 1)
    assert len(given.arenas) == len(windows)
    assert all(a.places >= a.width(tokens) for a in given.arenas)


def test_free_memory_is_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=9000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert free_memory(Communicator(None), CPU) == 9000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert free_memory(Communicator(None), CPU) == 3000


def free_on_gpus(comm: Communicator, uuids: tuple[str, ...]) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(comm.size))
        left = {"cached by torch": 1000}
        patch.setattr(torch.cuda, "empty_cache", left.clear)
        free = 6000 + comm.rank
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (free - sum(left.values()), 9000))
        found = SimpleNamespace(uuid=uuids[comm.rank])
        patch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        return free_memory(comm, torch.device("cuda", 0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("uuids", "want"), [("abcd", 6000), ("aaaa", 1500), ("aabb", 3000), ("aaab", 2000)]
)
def test_free_memory_of_a_gpu_is_shared_by_the_ranks_on_it(
    uuids: str, want: int, ranks: Callable[[int], RankPool]
) -> None:
    # Each may see one GPU alone, as under Ray.
    assert ranks(4).run(free_on_gpus, tuple(uuids)) == [want] * 4


def test_the_package_ring_computes_on_cuda_only(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"ring_flash_attn.* float32 on cpu: use ring: own"):
        build_full(tiny("llama"), ring="ring_flash_attn")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window_min": 8, "window_ratio": 2}, "of 32 tokens, .* a shard of 16: set window_max$"),
        (
            {"window_min": 20, "window_ratio": 8},
            "as long as a shard of 16: lower window_min$",
        ),
        ({"window_min": 8, "window_ratio": 2, "window_max": 16}, "of 16: lower window_max$"),
        ({"window_min": 8, "window_ratio": 5}, None),
        ({"attention": "full"}, None),
    ],
)
def test_the_log_warns_of_windows_that_are_no_shorter_than_shards(
    settings: dict[str, Any],
    words: str | None,
    tiny: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"attention": "streaming", "world_size": 4, "max_model_len": 64, **settings}
    config = EngineConfig(model=str(tiny("llama")), **given)
    with caplog.at_level(logging.WARNING):
        build.build_engine(config, Communicator(None), CPU)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (words is not None)
    if words is not None:
        assert re.search(words, said[0])


def test_the_log_warns_of_a_head_map_that_keeps_nearly_all_heads(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    flags = ((False, True), *((True, True),) * 3)
    chosen = {"induction": tuple((layer, 0) for layer in range(4))}
    path = save_head_map(model, flags, tmp_path / "map.json", selected=chosen)
    config = EngineConfig(model=str(model), head_map=str(path), max_model_len=64, window_min=8)
    with caplog.at_level(logging.WARNING):
        build.build_engine(config, Communicator(None), CPU)
    [record] = caplog.records
    assert "88% of the KV heads are retrieval heads" in record.getMessage()
    assert "12% of the query heads were chosen" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "begin"),
    [
        ({"attention": "full"}, None),
        ({"attention": "streaming", "window_min": 30}, 30),
        ({"attention": "razor"}, 12),  # by the shorter of the map's windows
    ],
)
def test_the_split_saves_from_the_windows_in_use_on(
    settings: dict[str, Any], begin: int | None, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny("llama")
    flags, windows = ((False, True),) * 4, ((12, None), (40, None)) * 2
    head_map = str(save_head_map(model, flags, tmp_path / "map.json", windows=windows))
    config = EngineConfig(model=str(model), head_map=head_map, max_model_len=64, **settings)
    info = build.build_engine(config, Communicator(None), CPU).info
    assert info.saves_from_tokens == begin


@pytest.mark.parametrize(
    ("device", "world", "settings", "per_rank"),
    [
        ("cpu", 8, {"window_max": 8192}, 2048),
        ("cuda", 8, {"chunked_prefill_size": 80}, 10),
        ("cuda", 1, {}, 8192),
        ("cuda", 8, {"window_ratio": None, "window_min": 512}, 8192),
        ("cuda", 8, {"window_max": 6000}, 24000),
        ("cuda", 8, {"window_max": 8192}, 32768),
        ("cuda", 8, {}, 32768),
        ("cuda", 8, {"window_max": 8192, "prefill": "exact"}, 8192),
    ],
)
def test_chunks_are_long_for_long_windows_on_cuda(
    device: str, world: int, settings: dict[str, Any], per_rank: int
) -> None:
    config, longest = EngineConfig(**settings), 2**20
    shape = ModelShape(40, 32, 2, 128, 151_552, longest)
    got = chunk_length(config, shape, (None,), longest, world, torch.device(device))
    assert got == world * per_rank
    if device == "cuda" and not settings.get("chunked_prefill_size"):
        none_streaming = chunk_length(config, shape, (), longest, world, torch.device(device))
        own = chunk_length(config, shape, (100, 5000), longest, world, torch.device(device))
        assert none_streaming == 8192 * world
        assert own == world * (20000 if world > 1 and config.prefill == "local" else 8192)


@pytest.mark.parametrize(
    ("heads", "per_rank"), [(8, 32768), (32, 32768), (48, 21504), (64, 16384), (512, 8192)]
)
def test_the_longest_chunk_of_a_wide_model_is_shorter(heads: int, per_rank: int) -> None:
    """Chunks are shorter in wider models, for activations grow with both."""
    shape = ModelShape(80, heads, 8, 128, 128_256, 2**20)
    config = EngineConfig(window_max=8192)
    got = chunk_length(config, shape, (None,), 2**20, 8, torch.device("cuda"))
    assert got == 8 * per_rank


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("answers", [1, 4])
@pytest.mark.parametrize("length", [30, 1000, 2499])
def test_answers_without_a_limit_fit_kv_tokens(ranks: int, answers: int, length: int) -> None:
    shape = ModelShape(2, 8, 2, 16, 100, 8192)
    layout = HeadLayout.from_decision([[True] * 2] * 2, CPU, [(None, None)] * 2)
    config = EngineConfig(attention="full", kv_tokens=4096, max_num_seqs=4, page_size=64)
    cache = RankSizes(config, shape, layout, ranks, torch.float32).caches(8192)
    limits = PromptLimits(8192, 100, fit_max_tokens=True)
    tokens, params, _ = limits.checked([5] * length, SamplingParams(n=answers, max_tokens=None))
    assert params.max_tokens == 8192 - length and params.fit_max_tokens
    request = Request("a", 0, tokens, params, params.max_tokens, 512)
    request.answers = [Answer(f"a{i}", i, request, params) for i in range(answers)]
    need = CacheNeed(CacheAccounts(cache, ranks))
    need.check_or_fit(request, [])
    # A page of each answer and rank beyond kv_tokens, which sequences may need, is there too.
    assert (4096 - length) // answers - 64 * ranks <= request.max_tokens
    assert request.max_tokens <= (4096 - length) // answers + 64 * ranks * 4
    request.max_tokens += 1
    with pytest.raises(RequestError, match=r"needs .* start the engine with a larger kv_tokens"):
        need.check(request, [])


@pytest.mark.parametrize(("kept", "room"), [(64, 1532), (1000, 596), (1300, 296), (1400, None)])
def test_answers_without_a_limit_fit_beside_pinned_prefixes(kept: int, room: int | None) -> None:
    shape = ModelShape(2, 8, 2, 16, 100, 8192)
    layout = HeadLayout.from_decision([[True] * 2] * 2, CPU, [(None, None)] * 2)
    config = EngineConfig(attention="full", kv_tokens=2048, max_num_seqs=4, page_size=4)
    cache = RankSizes(config, shape, layout, 1, torch.float32).caches(8192)
    need = CacheNeed(CacheAccounts(cache, 1))
    wanted = 1600 if kept % 10 else 7000  # that empty caches hold, too, and that they do not
    params = SamplingParams(max_tokens=wanted, fit_max_tokens=True)
    pinned = Request("p", 1, as_tokens([5] * kept, 100), params, 0, 512)
    request = Request("a", 0, as_tokens([5] * 452, 100), params, wanted, 512)
    request.answers = [Answer("a0", 0, request, params)]
    if room is None:  # a handful of tokens would be no answer, unless it is asked for
        with pytest.raises(
            RequestError, match=r"needs .*; give a lower max_tokens than 1\d\d\d, rel"
        ) as error:
            need.check_or_fit(request, [pinned])
        assert request.max_tokens <= 1612
        assert error.value.code == "pinned_prefixes_hold_cache"
        request.max_tokens = 190
    else:
        need.check_or_fit(request, [pinned])
        assert room <= request.max_tokens <= room + 16  # a page of each of four sequences
    need.check(request, [pinned])


def differences(comm: Communicator, models: list[str], maps: list[str]) -> str:
    """Load an engine as each rank's host has it; return the error."""
    own = {"model": models[comm.rank], "head_map": maps[comm.rank]}
    config = EngineConfig(**own, world_size=comm.size, max_model_len=64)
    try:
        check_loaded(comm, build.load(config, comm, CPU).about)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("what", ["nothing", "weights", "head map"])
def test_ranks_must_have_loaded_the_same(
    what: str, ranks: Callable[[int], RankPool], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Another host has other folders, and perhaps another revision in them."""
    model, other = tiny("llama"), tmp_path / "other"
    shutil.copytree(model, other)
    if what == "weights":
        weights = load_file(other / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"] += 0.5
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    heads = [((True, False),) * 4, ((what != "head map", False),) * 4]
    maps = [save_head_map(model, of, tmp_path / f"{n}.json") for n, of in enumerate(heads)]
    first, second = ranks(2).run(differences, [str(model), str(other)], [str(m) for m in maps])
    assert first == second
    if what == "nothing":
        assert not first
    else:
        assert re.match(rf"rank 1 differs from rank 0 \({what}: \w+ and not \w+\): start ", first)
