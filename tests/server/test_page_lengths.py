"""The page at ``/``: documents and answers that are longer than the model's context."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.server.page_reader import STORY, Reader
from tests.server.process import ServerProcess, server_on
from tests.tokenizer import smollm2_tokenizer

# More tokens than characters: twice as many characters as the context has tokens are more than the
# server counts at once.
KOREAN = "한국어 문서는 여러 문장으로 이루어져 있습니다. 이것은 시험입니다.\n\n" * 120
STREAM = {"Content-Type": "text/event-stream"}


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """A server that wants no key and holds little."""
    with server_on("tests.server.page_rank", "--max-model-len", "1024") as started:
        started.url()
        yield started


@pytest.fixture
def opened(browser: Browser, small: ServerProcess) -> Iterator[Reader]:
    found = Reader(browser.new_context(bypass_csp=True), small.url(), max_tokens=40)
    yield found
    assert found.problems == []
    found.context.close()


def tokens_of(text: str) -> int:
    return len(smollm2_tokenizer().encode(text, add_special_tokens=False))


def parts_of(reader: Reader, text: str, room: int, tokens: int) -> list[str]:
    """The page's parts of a text, of which no more are taken than it has characters."""
    script = """async ([text, room, tokens]) => {
      const { partsOf } = await import('/page/parts.js');
      const parts = [];
      for await (const { begin, end } of partsOf({ text, tokens }, room)) {
        parts.push(text.slice(begin, end));
        if (parts.length > text.length) break;
      }
      return parts;
    }"""
    found: list[str] = reader.page.evaluate(script, [text, room, tokens])
    return found


def said(text: str) -> dict[str, Any]:
    chunk = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
    return {"body": f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "headers": STREAM}


def test_a_long_text_of_many_tokens_a_character(opened: Reader) -> None:
    """With the embedded model's tokenizer, which has two tokens for a Korean character."""
    reader = opened
    total = tokens_of(KOREAN)
    assert len(KOREAN) > 2 * 1024 and total > 2 * len(KOREAN)
    reader.add(("\ud55c\uad6d\uc5b4.txt", KOREAN.encode()), ("short.txt", KOREAN[:200].encode()))
    items = reader.pending.locator("[data-ready]")
    counts = re.compile(r"characters, ([\d,]+) tokens")
    expect(items).to_have_text([counts, counts])  # a short one's cannot be guessed from its length
    shown = [int(counts.search(one)[1].replace(",", "")) for one in items.all_inner_texts()]  # type: ignore[index]
    assert shown == pytest.approx([total, tokens_of(KOREAN[:200])], rel=0.01)
    reader.pending.get_by_role("button", name="Remove short.txt").click()
    reader.pending.get_by_role("button", name=re.compile("Use the first")).click()
    expect(items).to_contain_text(re.compile(r"first 7\d\d of [\d,]+ tokens"))
    expect(reader.send).to_be_enabled()


def test_parts_of_a_text_in_two_scripts(opened: Reader) -> None:
    text = STORY * 10 + "\n\n" + KOREAN
    parts = parts_of(opened, text, 700, tokens_of(text) // 2)
    assert "".join(parts) == text
    assert max(map(tokens_of, parts)) <= 700 and len(parts) < 60


def test_a_part_has_a_character_at_least(opened: Reader) -> None:
    assert parts_of(opened, "🏰é🦊ab", 1, 12) == ["🏰", "é", "🦊", "a", "b"]


def test_an_answer_that_leaves_no_room_for_documents(opened: Reader) -> None:
    reader = opened
    reader.add(("fox.txt", STORY.encode()))
    expect(reader.pending).to_contain_text("waits for a question")
    offers = reader.pending.get_by_role("button", name=re.compile("Summarise|Use the first"))
    for tokens, remedy in ((1000, "Set fewer tokens for an answer (Settings)."), (500, "Shorten")):
        reader.open_settings.click()
        reader.max_tokens.fill(str(tokens))
        reader.max_tokens.press("Enter")
        expect(reader.settings).to_be_hidden()
        expect(reader.room).to_contain_text(remedy)
        expect(offers).to_have_count(0 if tokens == 1000 else 2)


def test_summaries_that_are_too_long_together(opened: Reader) -> None:
    reader = opened
    reader.page.route("**/v1/chat/completions", lambda route: route.fulfill(**said(KOREAN)))
    reader.add(("fox.txt", STORY.encode() * 2))
    reader.pending.get_by_role("button", name=re.compile("Summarise in about")).click()
    note = "The summaries together are longer than the context; there is none of them all."
    expect(reader.page.locator("article .note")).to_have_text(note)
    expect(reader.pending.locator("li")).to_have_count(0)


def test_a_document_that_cannot_be_counted_holds_nothing_up(opened: Reader) -> None:
    reader, page = opened, opened.page
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json={}))
    reader.open()
    reader.add(("bad.txt", b"bad " * 300), ("good.txt", b"good " * 400))
    items = reader.pending.locator("[data-ready]")
    expect(items).to_have_count(2)
    page.route(
        "**/tokenize",
        lambda route: (
            route.fulfill(status=400, json={"error": {"message": "It is bad."}})
            if "bad" in (route.request.post_data or "")
            else route.continue_()
        ),
    )
    page.unroute("**/v1/models")
    look = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(look)
    expect(items).to_contain_text(
        ["It is bad.", re.compile(r"2,000 characters, \d+ tokens · waits")]
    )
    expect(reader.gauge_from).to_contain_text("of the model's heads keep the whole prompt")
    assert page.evaluate("import('/page/state.js').then(({ app }) => app.tellsSources)")
    page.unroute("**/tokenize")
    page.evaluate(look)
    expect(items.first).to_contain_text("tokens · waits for a question")


