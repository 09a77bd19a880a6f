"""DuoAttention's patterns: what is read, what is decided, and that an export reads back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.decision import (
    Flags,
    Scores,
    by_sparsity,
    by_threshold,
    published_sparsity,
    rounded,
)
from razor_dist.heads.head_map import HeadMap
from razor_dist.identify.duo.pattern import KIND, Pattern, head_map, read_pattern, write_pattern

GATES: Scores = ((0.25, 1.0), (1.0, 0.5), (1.0, 0.0))
CONFIG = {"sink_size": 128, "recent_size": 256}
# The keys and the negative gates are as in the published folders.
TRAINING = {"model_name": "models/m", "lr": 0.02, "threshold": 0.5, "sparsity": None, "task": None}


def config_of(gates: Scores, group: int = 2) -> LlamaConfig:
    """The configuration of a model that has these gates."""
    return LlamaConfig(
        num_hidden_layers=len(gates),
        num_attention_heads=len(gates[0]) * group,
        num_key_value_heads=len(gates[0]),
        hidden_size=8 * len(gates[0]) * group,
    )


def write(folder: Path, gates: Any = GATES, config: Any = CONFIG) -> Path:
    """A folder as DuoAttention's training writes it."""
    folder.mkdir(exist_ok=True)
    np.savetxt(folder / "full_attention_heads.tsv", np.array(gates), delimiter="\t")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make(gates: Scores = GATES, config: Any = CONFIG, **rule: float) -> HeadMap:
    return head_map(Pattern(gates, config, 0), "m", config_of(gates), **rule)


def test_reads_what_duo_attention_writes(tmp_path: Path) -> None:
    gates = ((-5.722045898437500000e-05, 0.984375), (1.0, -2.298355102539062500e-04))
    found = read_pattern(write(tmp_path / "pattern", gates, {**CONFIG, **TRAINING}))
    # A last training step leaves gates a little outside, which DuoAttention clips as well.
    assert found.gates == ((0.0, 0.984375), (1.0, 0.0))
    assert found.clipped == 2
    assert found.config["recent_size"] == 256
    made = head_map(found, "m", config_of(found.gates))
    assert made.method == "duo"
    assert made.retrieval == ((False, True), (True, False))
    assert made.kv_scores == {KIND: found.gates}
    assert made.settings == {
        "sparsity": 0.5,
        "sink_size": 128,
        "recent_size": 256,
        "training": {"model_name": "models/m", "lr": 0.02},
    }


def test_a_header_and_empty_lines_are_no_layers(tmp_path: Path) -> None:
    folder = write(tmp_path / "pattern")
    text = (folder / "full_attention_heads.tsv").read_text()
    (folder / "full_attention_heads.tsv").write_text("# gates\n\n" + text + "\n")
    assert read_pattern(folder).gates == GATES


# DuoAttention's noise makes all gates differ; then both take the same heads.
@given(
    st.integers(1, 8).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 10**6), min_size=width, max_size=width), min_size=1, max_size=8
        )
    ),
    st.floats(0, 1),
)
def test_sparsity_takes_as_many_heads_as_numpys_quantile(
    table: list[list[int]], sparsity: float
) -> None:
    # Ranks of the drawn numbers: all different, evenly spaced.
    flat = np.array(table, dtype=float).ravel()
    ranks = flat.argsort(kind="stable").argsort().reshape(len(table), -1)
    gates: Scores = tuple(tuple(map(float, row)) for row in ranks.tolist())
    position = sparsity * (flat.size - 1)
    if 0 < abs(position - round(position)) < 1e-8:
        return  # a whole number of heads up to rounding errors, which numpy does not mend
    if 0 < sparsity < 1:
        wanted = ranks >= np.quantile(ranks, sparsity)
    else:
        wanted = np.full(ranks.shape, sparsity == 0)  # theirs: thresholds of -1 and 2
    assert by_sparsity(gates, sparsity) == tuple(map(tuple, wanted.tolist()))


