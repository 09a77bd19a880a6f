"""Head maps at equal budgets and RazorAttention's ablations, as methods of a grid."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config
from razor_dist.evals.methods import Method, methods_of
from razor_dist.evals.needle.config import NeedleGridConfig
from razor_dist.heads.decision import flags
from razor_dist.jobs.results import read_job
from razor_dist.models.loader import read_config
from razor_dist.models.shape import ModelShape
from tests.tiny_models import make_tiny, save_head_map
from tests.tokenizer import write_letters

RECORDED = Path(__file__).parents[2] / "docs/benchmarks/heads"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and two head maps of it, with random scores."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")
    write_letters(folder)
    config = read_config(folder)
    shape, draw = ModelShape.from_config(config), random.Random(0)

    def table(heads: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(draw.random() for _ in range(heads)) for _ in range(shape.layers))

    full = ((True,) * shape.kv_heads,) * shape.layers
    scores = {kind: table(shape.query_heads) for kind in ("induction", "echo")}
    save_head_map(folder, full, folder.parent / "razor.json", scores=scores)
    path, change = folder.parent / "onthefly.json", {"change": table(shape.kv_heads)}
    save_head_map(folder, full, path, method="onthefly", kv_scores=change)
    return folder


def _resolved(name: str) -> dict[str, Method]:
    """The methods of a file in ``configs``, by name."""
    config = load_config(NeedleGridConfig, yaml_path=f"configs/{name}.yaml")
    methods = methods_of(config, config.method_settings, as_written=True)
    return {method.name: method for method in methods}


def test_the_files_are_what_was_measured() -> None:
    """The recorded answers are of these heads, of the same draws."""
    recorded = json.loads((RECORDED / "ablations.json").read_text())["variants"]
    methods = _resolved("ablations")
    assert [variant["name"] for variant in recorded] == list(methods)[2:]
    for variant in recorded:
        method = methods[variant["name"]]
        assert method.retrieval == tuple(map(tuple, variant["retrieval"]))
        assert method.settings.get("compensation", True) is variant["compensation"]
        assert method.kept == str(variant["kept"])
    methods = _resolved("heads_smollm2")
    recorded = json.loads((RECORDED / "heads.json").read_text())["chosen"]
    assert len(methods) == 2 + len(recorded)
    for chosen in recorded:
        method = methods[f"{chosen['map']} {chosen['percent']:g} %"]
        assert method.retrieval == flags(map(tuple, chosen["kv_heads"]), 30, 3)
    assert all(method.shares_prefill for name, method in methods.items() if name != "full")


def test_heads_by_seeds_and_scores(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), head_map=str(tiny.parent / "razor.json"))
    whole, echo, first, second = methods_of(
        config,
        {
            "whole": {"induction": 50, "echo": 10},
            "echo": {"echo": 10},
            "first": {"echo": 10, "random": 0},
            "second": {"percent": 50, "random": 1},
        },
    )
    assert whole.retrieval != echo.retrieval != first.retrieval != second.retrieval
    assert first.kept == echo.kept != second.kept == "4"
    assert echo.settings["head_map"] == "razor.json, echo 10 %"
    for own, message in (
        ({"percent": 10, "echo": 1}, "a: give percent, or induction and echo, not both"),
        ({"random": "x"}, "a: random must be a number, got 'x'"),
        ({"echo": 101}, "a: echo must be a percentage"),
        ({"press": "h2o"}, "a: press is no setting of a method; those are attention, "),
        ({"head_map": "smolm2"}, "a: cannot read the head map smolm2"),
        (
            {"head_map": str(tiny.parent / "onthefly.json"), "echo": 1},
            "a: induction and echo are RazorAttention's, but a map of method 'onthefly'",
        ),
        ({"attention": "full", "random": 1}, "a: random is of no use with attention: full"),
    ):
        with pytest.raises((ConfigError, HeadMapError), match=message):
            methods_of(config, {"a": own})


GRID = ["--lengths", "400", "--depths", "50", "--needles", "1", "--haystack", "reference"]


@pytest.mark.slow
def test_the_commands_write_results_and_tables(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    maps = [str(tiny.parent / f"{name}.json") for name in ("razor", "onthefly")]
    shared = ["--model", str(tiny), "--window-min", "32", "--block", "16", "--threads", "1"]
    command = ["eval", "grid", "--out", str(tmp_path), "--percents", "25,50"]
    command += ["--methods", ",".join(["full", "streaming", *maps])]
    assert cli.main([*command, *shared, *GRID]) == 0
    out = capfd.readouterr().out
    assert "| onthefly 25 % | 2 | 0/1 | " in out and "| full | all | 0/1 |" in out
    assert (tmp_path / "report.md").read_text().strip() in out
    assert len(read_job(tmp_path).records) == 2 + 4
    stored = (tmp_path / "results.jsonl").read_bytes()
    assert cli.main([*command, *shared, *GRID]) == 0
    assert (tmp_path / "results.jsonl").read_bytes() == stored

    # In the same folder, whose full attention need not be asked again.
    command = ["eval", "grid", "--config", "configs/ablations.yaml", "--head-map", maps[0]]
    command += ["--out", str(tmp_path)]
    assert cli.main([*command, *shared, *GRID]) == 0
    assert capfd.readouterr().out.count("| random heads, draw ") == 3
    assert len(read_job(tmp_path).records) == 2 + 4 + 10
    assert cli.main([*command, *shared, *GRID, "--seed", "1"]) == 2
    assert "task.seed is 0 there and 1 here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--methods", "MAP,other/razor.json"], "two have the same name; rename a head map"),
        (["--methods", "full,razor"], "percents is for methods that are paths of head maps, but"),
        (["--percents", "0,10"], "a budget must be a percentage above 0"),
        (["--percents", "a"], "percents must be a list of numbers or none, got 'a'"),
        (["--percents", "10,10"], "percents must be a list without repeats"),
        (["--depths", "101"], "depths must be a percentage from 0"),
        (["--needles", "0"], "needles must be at least 1"),
        (["--model", "smollm2"], "but the model has"),
    ],
)
def test_mistakes_are_named(
    option: list[str], message: str, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = str(tiny.parent / "razor.json")
    option = [word.replace("MAP", own) for word in option]
    command = ["eval", "grid", "--percents", "50", "--out", str(tmp_path)]
    command += [] if "--methods" in option else ["--methods", own]
    command += ["--model", str(tiny), "--lengths", "400", "--haystack", "reference"]
    assert cli.main([*command, *option]) == 2
    assert message in capfd.readouterr().err
