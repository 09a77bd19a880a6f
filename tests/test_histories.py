"""Random histories: whatever happens to a server, each answer is that of a fresh engine alone.

Requests of every kind come, are aborted and end, in engines that share ranks and a prefix store.
Nothing hangs, every step's accounts are the ranks', and in the end everything is free again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from razor_dist.protocol.sampling_params import SamplingParams
from tests.histories import END, Abort, Ask, History, Look, Restart, Steps, Tokens, play
from tests.prefix.engines import ids
from tests.ranks import Ranks
from tests.tiny_models import Tiny
from tests.tokenizer import copy_with_letters

# More by HISTORIES=1000, for a search of hours.
COUNT = int(os.environ.get("HISTORIES", "48"))
WORLDS, FAMILIES = (1, 2, 4), ("letters", "letters", "bloom", "qwen2")
if COUNT > 100:
    WORLDS, FAMILIES = (1, 2, 3, 4), (*FAMILIES, "phi3", "glm", "mistral", "mixtral", "qwen3")


@st.composite
def params_of(draw: st.DrawFn, *, letters: bool, by_priority: bool) -> SamplingParams:
    rarely = st.integers(0, 5).map(lambda n: n == 5)
    values: dict[str, Any] = {
        "max_tokens": draw(st.sampled_from([1, 2, 6, 30, 60])),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.8, 1.5])),
        "ignore_eos": draw(st.booleans()),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "seed": draw(st.integers(0, 3)),
        "logprobs": draw(st.sampled_from([0, 2])),
    }
    if draw(rarely):
        values["prompt_logprobs"] = draw(st.sampled_from([0, 1]))
    if draw(rarely):
        values |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    if draw(rarely):
        values |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 3.0, 9: -5.0}}
    if draw(rarely):
        values["return_sources"] = 2
    if draw(rarely):
        values["repetition_detection"] = {"max_pattern_size": 3, "min_count": 2}
    if draw(rarely):
        values["stop_token_ids"] = list(range(4, 30))
    if letters and draw(rarely):
        values["structured_outputs"] = {"regex": "(ab|c[0-9]){3,9}!"}
    elif draw(rarely):
        values["min_tokens"] = min(4, values["max_tokens"])
    if by_priority:
        values["priority"] = draw(st.sampled_from([-1, 0, 1]))
    return SamplingParams(**values)


@st.composite
def texts(draw: st.DrawFn) -> Tokens:
    """Beginnings that others share, repeated parts, and ends of messages."""
    first = (draw(st.integers(0, 1)), draw(st.sampled_from([110, 70, 30, 5])))
    more = st.tuples(st.integers(2, 4), st.integers(1, 40))
    found = list(ids(first, *draw(st.lists(more, max_size=3))))
    if draw(st.booleans()):
        found += found[-draw(st.integers(1, 20)) :]
    if len(found) > 40 and draw(st.integers(0, 3)) == 0:
        found[draw(st.sampled_from([29, 34, 40]))] = END
    return tuple(found[:260])


@st.composite
def asks(draw: st.DrawFn, *, letters: bool, by_priority: bool) -> Ask:
    params = draw(params_of(letters=letters, by_priority=by_priority))
    pin = draw(st.integers(0, 6)) == 6
    if pin:
        params = SamplingParams()
    return Ask(
        draw(texts()),
        params,
        salt=draw(st.sampled_from([None, None, None, "s"])),
        prefix=draw(st.sampled_from([None, 0, 1])),
        pin=pin,
        quota=draw(st.sampled_from([None, 10**9, 40_000])) if pin else None,
        cut=draw(st.sampled_from([None, None, None, 1, 4])),
        cache_prompt=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    family = draw(st.sampled_from(FAMILIES))
    exact = draw(st.integers(0, 7)) == 7
    heads = draw(st.sampled_from([None, None, True, False]))
    common: dict[str, Any] = {
        "max_model_len": 400,
        "window_min": draw(st.sampled_from([12, 3, 40])),
        "window_ratio": draw(st.sampled_from([5, 3, None])),
        "block": draw(st.sampled_from([4, 1, 8])),
        "sink_tokens": draw(st.sampled_from([4, 0])),
        "compensation": draw(st.sampled_from([True, True, False])),
        "prefill": "exact" if exact else "local",
        "kv_dtype": draw(st.sampled_from(["auto", "auto", "auto", "int8", "int4"])),
    }
    windows = heads is not True and draw(st.sampled_from([False, False, True]))
    if family != "bloom" and heads is not False and common["kv_dtype"] != "int4":
        # Of the first all blocks are chosen, of the second none: no rounding decides.
        common["retrieval_share"] = draw(st.sampled_from([0.0, 0.0, 1e-30, 0.99]))
    engines = []
    by_priority = draw(st.booleans())
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        tier = "none" if exact else draw(st.sampled_from(["none", "none", "host", "disk", "both"]))
        given: dict[str, Any] = {
            "page_size": draw(st.sampled_from([4, 1, 16])),
            "chunked_prefill_size": draw(st.sampled_from([32, 8, 100])),
            "kv_tokens": draw(st.sampled_from([250, 600, 2000] if tier == "none" else [250])),
            "prefix_tail_tokens": draw(st.sampled_from([24, 0, 8])),
            "prefix_cache": not exact and (tier != "none" or draw(st.sampled_from([True, False]))),
            "max_num_seqs": draw(st.sampled_from([4, 3, 6])),
            "scheduling_policy": "priority" if by_priority else "time",
            "max_step_ms": draw(st.sampled_from([1e6, 1e-3, 5.0])),
            "cuda_graphs": draw(st.booleans()),
            "decode": draw(st.sampled_from(["replicated", "tensor"])),
            "prefix_host_gb": draw(st.sampled_from([1.0, 2e-4])) if tier in ("host", "both") else 0,
        }
        if tier in ("disk", "both"):
            given["prefix_store_gb"] = draw(st.sampled_from([1.0, 2e-4]))
        if draw(st.booleans()):
            given["speculative_config"] = {
                "method": draw(st.sampled_from(["lookup", "ngram"])),
                "prompt_lookup_min": draw(st.sampled_from([1, 2])),
            }
        engines.append(given)
    action = st.one_of(
        asks(letters=family == "letters", by_priority=by_priority),
        asks(letters=family == "letters", by_priority=by_priority),
        st.builds(Steps, st.sampled_from([1, 2, 5, 30])),
        st.builds(Steps, st.sampled_from([1, 2, 5, 30])),
        st.builds(Abort, st.integers(0, 9)),
        st.just(Restart()) if draw(st.booleans()) else st.builds(Steps, st.just(100)),
        st.just(Look()),
    )
    actions = draw(st.lists(st.tuples(st.integers(0, 1), action), min_size=8, max_size=30))
    return History(
        draw(st.sampled_from(WORLDS)),
        family,
        heads,
        windows,
        common,
        tuple(engines),
        tuple(actions),
    )


@pytest.mark.long
@pytest.mark.parametrize("count", [COUNT, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_history_is_answered_as_by_fresh_engines(
    count: int,
    ranks: Ranks,
    tiny: Tiny,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = {
        "bloom": tiny("bloom"),
        "letters": copy_with_letters(tiny("llama"), tmp_path_factory.mktemp("letters") / "llama"),
    }

    happened: Counter[str] = Counter()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(history=histories())
    def check(history: History) -> None:
        path = made.get(history.family) or tiny(history.family)
        store = tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp())
        try:
            played = ranks(history.world).run(play, str(path), history, store, timeout=150)
        finally:
            shutil.rmtree(store, ignore_errors=True)
        problem, found = played[0]
        assert problem is None, problem
        happened.update(found)

    check()
    print(dict(happened))
    rare = ("accepted", "refused", "evictions") if count > 100 else ()
    assert all(happened[what] for what in ("hits", "aborted", "pinned", *rare)), happened