def test_equal_gates_are_kept_in_order_of_layer_and_head() -> None:
    ones: Scores = ((1.0, 1.0), (1.0, 1.0))
    assert by_sparsity(ones, 0.25) == ((True, True), (True, False))
    assert by_sparsity(ones, 0.5) == ((True, True), (False, False))
    assert by_sparsity(((0.0, 1.0), (1.0, 1.0)), 0.5) == ((False, True), (True, False))


def test_a_product_that_is_whole_is_not_rounded_up() -> None:
    assert 0.07 * 100 > 7
    row = tuple(i / 100 for i in range(101))
    assert by_sparsity((row,), 0.07)[0].count(False) == 7


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.0, 6), (0.2, 5), (0.5, 4), (0.500001, 3), (1.0, 3)]
)
def test_threshold_keeps_gates_that_reach_it(threshold: float, kept: int) -> None:
    assert sum(map(sum, by_threshold(GATES, threshold))) == kept
    made = make(threshold=threshold)
    assert made.retrieval == by_threshold(GATES, threshold)
    assert made.settings["threshold"] == threshold and "sparsity" not in made.settings


def test_the_default_is_what_the_paper_used() -> None:
    assert published_sparsity(4) == 0.5 and published_sparsity(1) == 0.75
    assert make().retrieval == by_sparsity(GATES, 0.5)
    alone = head_map(Pattern(GATES, CONFIG, 0), "m", config_of(GATES, group=1))
    assert alone.settings["sparsity"] == 0.75
    # A folder that says how to decide is asked before.
    assert make(config={**CONFIG, "sparsity": 0.2}).settings["sparsity"] == 0.2
    assert make(config={**CONFIG, "sparsity": 0.2}, sparsity=0.4).settings["sparsity"] == 0.4


def test_rules_out_of_range() -> None:
    with pytest.raises(ConfigError, match="sparsity or threshold, not both"):
        make(sparsity=0.5, threshold=0.5)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="sparsity must be from 0 to 1"):
            make(sparsity=value)
        with pytest.raises(ConfigError, match="threshold must be from 0 to 1"):
            make(threshold=value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5\t1\n0.5\tx\n", r"tsv, line 2: invalid gate 'x'"),
        ("0.5\tnan\n", r"tsv, line 1: invalid gate 'nan'"),
        ("0.5 1.0\n", r"tsv, line 1: invalid gate '0.5 1.0'.*tabs"),
        ("0.5\t1\t\n", r"tsv, line 1: invalid gate ''"),
        ("\n0.5\t1.2\n", r"tsv, line 2: invalid gate '1.2'; it must be a number from 0 to 1"),
        ("0.5\t-7\n", r"tsv, line 1: invalid gate '-7'"),
        ("0.5\t1\n0.5\n", r"tsv, line 2: 1 gates, but the first layer has 2; .* one per KV head"),
        ("# nothing\n", r"tsv is empty"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = write(tmp_path / "pattern")
    (folder / "full_attention_heads.tsv").write_text(text)
    with pytest.raises(HeadMapError, match=message):
        read_pattern(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n1", r"config\.json: invalid JSON: .* line 2"),
        ("[]", r"json: Input should be a valid dict"),
        ("{}", r"config\.json: sink_size: Field required"),
        ('{"sink_size": 1, "recent_size": -1}', r"recent_size: .* greater than or equal to 0"),
        ('{"sink_size": true, "recent_size": 1}', r"sink_size: .* valid integer"),
        (
            '{"sink_size": 1, "recent_size": 1, "sparsity": 2}',
            r"sparsity: .* less than or equal to 1",
        ),
        ('{"sink_size": 1, "recent_size": 1, "lr": NaN}', r"config\.json: invalid JSON"),
    ],
)
def test_a_wrong_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = write(tmp_path / "pattern")
    (folder / "config.json").write_text(text)
    with pytest.raises(HeadMapError, match=message):
        read_pattern(folder)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(HeadMapError, match="there is no folder"):
        read_pattern(tmp_path / "none")
    inner = write(tmp_path / "lr=0.02")
    with pytest.raises(HeadMapError, match=r"no full_attention_heads\.tsv; did you mean .*lr=0.02"):
        read_pattern(tmp_path)
    (inner / "config.json").unlink()
    with pytest.raises(HeadMapError, match=r"no config\.json; it needs one with sink_size"):
        read_pattern(inner)
    (inner / "full_attention_heads.tsv").write_bytes(b"\xff\xfe")
    with pytest.raises(HeadMapError, match="not text in UTF-8"):
        read_pattern(inner)


def test_a_pattern_for_another_model() -> None:
    pattern = Pattern(GATES, CONFIG, 0)
    with pytest.raises(HeadMapError, match="3 lines of gates, but 'm' has 1 layers"):
        head_map(pattern, "m", config_of(GATES[:1]))
    message = r"2 gates a line, but 'm' has 1 KV heads \(and 2 query heads\)"
    with pytest.raises(HeadMapError, match=message):
        head_map(pattern, "m", config_of(((0.0,),) * 3))


def tables(cells: Any) -> Any:
    return st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(cells, min_size=width, max_size=width).map(tuple), min_size=1, max_size=6
        ).map(tuple)
    )