def test_a_model_that_has_changed_while_the_tab_was_hidden(opened: Reader) -> None:
    reader, page = opened, opened.page
    reader.add(("fox.txt", STORY.encode()))
    expect(reader.room).to_contain_text("of 1,024 tokens")

    def smaller(route: Route) -> None:
        found = route.fetch().json()
        found["data"][0]["max_model_len"] = 600
        route.fulfill(json=found)

    page.route("**/v1/models", smaller)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(reader.room).to_contain_text("more than the 600 that the model holds")


@pytest.mark.long
def test_a_document_beyond_the_context(opened: Reader) -> None:
    reader, page = opened, opened.page
    book = "".join(f"Chapter {n}. {STORY[:280]}\n\n" for n in range(40))
    reader.add(("book.txt", book.encode()))
    expect(reader.room).to_contain_text("more than the 1,024 that the model holds")
    expect(reader.send).to_be_disabled()
    assert reader.faults() == []
    reader.question.fill("Who?")
    reader.question.press("Enter")
    expect(reader.notice).to_contain_text("more than the 1,024")
    assert page.locator("article").count() == 0
    reader.pending.get_by_role("button", name=re.compile("Use the first")).click()
    expect(reader.pending).to_contain_text(re.compile(r"first \d+ of [\d,]+ tokens"))
    with page.expect_request("**/v1/chat/completions") as sent:
        reader.answered("Who?")
    (message,) = sent.value.post_data_json["messages"]
    sent_text = message["content"].partition(":\n\n")[2].removesuffix("\n\nWho?")
    assert book.startswith(sent_text) and len(sent_text) > 1500
    reader.new.click()
    # A character may have several tokens, and an answer needs room as well.
    reader.add(("han.txt", ("\u9f98" * 700).encode()))
    expect(reader.room).to_contain_text("with an answer of 40 more than the 1,024")
    reader.pending.get_by_role("button", name=re.compile("Use the first")).click()
    expect(reader.send).to_be_enabled()
    expect(reader.room).to_contain_text(re.compile(r"About \d+ of 1,024 tokens"))
    reader.new.click()
    reader.add(("book.txt", book.encode()))
    requests: list[str] = []
    page.on("request", lambda r: requests.append(r.post_data or "") if "chat" in r.url else None)
    reader.pending.get_by_role("button", name=re.compile(r"Summarise in about \d+ parts")).click()
    turn = page.locator("article")
    expect(turn.locator(".copy")).to_be_visible(timeout=60_000)
    bodies = [json.loads(one) for one in requests]
    assert all(one["chat_template_kwargs"] == {"enable_thinking": False} for one in bodies)
    contents = [one["messages"][0]["content"] for one in bodies]
    about = "\n\nWhat is the text above about? Answer in three sentences."
    texts = [one.removesuffix(about) for one in contents[:-1]]
    assert "".join(texts) == book and len(texts) > 2
    expect(turn.locator(".note")).to_contain_text(f"Read in {len(texts)} parts, each by itself")
    expect(turn.locator(".answer")).to_contain_text("All together")
    expect(reader.pending.locator("li")).to_have_count(0)


@pytest.mark.long
def test_a_document_stays_until_its_summary_is_whole(opened: Reader) -> None:
    reader, page, held = opened, opened.page, list[Route]()
    listed = reader.pending.locator("[data-ready='too long']")
    turn = page.locator("article")
    reader.add(("book.txt", (STORY + "\n\n").encode() * 4))
    page.route("**/v1/chat/completions", lambda route: held.append(route))

    def asked() -> Route:
        while not held:
            page.wait_for_timeout(20)
        return held.pop()

    def first_part() -> Route:
        reader.pending.get_by_role("button", name=re.compile("Summarise in about")).click()
        return asked()

    def refuse(route: Route) -> None:
        error = {"message": "It is too long.", "code": "context_length_exceeded"}
        route.fulfill(status=400, json={"error": error})

    refuse(first_part())
    expect(reader.notice).to_have_text("It is too long.")
    expect(listed).to_contain_text("book.txt")
    expect(turn).to_have_count(0)
    first_part()
    reader.open()
    expect(listed).to_contain_text("book.txt")
    expect(turn).to_have_count(0)
    expect(reader.question).to_have_value("")
    first_part().fulfill(**said("Foxes."))
    refuse(asked())
    expect(turn.locator(".note")).to_have_text("It is too long.")
    expect(turn.locator(".answer")).to_have_text(re.compile(r"^Part 1 .*\d\s*Foxes\.$"))
    expect(listed).to_contain_text("book.txt")
    first_part().fulfill(**said("Foxes."))
    asked()
    reader.stop.click()
    expect(turn.last.locator(".note")).to_have_text("Stopped.")
    expect(listed).to_contain_text("book.txt")
