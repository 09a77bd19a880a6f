"""The needle test's settings: the grid they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.config.errors import ConfigError
from razor_dist.config.sources import load_config
from razor_dist.evals.baselines.presses import BaselineConfig
from razor_dist.evals.needle.config import NeedleConfig, sigmoid
from razor_dist.evals.needle.documents import share_out
from razor_dist.evals.needle.presets import same_words, word_overlap
from razor_dist.heads.head_map import shipped_head_map

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_grid_is_spaced_as_needlehaystack_spaces_it() -> None:
    lengths = {"context_lengths_max": 16000, "context_lengths_num_intervals": 7}
    config = NeedleConfig(**lengths, document_depth_percent_intervals=4)
    # numpy.round(numpy.linspace(1000, 16000, 7)), and of (0, 100, 4)
    assert config.lengths(20_000) == (1000, 3500, 6000, 8500, 11000, 13500, 16000)
    assert config.depths == (0, 33, 67, 100)
    crowded = NeedleConfig(
        document_depth_percent_intervals=5, document_depth_percent_interval_type="sigmoid"
    )
    # What its `logistic` gives for these, in the other order.
    assert crowded.depths == (0, 7.586, 50, 92.414, 100)


def test_without_a_longest_length_the_models_is_taken() -> None:
    assert NeedleConfig(context_lengths_num_intervals=2).lengths(8192) == (1000, 8192)
    assert NeedleConfig(context_lengths_num_intervals=1).lengths(8192) == (1000,)


@pytest.mark.parametrize("given", ["8k,1K", ("8k", "1K"), (8000, 1024)])
def test_lengths_are_written_as_sizes_too(given: Any) -> None:
    assert NeedleConfig(context_lengths=given).lengths(8192) == (1024, 8000)
    ends = NeedleConfig(context_lengths_min="1K", context_lengths_max="8K")
    assert ends.lengths(2**20)[0] == 1024 and ends.lengths(2**20)[-1] == 8192


@given(st.floats(1, 99))
def test_sigmoid_spacing_is_symmetric(percent: float) -> None:
    assert sigmoid(percent) + sigmoid(100 - percent) == pytest.approx(100, abs=2e-3)


def test_duoattentions_grid_is_its_presets() -> None:
    config = NeedleConfig(preset="duoattention", context_lengths_max=14_000)
    assert config.depths == (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
    assert len(config.lengths(20_000)) == 13


@given(
    depths=st.lists(st.integers(0, 100), min_size=1, max_size=12, unique=True),
    needles=st.integers(1, 6),
    together=st.booleans(),
)
def test_every_depth_has_each_of_its_needles_once(
    depths: list[int], needles: int, together: bool
) -> None:
    documents = share_out(depths, needles, together=together)
    spots = [spot for document in documents for spot in document]
    assert sorted(spots) == sorted((depth, n) for depth in depths for n in range(needles))
    assert len(documents) == (1 if together else len(depths))
    if not together and needles <= len(depths):
        assert all(len({spot.depth for spot in document}) == needles for document in documents)


def test_engines_are_the_methods() -> None:
    config = NeedleConfig(
        methods=("full", "razor", "duo", "streaming"), head_map="r.json", duo_head_map="d.json"
    )
    engines = {method: config.engine(method, 4096) for method in config.methods}
    attention = [engine.attention for engine in engines.values()]
    assert attention == ["full", "razor", "razor", "streaming"]
    assert (engines["razor"].head_map, engines["duo"].head_map) == ("r.json", "d.json")
    assert all(engine.max_model_len == 4096 for engine in engines.values())


def test_methods_may_be_a_mapping_as_everywhere() -> None:
    """So that two head maps are compared in one run."""
    own = {
        "mine": {"head_map": "m.json", "window_min": 300},
        "shipped": {"head_map": "smollm2-duo"},
        "aware": {"press": "snapkv-query-aware"},
    }
    config = NeedleConfig(methods=own, head_map="r.json", context_lengths=2000, haystack="noise")
    mine, shipped, aware = (config.engine(name, 4096) for name in own)
    assert (mine.attention, mine.head_map, mine.window_min) == ("razor", "m.json", 300)
    assert shipped.head_map == str(shipped_head_map("smollm2-duo"))
    assert isinstance(aware, BaselineConfig) and config.presses == ["snapkv-query-aware"]
    names = NeedleConfig(methods=("m.json", "razor/32", "no-compensation"))
    named = NeedleConfig(methods="razor", head_map="smollm2-duo").engine("razor", 4096)
    assert named.head_map == shipped.head_map
    engines = [names.engine(name, 4096) for name in names.method_settings]
    assert [engine.head_map for engine in engines] == ["m.json", None, None]
    assert [engine.retrieval_share for engine in engines] == [0, 1 / 32, 0]
    assert [engine.compensation for engine in engines] == [True, True, False]


def test_what_razor_is_compared_with_reads_all_blocks() -> None:
    methods = ("full", "razor", "duo", "streaming", "snapkv")
    config = NeedleConfig(methods=methods, duo_head_map="d.json", retrieval_share="1/32")
    shares = [config.engine(method, 4096).retrieval_share for method in methods]
    assert shares == [0, 1 / 32, 1 / 32, 0, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "nubmer"}, "preset must be one of number, duoattention, razorattention, words"),
        ({"methods": "full,h3o"}, "unknown method 'h3o'; give full, razor, streaming, no-comp"),
        ({"methods": {"a": {"press": "h3o"}}}, "methods: a: press must be one of h2o, snapkv"),
        ({"methods": {"a": {"percent": 5}}}, "methods: a: percent is not an engine setting; it is"),
        ({"methods": {"full": None}}, "a list of names or a mapping of names to settings, got"),
        (
            {"methods": "h2o/32"},
            "methods: h2o/32: retrieval_share is 1/32, but the method h2o runs on transformers'",
        ),
        (
            {"methods": {"a": {"head_map": "a.json"}}, "head_map": "r.json"},
            "head_map is for the method razor, but methods are ['a']",
        ),
        ({"methods": "full,full"}, "methods must be a list without repeats"),
        ({"methods": ()}, "methods must be a list without repeats"),
        ({"methods": "duo"}, "needs duo_head_map"),
        ({"methods": "razor,duo/32", "head_map": "r.json"}, "method duo/32 needs duo_head_map"),
        ({"duo_head_map": "d.json"}, "duo_head_map is for the method duo"),
        ({"document_depth_percent_min": -5}, "document_depth_percent_min must be at least 0"),
        ({"document_depth_percents": "-5,50"}, "depth_percents must be a percentage from 0"),
        ({"document_depth_percents": "5,x"}, "must be a list of numbers or none, got 'x'"),
        ({"document_depth_percents": [True]}, "must be a list of numbers or none"),
        (
            {"document_depth_percent_min": 60, "document_depth_percent_max": 40},
            "document_depth_percent_min is 60, above document_depth_percent_max, 40",
        ),
        ({"attention": "full"}, "attention is what methods differ in: set methods"),
        ({"methods": "full", "head_map": "r.json"}, "head_map is for the method razor"),
        ({"context_lengths": "1000,0"}, "context_lengths must be at least 1 each"),
        ({"context_lengths": "1.5"}, "must be a list of integers such as 8192 or 8K or none"),
        (
            {"context_lengths": "1000", "context_lengths_max": 2000},
            "give either context_lengths or context_lengths_max",
        ),
        (
            {"document_depth_percents": [1], "document_depth_percent_intervals": 3},
            "give either document_depth_percents or document_depth_percent_intervals",
        ),
        ({"preset": "words", "query": "middle"}, "preset words asks only after the document"),
        ({"preset": "words", "haystack": "noise"}, "haystack is of no use"),
        ({"preset": "duoattention", "needles": 2}, "can hide 1 in a document, not 2"),
        ({"needles": 5, "share_depths": True}, "can hide 20 in a document, not 25"),
        ({"max_num_seqs": 1}, "max_num_seqs must be at least 2"),
        ({"needels": 2}, "did you mean 'needles'"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NeedleConfig(**values)
    assert message in str(caught.value)


def test_lengths_beyond_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="context_lengths is 9000, but smollm2 holds 8192"):
        NeedleConfig(context_lengths=[1000, 9000]).lengths(8192)
    with pytest.raises(ConfigError, match="context_lengths_max is 9000"):
        NeedleConfig(context_lengths_max=9000).lengths(8192)
    with pytest.raises(ConfigError, match="context_lengths_min is 1000, above the longest, 512"):
        NeedleConfig().lengths(512)


def test_the_shipped_files_are_settings() -> None:
    files = {path.stem: load_config(NeedleConfig, {}, {}, path) for path in CONFIGS.glob("n*.yaml")}
    assert files.keys() == {"needle_1m", "needle_256k", "needle_smollm2"}
    million = files["needle_1m"]
    assert million.lengths(2**20)[-1] == 2**20
    assert million.world_size == files["needle_256k"].world_size == 8
    small = files["needle_smollm2"]
    assert (small.engines, small.world_size, small.window_min) == (2, 2, 512)
    assert (small.lengths(8192)[0], small.lengths(8192)[-1]) == (1024, 8192)
    assert (len(small.lengths(8192)), len(small.depths), small.needles) == (6, 5, 3)


def test_scores() -> None:
    right = "eat a sandwich and sit in Dolores Park on a sunny day."
    assert word_overlap(right, right) == 11 / 12  # "a" is one word, and counts as two
    assert word_overlap("sit in Dolores Park", right) == 4 / 12
    assert word_overlap("", right) == 0
    assert (same_words(" one  two ", "one two"), same_words("one two three", "one two")) == (1, 0)
