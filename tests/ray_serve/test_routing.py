"""Tests of the choice of a request's engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from razor_dist.ray_serve.routing import (
    ANSWER_BYTES,
    BLOCK_BYTES,
    EngineTable,
    Route,
    engine_tag,
    route_of,
)

ENGINES = {"a": "replica-a", "b": "replica-b"}
DEPTHS = range(500, 1100)
TEXT = "".join(f"Sentence {i} of the report. " for i in range(2000))


def route(text: str = "", **fields: Any) -> Route:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return route_of(json.dumps(body).encode(), "key")


def test_questions_about_a_text_share_all_blocks_before_them() -> None:
    one, two = route(TEXT + "Who wrote it?"), route(TEXT + "When?", max_tokens=5, stream=True)
    shared = sum(a == b for a, b in zip(one.blocks, two.blocks, strict=False))
    assert shared >= len(TEXT) // BLOCK_BYTES
    assert one.length - BLOCK_BYTES < len(one.blocks) * BLOCK_BYTES <= one.length


@pytest.mark.parametrize("salt", ["x", 7])
def test_nothing_is_shared_where_the_prefix_cache_shares_nothing(salt: object) -> None:
    body = json.dumps({"prompt": TEXT}).encode()
    salted = json.dumps({"prompt": TEXT, "cache_salt": salt}).encode()
    mine = set(route_of(body, "key").blocks)
    assert not mine & set(route_of(body, "another").blocks)
    assert not mine & set(route_of(salted, "key").blocks)
    assert mine == set(route_of(body, "key").blocks)


@pytest.mark.parametrize(
    "fields",
    [
        {"system": TEXT, "messages": []},
        {"instructions": TEXT, "input": "Who?"},
        {"prompt": list(range(5000))},
        {"prompt": [TEXT, "b"]},
    ],
)
def test_prompts_of_every_endpoint_are_seen(fields: dict[str, Any]) -> None:
    found = route_of(json.dumps(fields).encode(), "")
    assert len(found.blocks) >= 20
    assert found == route_of(json.dumps(fields | {"max_tokens": 3}).encode(), "")


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff", b"{", b"[" * 100_000])
def test_what_is_no_request_has_no_route(body: bytes) -> None:
    assert route_of(body, "") == Route()


def test_what_nests_as_deep_as_json_goes_is_the_engines_to_refuse() -> None:
    found = [route_of(b'{"prompt": ' + b"[" * deep + b"]" * deep + b"}", "") for deep in DEPTHS]
    lengths = [one.length for one in found]
    assert lengths[0] == 2 * DEPTHS[0] and lengths[-1] == 0
    assert lengths == sorted(lengths[: lengths.index(0)]) + [0] * lengths.count(0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 12))))
def test_what_is_unread_is_what_no_prompt_of_the_engine_has_begun_with(
    placed: list[tuple[str, int, int]],
) -> None:
    table: EngineTable[str] = EngineTable()
    texts = [[f"{which} {block}".encode() for block in range(12)] for which in range(3)]
    longest = dict.fromkeys([(engine, which) for engine in "ab" for which in range(3)], 0)
    for number, (engine, which, blocks) in enumerate(placed):
        table.place(engine, str(number), Route(blocks * BLOCK_BYTES, tuple(texts[which][:blocks])))
        longest[engine, which] = max(longest[engine, which], blocks)
    for (engine, which), read in longest.items():
        asked = Route(12 * BLOCK_BYTES + 5, tuple(texts[which]))
        assert table.unread(engine, asked) == (12 - read) * BLOCK_BYTES + 5
    for number in range(len(placed)):
        table.end(str(number))
    assert not table._placed


def test_new_texts_are_dealt_and_their_questions_follow_them() -> None:
    table: EngineTable[str] = EngineTable()
    homes = []
    for number in range(4):
        first = route(f"{number} {TEXT}")
        home = table.order(ENGINES, first)[0]
        table.place(home, f"first {number}", first)
        table.end(f"first {number}")
        homes.append(home)
    assert sorted(homes) == ["a", "a", "b", "b"]
    for question in range(10):
        for number, home in enumerate(homes):
            asked = route(f"{number} {TEXT} Question {question}?")
            assert table.order(ENGINES, asked)[0] == home


def test_a_text_is_read_again_where_waiting_would_take_longer() -> None:
    table: EngineTable[str] = EngineTable()
    asked = route(TEXT)
    table.place("a", "0", asked)
    table.end("0")
    waiting = 0
    while table.order(ENGINES, asked)[0] == "a":
        waiting += 1
        table.place("a", str(waiting), asked)
    rest = asked.length % BLOCK_BYTES
    assert waiting == -(-2 * (asked.length - rest) // (rest + ANSWER_BYTES))
    table.end("1")
    assert table.order(ENGINES, asked)[0] == "a"


def test_a_prompt_whose_answer_has_begun_is_no_longer_waited_for() -> None:
    table: EngineTable[str] = EngineTable()
    long, short = route(TEXT * 10), route(TEXT)
    table.place("a", "0", short)
    table.end("0")
    table.place("a", "long", long)
    assert table.order(ENGINES, short)[0] == "b"
    long.is_read = True
    assert table.order(ENGINES, short)[0] == "a"


def test_a_context_is_asked_where_it_is_and_a_lost_engine_is_asked_last() -> None:
    table: EngineTable[str] = EngineTable()
    tags = {name: f"ctx_{engine_tag(replica)}{'0' * 24}" for name, replica in ENGINES.items()}
    for name, context in tags.items():
        assert table.order(ENGINES, route("Who?", context=context))[0] == name
    holder = route("Who?", context=tags["b"]).holder
    assert table.order(ENGINES, Route(holder=holder, avoid={"replica-b": True})) == ["a", "b"]
    assert len(table.order(ENGINES, route("Who?", context="ctx_gone"))) == 2


def test_what_a_lost_engine_has_read_is_forgotten() -> None:
    table: EngineTable[str] = EngineTable()
    asked = route(TEXT)
    table.place("a", "0", asked)
    table.update(["b"])
    assert table.unread("a", asked) == asked.length
    table.end("0")  # its request ends after it
    table.place("b", "1", asked)
    assert table.unread("b", asked) < BLOCK_BYTES