def reimported(made: HeadMap, **rule: float) -> HeadMap:
    with tempfile.TemporaryDirectory() as folder:
        write_pattern(made, Path(folder) / "pattern")
        pattern = read_pattern(Path(folder) / "pattern")
    return head_map(pattern, made.model, config_of(pattern.gates, made.group), **rule)


# Few different gates, so that many are equal; and any at all.
@settings(deadline=None)
@given(
    tables(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))),
    st.sampled_from(["sparsity", "threshold"]),
    st.floats(0, 1),
)
def test_an_export_reads_back(gates: Scores, rule: str, value: float) -> None:
    made = make(rounded(gates), {**CONFIG, **TRAINING, "sink_size": 7}, **{rule: value})
    again = reimported(made)
    assert again.retrieval == made.retrieval
    assert again.kv_scores == made.kv_scores
    assert again.settings["sink_size"] == 7
    assert again.settings["training"] == made.settings["training"]


@settings(deadline=None)
@given(tables(st.booleans()), st.booleans(), st.floats(-2, 2), st.sampled_from(["razor", "duo"]))
def test_any_maps_decision_reads_back(
    retrieval: Flags, scored: bool, gate: float, method: str
) -> None:
    """Whatever decided, and whatever gates it claims to have."""
    made = HeadMap(
        model="m",
        fingerprint="sha256:0",
        method=method,
        settings={"training": "not ours"},
        query_heads=2 * len(retrieval[0]),
        retrieval=retrieval,
        selected={},
        scores={},
        kv_scores={KIND: ((gate,) * len(retrieval[0]),) * len(retrieval)} if scored else {},
    )
    assert reimported(made).retrieval == retrieval
    if not scored:
        assert reimported(made, threshold=0.5).retrieval == retrieval
        assert reimported(made).settings["sink_size"] == 128


def test_an_export_is_what_numpy_writes_and_reads(tmp_path: Path) -> None:
    assert write_pattern(make(), tmp_path / "ours")
    theirs = write(tmp_path / "theirs")
    name = "full_attention_heads.tsv"
    assert (tmp_path / "ours" / name).read_bytes() == (theirs / name).read_bytes()


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    # A model's folder has a config.json as well.
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadMapError, match=r"config\.json is there already; give a new folder"):
        write_pattern(make(), tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert not (tmp_path / "full_attention_heads.tsv").exists()
    with pytest.raises(HeadMapError, match="cannot write the pattern"):
        write_pattern(make(), tmp_path / "config.json" / "folder")
