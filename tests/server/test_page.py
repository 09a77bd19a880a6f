"""The page at ``/``, in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Route, expect

from tests.documents import files
from tests.server.page_reader import KEY, STORY, Reader
from tests.server.process import ServerProcess, fake_server

# Names and contents that would run, call out or change the page if anything took them for markup.
NASTY = "<img src=x onerror=hacked()>\"'&amp;\u202e.html"
NASTY_HTML = (
    "<!doctype html><script>hacked()</script><body onload=hacked()><p>Fine "
    "&lt;script&gt;hacked()&lt;/script&gt; &lt;img src=http://evil.example/x onerror=hacked()&gt;"
    "<img src=http://evil.example/y onerror=hacked()><iframe src=javascript:hacked()></iframe></p>"
)


USAGE = re.compile(r"Prompt [\d,]+ tokens, ([\d,]+) of them new · answer \d+ tokens?")


@pytest.mark.long
def test_a_book_is_read_once_and_asked_about_twice(
    reader: Reader, unread: Path, tmp_path: Path
) -> None:
    reader.add(("fox.txt", STORY.encode()), ("fox.pdf", files.pdf("The fox")))
    expect(reader.pending.locator("li")).to_have_text(
        [re.compile("fox.txt"), re.compile("fox.pdf")]
    )
    expect(reader.room).to_contain_text("of 2,097,152 tokens")
    turn = reader.ask("Who went over the hill?")
    words = turn.locator(".reading p")
    expect(words).to_have_text(
        re.compile(r"[\d,]+ of [\d,]+ tokens · [\d,]+ a second · about \d+ s")
    )
    expect(turn.get_by_role("progressbar", name="Reading")).to_be_visible()
    unread.unlink()
    expect(turn.locator(".answer")).to_contain_text("hill")
    expect(turn.locator(".usage")).to_have_text(USAGE)
    expect(turn.locator(".note")).to_contain_text("Cut off after 40 tokens")
    # What has been sent stays listed, with what it costs.
    listed = [
        re.compile(f"{name}.*about [\\d,]+ tokens? · read") for name in ("fox.txt", "fox.pdf")
    ]
    expect(reader.pending.locator("li")).to_have_text(listed)
    with reader.page.expect_request("**/v1/chat/completions") as sent:
        second = reader.answered("And why?")
    first_message, answer, question = sent.value.post_data_json["messages"]
    assert first_message["content"].endswith("Who went over the hill?")
    assert STORY in first_message["content"] and "The fox" in first_message["content"]
    assert answer["role"] == "assistant"
    assert answer["content"].split() == turn.locator(".answer").inner_text().split()
    assert question == {"role": "user", "content": "And why?"}
    assert _new_tokens(second) < 60 < 500 < _new_tokens(turn)

    reader.page.reload()
    expect(reader.page.locator("article")).to_have_count(2)
    shown = reader.page.locator("article .answer").first
    assert shown.inner_text().split() == answer["content"].split()
    with reader.page.expect_request("**/v1/chat/completions") as sent:
        reader.answered("Anything else?")
    assert sent.value.post_data_json["messages"][0] == first_message  # it begins alike
    with reader.page.expect_download() as downloaded:
        reader.export.click()
    exported = tmp_path / "conversation.md"
    downloaded.value.save_as(exported)
    assert "## Who went over the hill?" in exported.read_text()
    assert answer["content"].strip() in exported.read_text()
    reader.context.grant_permissions(["clipboard-read", "clipboard-write"])
    second.get_by_role("button", name="Copy").click()
    expect(second.locator(".copy")).to_have_text("Copied")
    copied = reader.page.evaluate("navigator.clipboard.readText()")
    assert copied.split() == reader.page.locator("article .answer").nth(1).inner_text().split()
    reader.new.click()
    expect(reader.page.locator("article")).to_have_count(0)


@pytest.mark.long
def test_a_source_is_lit_in_its_document(reader: Reader) -> None:
    fact = "The \U0001f3f0 castle fell at noon."
    text = f"{STORY}\n\n\U0001f98a!\n\n{fact} {STORY}"
    reader.add(("fox.txt", STORY.encode()), ("history \U0001f4dc.txt", text.encode()))
    expect(reader.pending.locator("li")).to_have_count(2)
    turn = reader.answered("When did it fall?")
    sources = turn.get_by_role("region", name="Sources")
    expect(sources.get_by_role("listitem")).to_have_text(f"{fact} history \U0001f4dc.txt, 80 %")
    expect(sources).to_contain_text("Most of the words come from this passage:")
    button = sources.get_by_role("button")
    button.focus()
    reader.page.keyboard.press("Enter")
    tab = reader.page.get_by_role("tab", name="history \U0001f4dc.txt")
    expect(tab).to_have_attribute("aria-selected", "true")
    expect(tab.locator(".badge")).to_have_text("1")
    lit = reader.page.locator("#reader mark")
    expect(lit).to_have_text(fact)
    expect(lit).to_be_in_viewport()
    shown = reader.page.get_by_role("tabpanel", name="history \U0001f4dc.txt")
    expect(shown).to_be_focused()
    assert shown.inner_text().split() == text.split()
    reader.page.keyboard.press("Escape")
    expect(button).to_be_focused()
    # So is what a sentence of the answer came from.
    answer = turn.locator(".answer")
    words = answer.get_by_role("button", name="The fox went over the hill.").first
    reader.page.get_by_role("tab", name="fox.txt").click()
    expect(lit).to_have_count(0)
    words.click()
    expect(lit).to_have_text(fact)
    expect(lit).to_be_in_viewport()
    reader.page.keyboard.press("Escape")
    expect(words).to_be_focused()
    reader.page.keyboard.press("Enter")
    expect(shown).to_be_focused()
    reader.page.keyboard.press("Escape")
    # A later answer may come from an earlier question's document; a reload keeps what was found.
    later = reader.answered("And then?")
    expect(later.get_by_role("listitem")).to_have_text(f"{fact} history \U0001f4dc.txt, 80 %")
    reader.open()
    reader.page.locator("article").last.get_by_role("button", name=fact).click()
    expect(reader.page.locator("#reader mark")).to_have_text(fact)


def _new_tokens(turn: Locator) -> int:
    found = USAGE.fullmatch(turn.locator(".usage").inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


def test_what_waits_is_read_ahead(reader: Reader, unread: Path) -> None:
    reader.add(("ahead.txt", b"Ahead of all: " + STORY.encode()))
    reader.read_ahead.click()
    expect(reader.ahead.locator(".reading p")).to_contain_text("a second")
    unread.unlink()
    expect(reader.ahead_note).to_contain_text("Read. Prompt")
    turn = reader.answered("Who went over the hill?")
    assert _new_tokens(turn) < 60


@pytest.mark.parametrize("key", ["sk-wrong", "sk-ключ"])
def test_a_key_is_asked_for_and_forgotten_with_the_tab(reader: Reader, key: str) -> None:
    page = reader.page
    page.evaluate("(key) => (sessionStorage['razor_dist key'] = key)", key)
    reader.add(("a.txt", b"text"))
    expect(reader.key_problem).to_contain_text("wants an API key")
    expect(reader.key).to_be_focused()
    reader.key.fill(KEY)
    reader.key.press("Enter")
    expect(reader.settings).to_be_hidden()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    reader.answered("Hello?")


def test_what_cannot_be_read_is_told(reader: Reader) -> None:
    picture = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    reader.add(
        ("cat.png", picture), ("book.pdf", b"text"), ("empty.txt", b""), ("a.docx", b"PK\3\4")
    )
    told = ["neither text nor HTML", "is no pdf file", "holds no text", "is a broken archive"]
    items = reader.pending.locator("li")
    expect(items).to_have_text([re.compile(words) for words in told])
    for _ in told:
        items.first.get_by_role("button", name="Remove").click()
    expect(items).to_have_count(0)


def test_nothing_that_is_read_runs(reader: Reader) -> None:
    page = reader.page
    reader.add((NASTY, NASTY_HTML.encode()))
    expect(reader.pending).to_contain_text("<img src=x onerror=hacked()>")
    turn = reader.answered("<script>hacked()</script><b onclick=hacked()>Hello</b>")
    expect(turn.locator("h3")).to_have_text(
        "<script>hacked()</script><b onclick=hacked()>Hello</b>"
    )
    expect(turn.locator(".documents")).to_contain_text("onerror=hacked()")
    expect(turn.locator(".answer")).to_contain_text("hacked")  # the fake answers with the prompt
    assert page.locator("article :is(img, script, b, iframe)").count() == 0
    # Even if it were put into the page, the policy would not let it.
    html = "const p = document.createElement('p'); p.innerHTML = '<img src=x>';"
    assert (
        page.evaluate(f"() => {{ try {{ {html} }} catch (e) {{ return e.name }} }}") == "TypeError"
    )
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {}))")
    assert page.evaluate("window.isHacked") is None
    reader.problems.clear()  # those of the line before
    page.reload()
    expect(page.locator("article")).to_have_count(1)
    assert page.evaluate("window.isHacked") is None


def test_figures_are_what_the_server_tells(reader: Reader) -> None:
    def call(module: str, function: str, value: dict[str, Any]) -> Any:
        found = f"import('/page/{module}.js').then((m) => m.{function}({json.dumps(value)}))"
        return reader.page.evaluate(found)

    usage = {"prompt_tokens": 1200, "completion_tokens": 1}
    assert call("views", "usageWords", usage) == "Prompt 1,200 tokens · answer 1 token"
    known = usage | {"prompt_tokens_details": {"cached_tokens": 1180}}
    words = "Prompt 1,200 tokens, 20 of them new · answer 1 token"
    assert call("views", "usageWords", known) == words
    stats = {"retrieval_fraction": 0.25, "kv_bytes_per_rank": [150, 170]}
    stats["retrieval_kv_bytes_per_rank"] = [100, 120]
    assert call("gauge", "kept", stats) == {"now": 320, "full": 880}
    assert call("gauge", "kept", stats | {"retrieval_kv_bytes_per_rank": [0, 0]}) is None
    reader.answered("What is sent?")
    expect(reader.gauge).to_contain_text("Sent between 2 ranks")


def test_the_counters_of_several_engines(reader: Reader) -> None:
    def many(route: Route) -> None:
        route.fulfill(json={"engines": {"0": route.fetch().json(), "1": {}}})

    reader.page.route("**/stats", many)
    reader.page.reload()
    expect(reader.ahead).to_have_attribute("data-known", "true")
    reader.answered("What is sent?")
    expect(reader.gauge).to_contain_text("Sent between 2 ranks")
    reader.page.unroute_all(behavior="wait")  # the page goes on asking


def test_the_state_is_looked_at_while_the_counters_hang(reader: Reader) -> None:
    held: list[Route] = []
    reader.page.route("**/stats", lambda route: held.append(route))
    reader.page.reload()
    while not held:
        reader.page.wait_for_timeout(20)
    ending = {"status": "draining", "reason": ""}
    reader.page.route("**/health", lambda route: route.fulfill(json=ending))
    expect(reader.state).to_have_text("The server is shutting down", timeout=9000)
    reader.page.unroute_all(behavior="ignoreErrors")


@pytest.mark.long
def test_nothing_covers_what_it_belongs_to(reader: Reader) -> None:
    """A source's window leaves the answer free, and a phone's lines are used."""
    page = reader.page

    def box(found: Locator) -> dict[str, float]:
        found_box = found.bounding_box()
        assert found_box is not None
        return dict(found_box)

    fact = "The castle, which had been built of grey stone by the river long ago, fell at noon."
    reader.add(("history.txt", f"{STORY}\n\n{fact} {STORY}".encode()))
    expect(reader.pending).to_contain_text("waits for a question")
    page.set_viewport_size({"width": 1000, "height": 800})
    reader.add(*((f"{n}.txt", b"one of many") for n in range(9)))
    expect(reader.pending.locator("li")).to_have_count(10)
    assert box(reader.ahead)["y"] + box(reader.ahead)["height"] < 0.6 * 800  # still in view
    for n in range(9):
        reader.pending.get_by_role("button", name=f"Remove {n}.txt").click()
    source = reader.answered("When did it fall?").locator("button.source")
    for width in (1000, 1400, 1900):
        page.set_viewport_size({"width": width, "height": 800})
        source.click()
        window, passage = box(page.locator("#reader")), box(source)
        assert passage["x"] + passage["width"] <= window["x"]
        assert window["x"] + window["width"] <= width
        page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 780})
    assert box(page.locator("header"))["height"] < 64  # one line
    name, remove = box(reader.pending.locator(".name")), box(reader.pending.locator(".remove"))
    assert remove["y"] < name["y"] + name["height"] < remove["y"] + remove["height"]
    # The question is the last thing on the page, below the figures.
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert box(page.locator("aside"))["y"] < box(page.locator("#ask"))["y"]


@pytest.mark.long
def test_the_examples_of_the_api_can_be_sent(browser: Browser) -> None:
    with fake_server() as plain, browser.new_context() as context:
        reader = Reader(context, plain.url())
        page = reader.page
        page.goto(f"{plain.url()}/docs")
        forms = page.locator("form[data-path]")
        assert forms.count() == 7
        for form in forms.all():
            form.locator("xpath=..").locator("summary").click()
            form.get_by_role("button", name="Send").click()
            expect(form.get_by_role("status")).to_contain_text("200")
        for link in page.locator("nav a").all():
            name = (link.get_attribute("href") or "")[1:]
            assert page.locator(f"[id='{name}']").count() == 1
        assert reader.problems == [] and reader.foreign == []


def test_a_text_in_another_encoding(reader: Reader) -> None:
    reader.add(("caf\u00e9.txt", "Le caf\u00e9 du No\u00ebl".encode("latin-1")))
    expect(reader.pending).to_contain_text("is not UTF-8 text")
    reader.page.get_by_role("button", name="Read in this encoding").click()
    expect(reader.pending.locator("li")).to_contain_text("waits for a question")
    with reader.page.expect_request("**/v1/chat/completions") as sent:
        reader.answered("Quoi?")
    assert "Le caf\u00e9 du No\u00ebl" in sent.value.post_data_json["messages"][0]["content"]


@pytest.mark.long
def test_everybody_can_use_it(browser: Browser, page_server: ServerProcess) -> None:
    """axe-core finds no fault, whole flows go by keyboard, and a phone need not scroll sideways."""
    context = browser.new_context(bypass_csp=True)
    reader = Reader(context, page_server.url())
    page = reader.page
    assert reader.faults() == []  # empty, with the sample's questions
    reader.add(("fox-3.txt", f"{STORY} A castle.".encode()), ("cat.png", b"\0"))
    expect(reader.pending).to_contain_text("neither text")
    asked: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: asked.append(route))  # until it is seen
    turn = reader.ask("Who?")
    expect(turn.get_by_role("progressbar")).to_be_visible()
    assert reader.faults() == []
    asked[0].continue_()
    expect(turn.locator(".copy")).to_be_visible()
    assert reader.faults() == []
    turn.locator(".answer").get_by_role("button", name="A castle.").press("Enter")
    expect(page.locator("#reader mark")).to_be_in_viewport()
    assert reader.faults() == []
    page.keyboard.press("Escape")
    reader.open_settings.focus()
    page.keyboard.press("Enter")
    expect(reader.max_tokens).to_be_focused()
    assert reader.faults() == []
    page.keyboard.press("Escape")
    expect(reader.settings).to_be_hidden()
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    assert reader.faults() == []
    page.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
    stops = []
    for _ in range(40):  # every sentence of the answer is a stop
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"new", "export", "open-settings", "files", "copy", "question"} <= set(stops), stops
    context.close()
