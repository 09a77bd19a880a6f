"""Gate training: on one rank and two, interrupted and not, and on planted heads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.heads.decision import Scores
from razor_dist.identify.criterion import Sample
from razor_dist.identify.duo.attention import Ulysses
from razor_dist.identify.duo.train import (
    GatedModel,
    KeptRun,
    TrainingState,
    head_map,
    run_identity,
    schedule,
    train,
)
from razor_dist.identify.settings import DuoSettings
from razor_dist.models.loader import load_model, model_fingerprint, read_config
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.zero import import_deepspeed
from tests.heads.planted import HEADS, RETRIEVAL, make_planted, passkeys
from tests.ranks import RankPool
from tests.tiny_models import make_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "planted": make_planted(folder / "planted"),
        "llama": make_tiny("llama", folder / "llama"),
    }


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.close()


def _random_sample(index: int) -> Sample:
    """A text of an odd number of tokens, so that two ranks need one more."""
    generator = torch.Generator().manual_seed(index)
    mask = torch.zeros(161, dtype=torch.bool)
    mask[90::4] = True
    return Sample(torch.randint(4, 190, (161,), generator=generator), mask)


def _train(
    comm: Any,
    model: Path,
    settings: DuoSettings,
    file: Path | None = None,
    resume: bool = False,
    last: int | None = None,
) -> tuple[Scores, list[Any]]:
    """Runs on every rank; ``last`` is the step after which the run is ended, as by a kill."""
    from razor_dist.parallel.zero import join_ranks

    # A process alone needs no group, and no DeepSpeed.
    group = None if comm.size == 1 and settings.zero_stage == 0 else join_ranks(CPU)
    loaded = load_model(model, device=CPU, dtype=torch.float32)
    sample = passkeys().sample if model.name == "planted" else _random_sample
    reports: list[Any] = []

    def on_step(report: Any) -> None:
        reports.append(report)

    def until(index: int) -> Sample:
        if index == last:
            raise KeyboardInterrupt
        return sample(index)

    state = TrainingState.load(file, {"a": 1}) if resume and file is not None else None
    kept = None if file is None else KeptRun(file, {"a": 1}, 4, state)
    try:
        gates = train(loaded, until, settings, group, kept=kept, on_step=on_step)
    except KeyboardInterrupt:
        gates = ()
    return gates, reports


@pytest.mark.long
def test_the_planted_heads_keep_their_gates(
    models: dict[str, Path], pools: dict[int, RankPool]
) -> None:
    settings = DuoSettings(sinks=4, recent=24, steps=16, learning_rate=0.15)
    [(gates, reports)] = pools[1].run(_train, models["planted"], settings)
    others = [gates[layer][head] for layer, head in HEADS if (layer, head) not in RETRIEVAL]
    assert min(gates[layer][head] for layer, head in RETRIEVAL) > 0.9 and max(others) < 0.1
    assert [report.step for report in reports] == list(range(1, 17))
    assert reports[0].distance == 0.0  # all gates open: the full model
    assert reports[-1].sparsity == pytest.approx(4 / 6)
    config = read_config(models["planted"])
    found = head_map("planted", config, gates, settings, passkeys().settings, torch.float32)
    assert found.method == "duo" and found.settings["sparsity"] == 0.5
    assert found.settings["training"]["steps"] == 16 and found.settings["sink_size"] == 4
    assert all(found.retrieval[layer][head] for layer, head in RETRIEVAL)
    found.validate(ModelShape.from_config(config), model_fingerprint(config))
    settings = DuoSettings(threshold=0.5)
    chosen = head_map("planted", config, gates, settings, passkeys().settings, torch.float32)
    assert {(i, j) for i, j in HEADS if chosen.retrieval[i][j]} == RETRIEVAL


@pytest.mark.long
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_ranks_train_what_one_does(
    zero_stage: int, models: dict[str, Path], pools: dict[int, RankPool]
) -> None:
    settings = DuoSettings(sinks=2, recent=8, steps=5, l1=0.5, learning_rate=0.1)
    [(alone, one)] = pools[1].run(_train, models["llama"], settings)
    spread = DuoSettings(**{**vars(settings), "zero_stage": zero_stage})
    (first, two), (second, none) = pools[2].run(_train, models["llama"], spread)
    assert first == second and not none
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), atol=1e-4, rtol=1e-3)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.tokens == theirs.tokens == 161
        assert mine.distance == pytest.approx(theirs.distance, rel=1e-3, abs=1e-6)
    assert 0.02 < 1 - torch.tensor(alone).mean() < 0.98


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_ends_with_the_same_gates(
    ranks: int, models: dict[str, Path], pools: dict[int, RankPool], tmp_path: Path
) -> None:
    settings = DuoSettings(sinks=2, recent=8, steps=11, learning_rate=0.1)
    file = tmp_path / "gates.safetensors"
    whole, reports = pools[ranks].run(_train, models["llama"], settings)[0]
    # Ended after step 6, with the state of step 4.
    pools[ranks].run(_train, models["llama"], settings, file, False, 6)
    resumed, rest = pools[ranks].run(_train, models["llama"], settings, file, True)[0]
    assert resumed == whole
    assert rest == reports[4:]
    # Of what is done there is nothing to do.
    assert pools[ranks].run(_train, models["llama"], settings, file, True)[0] == (whole, [])


def test_kv_heads_must_be_shared_out_evenly() -> None:
    two = mock.patch.multiple(dist, get_rank=lambda _: 0, get_world_size=lambda _: 2)
    problem = r"^the model's 3 KV heads cannot be shared out evenly over 2 .* needs 1, 3 ranks$"
    with two, pytest.raises(ConfigError, match=problem):
        Ulysses(None, 3)


@pytest.mark.long
def test_stage_3_leaves_each_rank_its_share_of_the_weights(
    models: dict[str, Path], pools: dict[int, RankPool]
) -> None:
    for here, share, whole in pools[2].run(_shares, models["llama"]):
        assert here == 0 and share == whole / 2


def _shares(comm: Any, model: Path) -> tuple[int, int, int]:
    """Numbers of a weight between steps: gathered ones, this rank's, and all."""
    from razor_dist.parallel.zero import join_ranks

    loaded = load_model(model, device=CPU, dtype=torch.float32)
    weight: Any = loaded.model.embed_tokens.weight  # larger than what is kept whole
    group = join_ranks(CPU)
    train(loaded, _random_sample, DuoSettings(recent=8, steps=1, zero_stage=3), group)
    return weight.numel(), weight.ds_tensor.numel(), weight.ds_numel


