"""Contexts over HTTP: the same answers as with the text, for one key, for a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.marked import DOCUMENT, MARK, part, user
from tests.server.process import ServerProcess, wait_until

FACT = "The door of the house is red."
KEYS = {"a": "key-a", "b": "key-b"}


@contextmanager
def serving(world_size: int, *more: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "razor_dist", "serve", "--world-size", str(world_size)]
    command += ["--max-model-len", "2048", "--api-key", ",".join(KEYS.values())]
    command += ["--pinned-gb", "0.04", "--max-num-seqs", "8", "--threads", "1", *more]
    with ServerProcess(*command) as server:
        server.url(timeout=180)
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(2) as server:
        yield server


def call(
    server: ServerProcess, path: str, body: Any = None, key: str = "a", method: str = ""
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    method = method or ("GET" if body is None else "POST")
    return httpx.request(method, server.url() + path, json=body, headers=headers, timeout=120)


def chat(server: ServerProcess, key: str = "a", **body: Any) -> Any:
    own = {"model": "smollm2", "temperature": 0, "max_tokens": 8, **body}
    answer = call(server, "/v1/chat/completions", own, key)
    return answer.json() if answer.status_code == 200 else answer


def said(answer: Any) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.long
def test_a_document_is_read_once_and_asked_by_its_handle(server: ServerProcess) -> None:
    ask = part("\n\nWhat colour is the door?")
    text = "".join(f"Page {n} of the report says nothing.\n\n" for n in range(20)) + FACT
    plain = chat(server, messages=[user(part(text), ask)], cache_salt="b", return_sources=1)
    first = chat(server, messages=[user(part(text, cache_control=MARK), ask)])
    [context] = first["contexts"]
    assert said(first) == said(plain) and "red" in said(plain)[0]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    by_handle = {"messages": [user(ask)], "context": context["id"]}
    again = chat(server, **by_handle, return_sources=1)
    assert said(again) == said(plain) and again["contexts"][0]["id"] == context["id"]
    total, cached = plain["usage"]["prompt_tokens"], context["tokens"]
    assert again["usage"]["prompt_tokens"] == total > cached > 150
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached
    [source] = again["choices"][0]["sources"]
    assert source["text"] == FACT and text[source["start"] : source["end"]] == FACT
    assert source["message"] == plain["choices"][0]["sources"][0]["message"] == 0
    assert said(chat(server, **by_handle, n=2)) == said(plain) * 2
    [listed] = call(server, "/v1/contexts").json()["data"]
    assert listed["id"] == context["id"] and listed["ttl"] == 3600
    assert listed["bytes"]["device"] > 0 == listed["bytes"]["disk"]
    assert listed["expires_at"] == pytest.approx(listed["last_used_at"] + 3600, abs=1)
    assert listed["begins"] == text[:120]
    held = call(server, f"/v1/contexts/{context['id']}/messages").json()
    assert held["messages"] == [user(text)] and held["goes_on"] is True
    assert call(server, "/v1/contexts", key="b").json()["data"] == []
    for foreign in (
        call(server, f"/v1/contexts/{context['id']}/messages", key="b"),
        chat(server, "b", **by_handle),
        call(server, f"/v1/contexts/{context['id']}", key="b"),
        call(server, f"/v1/contexts/{context['id']}", key="b", method="DELETE"),
    ):
        assert foreign.status_code == 404
        error = foreign.json()["error"]
        assert error["code"] == "context_not_found" and "expired" not in error["message"]
    assert call(server, f"/v1/contexts/{context['id']}", method="DELETE").json()["deleted"]
    gone = chat(server, **by_handle)
    assert gone.status_code == 404 and "it was deleted" in gone.text


@pytest.mark.long
def test_contexts_outlive_the_server_in_a_store(tmp_path: Path) -> None:
    store = "--prefix-store", str(tmp_path)
    text = "".join(f"Page {n} of the report says nothing.\n\n" for n in range(40)) + FACT
    ask = part("\n\nWhat colour is the door?")
    with serving(2, *store) as server:
        first = chat(server, messages=[user(part(text, cache_control=MARK), ask)])
        [context] = first["contexts"]
        by_handle = {"messages": [user(ask)], "context": context["id"], "return_sources": 1}
        assert wait_until(lambda: any(tmp_path.glob("*/*/ctx_*.context")), 10)
        saving = lambda: call(server, "/stats").json()["prefix_cache"]["saving"]  # noqa: E731
        assert wait_until(lambda: not saving(), 20)
        [listed] = call(server, "/v1/contexts").json()["data"]
        assert listed["bytes"]["disk"] > 0 < listed["bytes"]["device"]
    for world_size in (2, 1):
        with serving(world_size, *store) as server:
            [listed] = call(server, "/v1/contexts").json()["data"]
            assert listed["id"] == context["id"] and listed["tokens"] == context["tokens"]
            assert listed["bytes"] == {"device": 0, "host": None, "disk": None}
            assert chat(server, "b", **by_handle).status_code == 404
            assert chat(server, **by_handle | {"context": "../\0"}).status_code == 404
            again = chat(server, **by_handle)
            assert said(again) == said(first)
            assert again["choices"][0]["sources"][0]["text"] == FACT
            # The last token that is kept is read again, at most.
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= context["tokens"] - 1
            [listed] = call(server, "/v1/contexts").json()["data"]
            assert listed["bytes"]["disk"] > 0 < listed["bytes"]["device"]
            if world_size == 1:
                gone = call(server, f"/v1/contexts/{context['id']}", method="DELETE")
                assert gone.json()["deleted"] and not list(tmp_path.glob("*/*/ctx_*"))


@pytest.mark.long
def test_usage_in_messages_is_true_and_marks_are_hints(server: ServerProcess) -> None:
    ours = anthropic.Anthropic(base_url=server.url(), api_key=KEYS["b"], max_retries=0)
    text: Any = part(DOCUMENT.replace("red", "green"), cache_control=MARK)
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 4}

    def usage(*blocks: Any, **more: Any) -> tuple[int, int, int]:
        message = ours.messages.create(**asked, messages=[user(*blocks)], **more)
        found = message.usage
        created, read = found.cache_creation_input_tokens, found.cache_read_input_tokens
        return created or 0, read or 0, found.input_tokens

    created, read, rest = usage(text, part("What?"))
    assert created > 150 and read < 16 and 0 < rest < 40
    total = created + read + rest
    created, read, rest = usage(text, part("What?"))
    assert created == 0 and read > 150 and read + rest == total
    [context] = call(server, "/v1/contexts", key="b").json()["data"]
    handle = {"extra_body": {"context": context["id"]}}
    created, read, rest = usage(part("What?"), **handle)
    assert created == 0 and read + rest == total
    # Another place behind the same context: pages are shared.
    created, read, rest = usage(part(DOCUMENT, cache_control=MARK), part("Why?"), **handle)
    assert created > 150 and read >= context["tokens"]
    longer = part(DOCUMENT * 7, cache_control=MARK)
    created, _, rest = usage(longer, part("What?"))  # the mark is a hint
    assert created == 0 < rest and "of the 42949672 that" in server.log
    for one in call(server, "/v1/contexts", key="b").json()["data"]:
        call(server, f"/v1/contexts/{one['id']}", key="b", method="DELETE")


@pytest.mark.long
def test_long_bodies_are_read_by_another_process(server: ServerProcess) -> None:
    """Blanks behind the JSON make them long; the context that one names goes there, too."""

    def sent(**body: Any) -> Any:
        own = {"model": "smollm2", "temperature": 0, "max_tokens": 8, **body}
        headers = {"Authorization": f"Bearer {KEYS['a']}", "Content-Type": "application/json"}
        raw = json.dumps(own).encode() + b" " * (1 << 18)
        url = server.url() + "/v1/chat/completions"
        answer = httpx.post(url, content=raw, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    text = f"This is long. {DOCUMENT}"
    first = sent(messages=[user(part(text, cache_control=MARK), part("What is red?"))])
    [context] = first["contexts"]
    again = sent(messages=[user(part("What is red?"))], context=context["id"])
    assert said(again) == said(first)
    assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= context["tokens"]
    assert call(server, f"/v1/contexts/{context['id']}", method="DELETE").json()["deleted"]


REPORT = "".join(f"Page {n} of the report says nothing.\n\n" for n in range(20)) + FACT
ASK = part("\n\nWhat colour is the door?")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more"),
    [
        (8, ()),
        (2, ("--kv-dtype", "int8")),
        (2, ("--speculative-config", '{"method": "lookup"}')),
    ],
    ids=["8 ranks", "int8", "drafts"],
)
def test_contexts_of_other_engines(world: int, more: tuple[str, ...]) -> None:
    with serving(world, *more) as server:
        plain = chat(server, messages=[user(part(REPORT), ASK)], cache_salt="b", max_tokens=24)
        first = chat(server, messages=[user(part(REPORT, cache_control=MARK), ASK)], max_tokens=24)
        [context] = first["contexts"]
        again = chat(server, messages=[user(ASK)], context=context["id"], max_tokens=24, n=2)
        assert [*said(first), *said(again)] == said(plain) * 3
        assert call(server, f"/v1/contexts/{context['id']}", method="DELETE").json()["deleted"]
        used = lambda: call(server, "/stats").json()["kv_bytes_per_rank"]  # noqa: E731
        assert wait_until(lambda: not sum(used()), 10)


@pytest.mark.slow
def test_contexts_outlive_an_engine_that_dies() -> None:
    with serving(2, "--pinned-gb=0.2") as server:
        first = chat(server, messages=[user(part(REPORT, cache_control=MARK), ASK)])
        [context] = first["contexts"]

        def kill() -> None:
            ranks = [p for p in server.family() if "engine.worker" in " ".join(p.cmdline())]
            ranks[0].kill()

        def is_ready() -> bool:
            return httpx.get(f"{server.url()}/health").status_code == 200

        kill()
        assert wait_until(lambda: not is_ready(), 20) and wait_until(is_ready, 120)
        again = chat(server, messages=[user(ASK)], context=context["id"])
        assert said(again) == said(first)
        # While it is read: the request fails, and nothing of it is kept.
        long = "".join(f"Number {n} of the list is not a door. " for n in range(160))
        with ThreadPoolExecutor() as pool:
            lost = pool.submit(
                chat, server, messages=[user(part(long, cache_control=MARK), ASK)], max_tokens=1
            )
            assert wait_until(lambda: len(call(server, "/v1/contexts").json()["data"]) > 1, 20)
            kill()
            assert lost.result().status_code >= 500
        assert wait_until(is_ready, 120)
        [listed] = call(server, "/v1/contexts").json()["data"]
        assert listed["id"] == context["id"]
        assert said(chat(server, messages=[user(ASK)], context=context["id"])) == said(first)


@pytest.mark.long
@pytest.mark.parametrize("requests", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_left_of_contexts(server: ServerProcess, requests: int) -> None:
    def stats() -> Any:
        return call(server, "/stats").json()

    for number in range(requests):
        begin = f"Number {number}. " + "A red door is here. " * 14
        texts = [part(begin if not n else f" It is {n}.", cache_control=MARK) for n in range(4)]
        answer = chat(server, messages=[user(*texts, part("What?"))], max_tokens=1)
        assert len(answer["contexts"]) == 4
        for context in answer["contexts"]:
            gone = call(server, f"/v1/contexts/{context['id']}", method="DELETE")
            assert gone.json()["deleted"]
    assert call(server, "/v1/contexts").json()["data"] == []
    assert wait_until(lambda: not sum(stats()["kv_bytes_per_rank"]), 10)  # compares all accounts
    found = stats()
    assert found["running"] == found["unfinished"] == 0
    assert found["prefix_cache"]["entries"] <= 4 * 8
