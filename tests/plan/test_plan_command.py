"""The command plan: its output, exit codes and error messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config
from razor_dist.plan.devices import load_device
from razor_dist.plan.planner import plan
from tests.plan.glm import CONFIGS, GLM, settings
from tests.tiny_models import Tiny


@pytest.mark.long
def test_a_head_map_that_is_yet_to_be_made_is_assumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shipped settings for GLM-4-9B-1M, whose head map is not shipped."""
    monkeypatch.chdir(tmp_path)
    file = str(CONFIGS / "glm-4-9b-chat-1m.yaml")
    assert cli.main(["plan", GLM, "--config", file]) == 0
    shown = capsys.readouterr()
    assert "assumed: 30% of the KV heads" in " ".join(shown.out.split())
    assert "configs/head_maps/glm-4-9b-chat-1m.json does not exist: assumed: 30%" in shown.err
    found = plan(
        load_config(EngineConfig, {"model": GLM}, {}, file),
        load_device("h200"),
        retrieval=0.5,
    )
    assert found.deployment.head_map.kv_fraction == 0.5
    assert not any("does not exist" in said for said in found.warnings)


@pytest.mark.long
def test_the_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", GLM, "--device", "4090", "--context", "1M", "--retrieval", "0.3"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("does not fit: 70.4 GB per rank of 22.5; ")


@pytest.mark.long
def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-size", "8", "--context", "256K", "--window-max", "8K", "--max-num-seqs", "1"]
    assert cli.main(["plan", GLM, *sizes]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("262,144 (256K) tokens", "assumed: 30%", "retrieval KV", "limited by", "halo"):
        assert words in shown


def test_the_tables_name_the_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shipped = (CONFIGS / "devices/cpu.yaml").read_text()
    own = tmp_path / "mine.yaml"
    own.write_text(shipped.replace("about: one socket", "about: half").replace("b: 512", "b: 4.1"))
    assert cli.main(["plan", "smollm2", "--context", "1K", "--device", str(own)]) == 1
    shown = capsys.readouterr().out
    assert "\ndevice: half of an Intel Xeon Platinum 8480+, 4.1 GB\nprompt:" in shown


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("world_size: 2\nport: 80\nmax_model_len: 8192\n")
    assert cli.main(["plan", "smollm2", "--device", "cpu", "--config", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["context"], found["dtype"]) == (2, 8192, "float32")
    assert found["heads"] == "head map shipped with the model"
    assert found["memory"]["total"] > found["memory"]["weights"] > 0


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("weight_dtype: int8", "weight_dtype: int8 is for device: cpu"),
        ("{ring: ring_flash_attn, kv_dtype: int8}", "ring is ring_flash_attn, whose keys"),
        ("max_model_len: 100K", "max_model_len is 102400, but smollm2 was made for 8192"),
    ],
)
def test_what_the_engine_refuses_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: str, refusal: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(given)
    assert cli.main(["plan", "smollm2", "--config", str(file), "--context", "1K", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["refusal"].startswith(refusal) and not found["memory"]["fits"]
    assert found["verdict"][0] == f"the engine refuses it: {found['refusal']}"


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("bloom", "is for models with rotary embeddings, and .*bloom has ALiBi; leave it out"),
        ("gpt2", "is for models with rotary embeddings, and .*gpt2 has none; leave it out"),
    ],
)
def test_a_share_of_a_model_without_rotary_embeddings_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: Tiny, family: str, refusal: str
) -> None:
    command = ["plan", str(tiny(family)), "--attention", "full", "--context", "1K", "--json"]
    capsys.readouterr()  # what libraries say when the model is made
    assert cli.main([*command, "--retrieval-share", "0.1"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(f"retrieval_share {refusal}", found["refusal"])
    assert cli.main(command) == 0


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", GLM, "--context", "1m"]) == 2
    assert "invalid size '1m'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="retrieval must be above 0"):
        plan(settings(), load_device("h200"), retrieval=1.5)
    with pytest.raises(ConfigError, match="in place of a head map, but attention is full"):
        plan(settings(attention="full"), load_device("h200"), retrieval=0.5)
    with pytest.raises(ConfigError, match="device is cpu"):
        plan(settings(device="cpu"), load_device("h200"))
    with pytest.raises(ConfigError, match="kv_tokens is 1000, too few"):
        plan(settings(kv_tokens=1000), load_device("h200"), context=8192)
    with pytest.raises(ConfigError, match="replicated weights only"):
        plan(settings(weights="zero3"), load_device("h200"))
    with pytest.raises(ConfigError, match="context must be at least 1, got 0"):
        plan(settings(), load_device("h200"), context=0)
    with pytest.raises(ConfigError, match="above max_model_len"):
        plan(settings(max_model_len=1024), load_device("h200"), context=2048)
    with pytest.raises(ConfigError, match="world_size is 100000, but plan counts up to"):
        plan(settings(world_size=100_000), load_device("h200"))
    with pytest.raises(ModelError, match="has no config"):
        plan(settings(model=str(Path(GLM).parent)), load_device("h200"))


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from razor_dist.cli import main; main(['plan', '--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
