"""Loops at the end of answers: found wherever there are any, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razor_dist.config.errors import RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.protocol.messages import HEADER_SIZE, Progress, Token, decoder, encode
from razor_dist.protocol.repetition import LOOPS, RepetitionDetectionParams
from razor_dist.protocol.sampling_params import SamplingParams, request_defaults
from tests.engine.cores import make_core, prompt, run
from tests.tokenizer import smollm2_tokenizer


def ends_in_loop(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """The definition, written down literally."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = max(size * params.min_count, params.min_length)
        end = tokens[-length:]
        if len(end) == length and all(end[i] == end[i - size] for i in range(size, length)):
            return True
    return False


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.builds(
        RepetitionDetectionParams,
        max_pattern_size=st.integers(3, 12),
        min_pattern_size=st.integers(0, 3),
        min_count=st.integers(2, 5),
        min_length=st.integers(0, 20),
    ),
)
def test_it_finds_what_the_definition_says(
    tokens: list[int], params: RepetitionDetectionParams
) -> None:
    first = next((n for n in range(1, 81) if ends_in_loop(tokens[:n], params)), None)
    assert params.first_loop(tokens) == (first if first and first <= len(tokens) else None)


@settings(deadline=None, max_examples=100)
@given(period=st.integers(1, 200), before=st.integers(0, 700), seed=st.integers(0, 2**32))
def test_every_period_up_to_200_is_found(period: int, before: int, seed: int) -> None:
    # Different tokens, so that no shorter period is there; and a lead of others.
    pattern = [seed % 1000 + n for n in range(period)]
    tokens = [*range(10_000, 10_000 + before), *pattern * (256 // period + 5)]
    assert LOOPS.first_loop(tokens) == before + max(4 * period, 256)
    assert LOOPS.once(tokens) == before + period


def test_a_period_of_201_is_none() -> None:
    tokens = [*range(201)] * 20
    assert LOOPS.first_loop(tokens) is None and LOOPS.once(tokens) == len(tokens)


CHORUS = "Row, row, row your boat, gently down the stream.\nMerrily, merrily, merrily, merrily,\n"
LAWFUL = {
    "list": "".join(f"{n}. Item number {n}\n" for n in range(1, 300)),
    "bullets": "".join(f"- a point about {w}\n" for w in ("cats", "dogs", "birds") * 3),
    "table": "| a | b | c |\n"
    + "|---|---|---|\n"
    + "".join(f"| {n} | yes | no |\n" for n in range(99)),
    "wide table": "|" + "---|" * 30 + "\n" + ("| x " * 30 + "|\n") * 1,
    "verse": (CHORUS + "Life is but a dream.\n\n") * 3,
    "refrain": "".join(f"Verse {n} goes its way.\n{CHORUS}" for n in range(12)),
    "numbers": ", ".join(map(str, range(600))),
    "multiples": "".join(f"7 x {n} = {7 * n}\n" for n in range(150)),
    "matrix": "\n".join(
        "[" + ", ".join("1" if i == j else "0" for j in range(12)) + "]" for i in range(12)
    ),
    "code": "".join(f"    if x == {n}:\n        return {n * n}\n" for n in range(60)),
    "rule": "=" * 200 + "\n" + "-" * 200,
    "asked for ten times": "I will not talk in class.\n" * 10,
    "asked for thirty times": "I will not talk in class.\n" * 30,
    "thirds": "1 / 3 = 0." + "3" * 200,
    "laughter": "ha" * 100,
}


@pytest.mark.parametrize("kind", LAWFUL)
def test_lawful_repetition_is_not_cut(kind: str) -> None:
    tokens = smollm2_tokenizer()(LAWFUL[kind])["input_ids"]
    assert LOOPS.first_loop(tokens) is None, len(tokens)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (7, "repetition_detection must be an object, got 7"),
        ({"max_pattern": 7}, "no field 'max_pattern'; did you mean 'max_pattern_size'?"),
        (
            {"max_pattern_size": -1},
            r"^repetition_detection.max_pattern_size must be at least 0, got -1",
        ),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count must be at least 2, got 1"),
        ({"max_pattern_size": 4, "min_pattern_size": 5}, r"\(5\) must be at most max_pattern_size"),
        ({"max_pattern_size": True}, "max_pattern_size must be an integer"),
    ],
)
def test_wrong_parameters_are_named(value: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as error:
        SamplingParams(repetition_detection=value)
    assert error.value.param == "repetition_detection"


def test_parameters_travel() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 9, "min_length": 30})
    assert decoder(SamplingParams)(encode(params)[HEADER_SIZE:]) == params