def test_the_loss_is_the_one_of_the_docstring(models: dict[str, Path]) -> None:
    model = load_model(models["llama"], device=CPU, dtype=torch.float32)
    gated = GatedModel(model, DuoSettings(sinks=2, recent=8, l1=0.3))
    sample = _random_sample(0)
    loss, distance = gated(sample)
    assert distance == 0 and loss.item() == pytest.approx(0.3)
    torch.nn.init.constant_(gated.gates, 0.25)
    loss, distance = gated(sample)
    assert loss.item() == pytest.approx(distance.item() + 0.3 * 0.25)
    full, mixed = (
        gated._hidden(sample.ids, torch.arange(161), gates)[sample.mask]
        for gates in (None, gated.gates)
    )
    wanted = (full - mixed).square().sum(-1).mean() / full.shape[-1]
    assert distance.item() == pytest.approx(wanted.item(), rel=1e-5) and distance > 0.01


def test_training_ends_once_the_loss_is_not_finite(models: dict[str, Path]) -> None:
    loaded: Any = load_model(models["llama"], device=CPU, dtype=torch.float32)
    loaded.model.layers[1].self_attn.o_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ModelError, match="the distance of step 1 is nan"):
        train(loaded, _random_sample, DuoSettings(recent=8, steps=3))


def test_the_learning_rate_rises_stays_and_falls() -> None:
    factors = [schedule(step, 2000) for step in range(2000)]
    assert factors[0] == factors[-1] == pytest.approx(0.1)
    assert factors[200] == pytest.approx(0.55)
    assert factors[400:1600] == [1.0] * 1200
    assert factors[1799] == pytest.approx(0.55)
    assert schedule(0, 1) == pytest.approx(0.1)


def test_a_state_of_another_run_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "gates.safetensors"
    with pytest.raises(ConfigError, match="there is no run to resume"):
        TrainingState.load(file, {})
    config = read_config(models["llama"])
    settings = DuoSettings(steps=7)

    def identity(
        settings: DuoSettings, seed: int = 0, name: str = "a", dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        return run_identity(name, config, dtype, settings, passkeys(seed), "reference")

    mine = identity(settings)
    zeros = torch.zeros(4, 2)
    TrainingState(3, zeros, zeros + 1, zeros + 2).save(file, mine)
    assert TrainingState.load(file, mine).step == 3
    for other, problem in (
        (DuoSettings(steps=8), "has steps 7, this one 8"),
        (DuoSettings(steps=7, l1=0.1), "has l1 0.05, this one 0.1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            TrainingState.load(file, identity(other))
    for other_identity, problem in (
        (identity(settings, seed=1), r"has passkeys\.seed 0, this one 1"),
        (identity(settings, name="b"), "has model_name 'a', this one 'b'"),
        (identity(settings, dtype=torch.bfloat16), "has dtype 'float32', this one 'bfloat16'"),
        ({**mine, "haystack_fingerprint": "f"}, "has haystack_fingerprint '[0-9a-f]{12}', this"),
    ):
        with pytest.raises(ConfigError, match=problem):
            TrainingState.load(file, other_identity)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="does not hold a state of gate training"):
        TrainingState.load(file, mine)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Restore after the test what importing DeepSpeed sets."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return monkeypatch


@pytest.mark.parametrize(("device", "told"), [("cuda:0", "0"), ("cuda:5", "5"), ("cpu", "3")])
def test_deepspeed_is_told_the_gpu_of_this_process(
    device: str, told: str, environment: pytest.MonkeyPatch
) -> None:
    """An actor of Ray sees one GPU, whatever its place on the node."""
    environment.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    import_deepspeed(torch.device(device))
    assert os.environ["LOCAL_RANK"] == told


def test_without_deepspeed_the_extra_is_named(environment: pytest.MonkeyPatch) -> None:
    environment.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[train\]'"):
        import_deepspeed()
