"""Kept contexts on the page, with the embedded model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.server.page_reader import Reader
from tests.server.process import ServerProcess

KEYS = "sk-ada-0123456789", "sk-bob-0123456789"
BOOK = "".join(f"Page {n} of the report says nothing.\n\n" for n in range(30))
FACT = "The door of the house is red."
# A text that is not the page's: with what would be a document's head if it stood alone.
FOREIGN = 'Document "b.txt":\n\nNo document.\n\n' * 8 + "The roof of the house is green."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "razor_dist", "serve", "--world-size", "1", "--threads", "1"]
    command += ["--max-model-len", "2048", "--pinned-gb", "0.04", "--max-num-seqs", "4"]
    with ServerProcess(*command, "--api-key", ",".join(KEYS)) as started:
        started.url(timeout=180)
        yield started


def opened(browser: Browser, server: ServerProcess, key: str = KEYS[0]) -> Reader:
    found = Reader(
        browser.new_context(bypass_csp=True), server.url(), max_tokens=12, key=key, temperature=0
    )
    expect(found.contexts).to_be_visible(timeout=30_000)
    return found


def sent(reader: Reader, act: Any) -> dict[str, Any]:
    with reader.page.expect_request("**/v1/chat/completions") as request:
        act()
    body: dict[str, Any] = request.value.post_data_json
    return body


def call(server: ServerProcess, method: str, path: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    url = server.url() + path
    return httpx.request(method, url, headers=headers, json=body or None, timeout=60).json()


@pytest.mark.long
def test_what_is_kept_is_asked_without_its_text(browser: Browser, server: ServerProcess) -> None:
    reader = opened(browser, server)
    page = reader.page
    names = ['a "report".txt', "door.txt"]
    reader.add((names[0], BOOK.encode()), (names[1], FACT.encode()))
    expect(reader.pending.locator("li")).to_have_count(2)
    reader.keep_for.select_option("1d")
    body = sent(reader, reader.keep.click)
    assert body["max_tokens"] == 1
    kept = page.locator("#contexts-list li")
    expect(kept).to_contain_text('a "report".txt', timeout=60_000)
    expect(kept).to_contain_text(re.compile(r"\d+ tokens · 24\.0 h left · [\d.]+ MiB"))
    expect(reader.pending.locator("[data-ready=kept]")).to_have_count(2)
    expect(reader.keep).to_be_hidden()
    question = "What colour is the door?"
    body = sent(reader, lambda: reader.ask(question))
    assert body["messages"] == [{"role": "user", "content": question}]
    [context] = call(server, "GET", "/v1/contexts")["data"]
    assert body["context"] == context["id"] and context["ttl"] == 86_400
    turn = page.locator("article").last
    expect(turn.locator(".copy")).to_be_visible(timeout=60_000)
    path = f"/v1/contexts/{context['id']}/messages"
    [message] = call(server, "GET", path)["messages"]
    whole = message["content"]
    # In the order in which they were read.
    assert BOOK in whole and f'Document "door.txt":\n\n{FACT}\n\n' in whole
    said = turn.locator(".answer").inner_text().split()
    lit = {text.strip() for text in page.locator(".sources bdi").all_inner_texts()}
    assert said and lit and all(text in whole for text in lit)
    ask = {name: body[name] for name in ("model", "max_tokens", "temperature")}
    ask["messages"] = [{"role": "user", "content": whole + question}]
    [plain] = call(server, "POST", "/v1/chat/completions", **ask)["choices"]
    assert said == plain["message"]["content"].split()
    assert reader.faults() == []
    # Another browser of the same key, with nothing but the list; another key, with an empty one.
    stranger = opened(browser, server, KEYS[1])
    expect(stranger.contexts_room).to_contain_text("Nothing is kept")
    stranger.context.close()
    other = opened(browser, server)
    other.contexts.get_by_role("button", name='Ask a "report".txt').click()
    expect(other.page.get_by_role("tab")).to_have_count(2)
    assert sorted(other.page.get_by_role("tab").all_inner_texts()) == sorted(names)
    expect(other.reader_text).to_contain_text(FACT)
    body = sent(other, lambda: other.ask(question))
    assert "context" in body and len(str(body["messages"])) < 100
    turn = other.page.locator("article").last
    expect(turn.locator(".copy")).to_be_visible(timeout=60_000)
    assert turn.locator(".answer").inner_text().split() == said
    assert {one.strip() for one in other.page.locator(".sources bdi").all_inner_texts()} == lit
    # Ended by one, the other sends the text again.
    reader.contexts.get_by_role("button", name="End").click()
    expect(kept).to_have_count(0)
    requests: list[dict[str, Any]] = []
    other.page.on(
        "request", lambda r: requests.append(r.post_data_json) if "chat/" in r.url else None
    )
    turn = other.ask("And?")
    expect(turn.locator(".copy")).to_be_visible(timeout=60_000)
    assert ["context" in one for one in requests] == [True, False]
    assert FACT in requests[1]["messages"][0]["content"]
    assert other.problems == reader.problems == []
    for one in (reader, other):
        one.context.close()


@pytest.mark.long
def test_a_context_of_another_client_is_asked_as_it_is(
    browser: Browser, server: ServerProcess
) -> None:
    mark = {"type": "ephemeral", "ttl": "5m"}
    part = {"type": "text", "text": FOREIGN, "cache_control": mark}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [part]}]
    call(server, "POST", "/v1/chat/completions", model="smollm2", messages=messages, max_tokens=1)
    reader = opened(browser, server)
    reader.contexts.get_by_role("button", name="Ask b.txt").click()
    expect(reader.page.get_by_role("tab")).to_have_text(["system", "Kept text"])
    expect(reader.reader_text).to_contain_text("The roof of the house is green.")
    body = sent(reader, lambda: reader.ask("\n\nWhat colour is the roof?"))
    assert body["messages"] == [{"role": "user", "content": "What colour is the roof?"}]
    turn = reader.page.locator("article").last
    expect(turn.locator(".copy")).to_be_visible(timeout=60_000)
    # Ended and kept again, it has all its messages, not only the first.
    reader.contexts.get_by_role("button", name="End b.txt").click()
    body = sent(reader, reader.keep.click)
    assert [one["role"] for one in body["messages"]] == ["system", "user"]
    expect(reader.pending.locator("[data-ready=kept]")).to_have_count(2, timeout=60_000)
    [context] = call(server, "GET", "/v1/contexts")["data"]
    kept = call(server, "GET", f"/v1/contexts/{context['id']}/messages")["messages"]
    assert kept == [messages[0], {"role": "user", "content": FOREIGN}]
    # Without a part of it, all is sent as it was.
    reader.pending.get_by_role("button", name="Remove system").click()
    body = sent(reader, lambda: reader.ask("And?"))
    assert "context" not in body
    assert body["messages"][0]["content"] == FOREIGN + "What colour is the roof?"
    assert reader.problems == []
    reader.context.close()