@pytest.mark.parametrize(
    ("model", "setting", "on"),
    [
        ("smollm2", "auto", True),
        ("other", "auto", False),
        ("other", "on", True),
        ("smollm2", "off", False),
    ],
)
def test_it_is_on_for_the_embedded_model_or_by_the_setting(
    model: str, setting: Any, on: bool, tmp_path: Path
) -> None:
    config = EngineConfig(model=model, repetition_detection=setting)
    assert request_defaults(tmp_path, config) == ({"repetition_detection": LOOPS} if on else {})


# A bias that leaves one token: a model that says nothing else.
STUCK = {"logit_bias": {9: 100.0}, "temperature": 0.0, "ignore_eos": True}
SIX = {"max_pattern_size": 4, "min_count": 3, "min_length": 6}


def ends(messages: list[Any]) -> tuple[int, str | None]:
    tokens = [message for message in messages if isinstance(message, Token)]
    assert all(message.finish is None for message in tokens[:-1])
    return len(tokens), tokens[-1].finish


def test_the_engine_ends_a_loop_and_frees_its_caches(tiny: Callable[[str], Path]) -> None:
    core = make_core(tiny("llama"))
    plain = SamplingParams(max_tokens=40, **STUCK)
    watched = SamplingParams(max_tokens=40, **STUCK, repetition_detection=SIX)
    late = SamplingParams(max_tokens=40, min_tokens=15, **STUCK, repetition_detection=SIX)
    two = SamplingParams(max_tokens=40, n=2, **STUCK, repetition_detection=SIX)
    short = SamplingParams(max_tokens=6, **STUCK, repetition_detection=SIX)
    off = SamplingParams(max_tokens=40, **STUCK, repetition_detection={"max_pattern_size": 0})
    for name, params in {
        "plain": plain, "watched": watched, "late": late, "two": two, "short": short, "off": off
    }.items():  # fmt: skip
        core.add(name, prompt(20), params)
    messages = run(core)
    assert {name: ends(found) for name, found in messages.items()} == {
        "plain": (40, "length"),
        "watched": (6, "repetition"),
        "late": (15, "repetition"),
        "two": (6, "repetition"),
        "two/1": (6, "repetition"),
        "short": (6, "repetition"),
        "off": (40, "length"),
    }
    assert core.runner.sequences.kv_bytes == 0


def test_what_is_decoded_up_to_the_end_is_the_same(tiny: Callable[[str], Path]) -> None:
    core = make_core(tiny("llama"))
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
    core.add("plain", prompt(20), SamplingParams(**greedy))
    core.add("watched", prompt(20), SamplingParams(**greedy, repetition_detection=SIX))
    found = run(core)
    plain, watched = ([m.token for m in found[k] if isinstance(m, Token)] for k in found)
    assert watched == plain[: len(watched)]
    at = RepetitionDetectionParams(**SIX).first_loop(plain)
    assert len(watched) == (at or 60)


def test_the_prefix_cache_has_what_an_ended_loop_read(tiny: Callable[[str], Path]) -> None:
    core = make_core(tiny("llama"), prefix_cache=True)
    watched = SamplingParams(max_tokens=40, **STUCK, repetition_detection=SIX)
    core.add("first", prompt(60), watched)
    assert ends(run(core)["first"]) == (6, "repetition")
    core.add("next", [*prompt(60), *[9] * 6, 11, 12], SamplingParams(max_tokens=2))
    progress = [m for m in run(core)["next"] if isinstance(m, Progress)]
    assert progress[0].cached == 65  # the last token was sampled and not read
