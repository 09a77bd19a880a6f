"""Head maps: what is decided from scores, what is written, what is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig
from razor_dist.heads.decision import Scores, decide, rounded
from razor_dist.heads.head_map import (
    HeadMap,
    Verification,
    default_head_map,
    head_map_of,
    shipped_head_map,
)
from razor_dist.models.shape import ModelShape

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, head_dim=8, vocab_size=32, max_positions=64)
INDUCTION: Scores = ((0.1, 0.2, 0.3, 0.4), (0.9, 0.1, 0.1, 0.1), (0.4, 0.0, 0.0, 0.0))
ECHO: Scores = ((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.5))
SCORES = {"induction": INDUCTION, "echo": ECHO}


def make() -> HeadMap:
    decision = decide(SCORES, 16.7, 1, group=2)
    return HeadMap(
        model="tiny",
        fingerprint="sha256:0",
        method="razor",
        settings={"seed": 0, "induction_percent": 16.7},
        query_heads=4,
        retrieval=decision.retrieval,
        selected=decision.selected,
        scores=SCORES,
    )


def test_decide_promotes_groups() -> None:
    decision = decide(SCORES, 25, 1, group=2)
    # 3 of 12 by induction; the tie of (0, 3) and (2, 0) is not broken here: both are in.
    assert decision.selected == {"induction": ((1, 0), (0, 3), (2, 0)), "echo": ((2, 3),)}
    assert decision.retrieval == ((False, True), (True, False), (True, True))


def test_ties_break_by_layer_then_head() -> None:
    assert decide(SCORES, 16.7, 0, group=2).selected["induction"] == ((1, 0), (0, 3))
    assert decide(SCORES, 0, 16.7, group=2).selected["echo"] == ((2, 3), (0, 0))


@pytest.mark.parametrize(
    ("percent", "count"), [(0, 0), (0.001, 1), (4, 1), (12.5, 2), (12.4, 1), (20.8, 2), (100, 12)]
)
def test_number_is_rounded_half_up(percent: float, count: int) -> None:
    assert len(decide(SCORES, percent, 0, group=2).selected["induction"]) == count


@pytest.mark.parametrize(("induction", "echo"), [(-1, 1), (14, 101), (float("nan"), 1)])
def test_percentages_out_of_range(induction: float, echo: float) -> None:
    with pytest.raises(ConfigError, match="must be a percentage from 0 to 100"):
        decide(SCORES, induction, echo, group=2)


def test_fractions() -> None:
    head_map = make()
    assert head_map.selected_fraction == 3 / 12
    assert head_map.kv_fraction == 3 / 6  # more than was selected: group mates come along


def test_full_and_streaming() -> None:
    assert HeadMap.uniform("full", SHAPE).retrieval == ((True, True),) * 3
    assert HeadMap.uniform("streaming", SHAPE).kv_fraction == 0.0
    HeadMap.uniform("full", SHAPE).validate(SHAPE, "sha256:whatever")


VERIFIED = Verification(
    documents=5,
    tokens=2500,
    haystack="essays",
    haystack_fingerprint="0",
    seed=0,
    dtype="float32",
    settings={"prefill": "local", "window_min": 512, "window_max": None},
    found_full=5,
    found=4,
    lost=1,
    gained=0,
    kv_bytes_full=100 << 20,
    kv_bytes=43 << 20,
)


def test_a_verification_is_kept_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    make().save(path)
    assert "verification" not in path.read_text()  # as in files from before there were any
    assert HeadMap.load(path).verification is None
    checked = dataclasses.replace(make(), verification=VERIFIED)
    checked.save(path)
    assert HeadMap.load(path) == checked
    assert str(VERIFIED).splitlines() == [
        "5 documents of 2500 tokens (essays), local prefill, window of at least 512: "
        "full attention finds 5, this map 4; 1 lost, 0 gained",
        "KV of a document: 43.0 MiB instead of 100.0 (43%)",
    ]
    path.write_text(path.read_text().replace('"lost": 1', '"lost": "one"'))
    with pytest.raises(HeadMapError, match=r"verification\.lost"):
        HeadMap.load(path)


def test_round_trip_is_stable_and_readable(tmp_path: Path) -> None:
    path, again = tmp_path / "map.json", tmp_path / "again.json"
    make().save(path)
    assert HeadMap.load(path) == make()
    HeadMap.load(path).save(again)
    assert again.read_bytes() == path.read_bytes()
    assert "    [false, true],\n" in path.read_text()  # one layer a line
    HeadMap.uniform("full", SHAPE).save(path)
    assert HeadMap.load(path) == HeadMap.uniform("full", SHAPE)


def test_scores_of_kv_heads(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    gates: Scores = ((0.0, 1.0), (0.5, 0.25), (1.0, 1.0))
    scored = dataclasses.replace(make(), kv_scores={"gate": gates})
    scored.save(path)
    assert HeadMap.load(path) == scored
    assert "      [0.5, 0.25],\n" in path.read_text()  # one layer a line
    # A file from before there were any has no such field, and neither has one without them.
    make().save(path)
    assert "kv_scores" not in path.read_text()
    assert HeadMap.load(path).kv_scores == {}
    shipped = shipped_head_map("smollm2")
    HeadMap.load(shipped).save(path)
    assert path.read_bytes() == shipped.read_bytes()


def test_rounded_keeps_six_significant_digits() -> None:
    assert rounded([[0.12345678, 0.000012345678]]) == ((0.123457, 1.23457e-05),)


def _edited(field: str, value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(make())))
    *parents, last = field.split(".")
    place = fields
    for parent in parents:
        place = place[parent]
    place[last] = value
    return fields


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_version", 2, "format_version is 2, but this release reads 1"),
        ("unknown", 1, "unknown"),
        ("model", 3, "model: .*string"),
        ("retrieval", [], "retrieval"),
        ("retrieval", [[1, 0]], r"retrieval\.0\.0: .*boolean"),
        ("retrieval", [[True, False], [True]], "retrieval: every layer needs 2 KV heads"),
        ("query_heads", 5, "query_heads: 5 is not a multiple of the 2 KV heads"),
        ("scores.echo", [[0.1] * 4], r"scores\.echo: needs 3 layers of 4 query heads"),
        ("scores.echo", [["x"]], r"scores\.echo\.0\.0: .*number"),
        ("kv_scores", {"gate": [[0.1] * 4] * 3}, r"kv_scores\.gate: needs 3 layers of 2 KV heads"),
        ("kv_scores", {"gate": [[0.1, "x"]]}, r"kv_scores\.gate\.0\.1: .*number"),
        ("kv_scores", {"echo": [[0.1] * 2] * 3}, r"kv_scores\.echo: scores has this kind too"),
        ("selected.echo", [[3, 0]], r"selected\.echo: there is no layer 3, head 0"),
    ],
)
def test_malformed_field_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(_edited(field, value)))
    with pytest.raises(HeadMapError, match=message):
        HeadMap.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1}', "\xff"])
def test_not_a_head_map(tmp_path: Path, text: str) -> None:
    path = tmp_path / "map.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(HeadMapError, match=r"map\.json"):
        HeadMap.load(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(HeadMapError, match="cannot read the head map"):
        HeadMap.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write"):
        make().save(tmp_path / "no" / "folder.json")


def test_a_full_disk_leaves_the_old_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make().save("~/map.json")

    def torn(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(ConfigError, match=r"cannot write .*/map\.json: No space left"):
        make().save("~/map.json")
    assert HeadMap.load("~/map.json") == make()
    assert [path.name for path in tmp_path.iterdir()] == ["map.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 4}, "has 3 layers, but the model has 4"),
        ({"query_heads": 8}, "has 4 query heads, but the model has 8"),
        ({"kv_heads": 4}, "has 2 KV heads, but the model has 4"),
    ],
)
def test_map_for_another_shape(change: dict[str, int], message: str) -> None:
    make().validate(SHAPE, "sha256:0")
    with pytest.raises(HeadMapError, match=message):
        make().validate(dataclasses.replace(SHAPE, **change), "sha256:0")


def test_map_for_another_configuration() -> None:
    with pytest.raises(HeadMapError, match=r"made for 'tiny' \(fingerprint sha256:0\).*sha256:1"):
        make().validate(SHAPE, "sha256:1")


def test_shipped_maps() -> None:
    assert HeadMap.load(shipped_head_map("smollm2")).model == "smollm2"
    with pytest.raises(HeadMapError, match="razor-dist identify razor org/name --out"):
        shipped_head_map("org/name")


def test_a_model_folder_brings_its_own_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "smollm2"):
        (tmp_path / name).mkdir()
        make().save(tmp_path / name / "head_map.json")
    assert default_head_map("./mine").resolve() == tmp_path / "mine" / "head_map.json"
    assert default_head_map("smollm2") == shipped_head_map("smollm2"), "the embedded model"
    with pytest.raises(HeadMapError, match="razor-dist identify razor /nope --out"):
        default_head_map("/nope")
    config = EngineConfig(model="./mine")
    assert head_map_of(config, SHAPE, "sha256:0") == make(), "an engine takes it"
