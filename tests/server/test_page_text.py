"""The documents' text on the page: tabs, passages, long documents, folders, footnotes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.server.page_reader import KEY, STORY, Reader
from tests.server.process import ServerProcess

FACT = "The castle fell at noon."


@pytest.mark.long
def test_a_sentence_shows_its_passages_by_pointer_and_by_keyboard(reader: Reader) -> None:
    page, card = reader.page, reader.card
    reader.add(("fox.txt", STORY.encode()), ("history.txt", f"{STORY}\n\n{FACT}".encode()))
    expect(reader.pending.locator("li")).to_have_count(2)
    turn = reader.answered("When did it fall?")
    words = turn.locator(".answer").get_by_role("button", name="The fox went over the hill.").first
    expect(words).to_have_attribute("data-numbers", "1")
    mark = page.locator("#reader mark")
    expect(mark).to_have_text(FACT)  # without anybody's asking
    expect(mark).to_be_in_viewport()
    for come, go in (
        (lambda: words.hover(), lambda: page.mouse.move(5, 5)),
        (lambda: page.keyboard.press("Tab"), lambda: page.keyboard.press("Escape")),
    ):
        expect(card).to_be_hidden()
        turn.locator(".answer").focus()
        come()
        expect(card).to_have_text(re.compile(rf"1 · history\.txt · 80 %\s*{FACT}"))
        expect(card).to_be_in_viewport(ratio=1)
        expect(words).to_have_attribute("aria-describedby", "card")
        expect(mark).to_have_class("pointed")
        go()
        expect(card).to_be_hidden()
        expect(mark).not_to_have_class("pointed")
    mark.hover()  # and back
    expect(words).to_have_class("sentence pointed")
    tabs = page.get_by_role("tab")
    tabs.last.focus()
    page.keyboard.press("ArrowRight")
    expect(tabs.first).to_be_focused()
    expect(tabs.first).to_have_attribute("aria-selected", "true")
    expect(reader.reader_text).to_have_text(re.compile("^The fox"))
    page.keyboard.press("End")
    expect(mark).to_have_text(FACT)
    # A document that is taken out has no tab, and what came from it is no longer cited.
    reader.pending.get_by_role("button", name="Remove history.txt").click()
    expect(tabs).to_have_text(["fox.txt"])
    expect(page.locator(".sentence")).to_have_count(0)


@pytest.mark.long
def test_sentences_are_lit_as_they_come(browser: Browser, page_server: ServerProcess) -> None:
    """The answer is not complete when its first sentence has its passage lit."""
    reader = Reader(browser.new_context(), page_server.url(), max_tokens=2000)
    reader.add(("history.txt", f"{STORY}\n\n{FACT}".encode()))
    expect(reader.pending.locator("li")).to_have_count(1)
    turn = reader.ask("When did it fall? It fell.")
    expect(turn.locator(".sentence").first).to_be_visible()
    expect(reader.stop).to_be_visible()
    expect(reader.page.locator("#reader mark")).to_be_in_viewport()
    reader.stop.click()
    expect(turn.locator(".copy")).to_be_visible()
    assert reader.problems == []
    reader.context.close()


@pytest.mark.long
def test_a_long_text_is_rendered_where_it_is_seen(
    browser: Browser, page_server: ServerProcess
) -> None:
    """Six megabytes: all is in the page for its search, little of it is laid out."""
    reader = Reader(browser.new_context(), page_server.url())
    page = reader.page
    line = "It was the best of times, it was the worst of times 🦊.\n"
    half = line * (3 * 2**20 // len(line.encode()))
    script = """async ([text, begin, length]) => {
      const { reader } = await import('/page/reader.js');
      const passage = { document: 'd', begin, length, number: 1 };
      reader.sync([{ id: 'd', name: 'long.txt', text }]);
      reader.light([passage]);
      reader.open(passage);
      await new Promise((done) => setTimeout(done, 300));
      const chunks = [...document.querySelectorAll('#reader-text div')];
      const same = chunks.map((chunk) => chunk.textContent).join('') === text;
      const seen = chunks.filter((one) => one.firstChild.parentElement.querySelector('mark')
        ?.checkVisibility({ contentVisibilityAuto: true }));
      const rendered = chunks.filter((chunk) => {
        chunk.prepend(document.createElement('b'));
        const found = chunk.firstChild.checkVisibility({ contentVisibilityAuto: true });
        chunk.firstChild.remove();
        return found;
      });
      return [chunks.length, same, seen.length, rendered.length];
    }"""
    begin = len(half) + half.count("🦊")
    text = half + FACT + "\n" + half
    chunks, same, seen, rendered = page.evaluate(script, [text, begin, len(FACT)])
    assert chunks > 700 and same and seen == 1 and 1 <= rendered < 10
    expect(page.locator("#reader mark")).to_have_text(FACT)
    expect(page.locator("#reader mark")).to_be_in_viewport()
    assert reader.problems == []
    reader.context.close()


def test_places_in_a_long_text_with_characters_of_two_halves(reader: Reader) -> None:
    script = """async ([text, spots]) => {
      const { locator } = await import('/page/sources.js');
      const { Conversation } = await import('/page/conversation.js');
      const own = new Conversation();
      own.pending = [{ id: 'a', name: 'a', text: 'other' }, { id: 'd', name: 'd', text }];
      own.ask('Why?');
      const head = own.messages()[0].content.indexOf(text);
      const found = locator(own)(spots.map(([start, end]) => ({ message: 0, weight: 1, text: '',
        start: start + head, end: end + head })));
      return found.map((one) => [one.document, text.slice(one.begin, one.begin + one.length)]);
    }"""
    text = "a🦊b🏰\n" * 2000 + "end"
    spots = [(0, 2), (1, 3), (1022, 1027), (5000, 5003), (9999, 10003)]
    found = reader.page.evaluate(script, [text, [list(spot) for spot in spots]])
    assert found == [["d", text[begin:end]] for begin, end in spots]


def test_a_folder_is_read_with_all_that_is_in_it(reader: Reader, tmp_path: Path) -> None:
    folder = tmp_path / "books"
    for name in ("b/chapter 10.md", "b/chapter 9.txt", "a.html", ".git/x.txt", "cat.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"This is {name}.")
    names = [
        re.compile(name) for name in ("books/a.html", "books/b/chapter 9", "books/b/chapter 10")
    ]
    reader.folder.set_input_files(folder)
    expect(reader.pending.locator("li")).to_have_text(names)
    expect(reader.notice).to_have_text("Files left out: 1 of kinds that are not read.")
    reader.new.click()
    expect(reader.pending.locator("li")).to_have_count(0)
    session = reader.context.new_cdp_session(reader.page)
    data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 300, "data": data})
    expect(reader.pending.locator("li")).to_have_text(names)
    expect(reader.notice).to_contain_text("1 of kinds that are not read")


def test_an_answer_is_exported_with_footnotes(reader: Reader, tmp_path: Path) -> None:
    name = "a_b*[x](javascript:1).txt"
    reader.add((name, f"{STORY}\n\n{FACT} <b>Bold</b> # [^1]".encode()))
    expect(reader.pending.locator("li")).to_have_count(1)
    head = f"Document {json.dumps(name)}:\n\n"

    def source(text: str) -> dict[str, Any]:
        at = len(head) + f"{STORY}\n\n{FACT} <b>Bold</b> # [^1]".index(text)
        return {"start": at, "end": at + len(text), "weight": 0.8, "text": text, "message": 0}

    answer = "🏰 It fell. It was **bold.**\n\n```\ncode here. more\n```\n\nThe `end`."
    cited = [("🏰 It fell.", [FACT]), ("It was **bold.**", ["<b>Bold</b> # [^1]", FACT])]
    cited += [("code here.", [FACT]), ("The `end`.", [FACT])]
    sentences = []
    for words, sources in cited:
        at = answer.index(words)
        own = [source(text) for text in sources]
        sentences.append({"start": at, "end": at + len(words), "grounded": 0.8, "sources": own})
    turn = reader.told(
        "# When?\nSay it.",
        answer,
        sources=[source(FACT)],
        grounded=0.8,
        sentences=sentences,
    )
    expect(turn.locator(".sentence[data-numbers]")).to_have_count(4)
    with reader.page.expect_download() as downloaded:
        reader.export.click()
    path = tmp_path / "a.md"
    downloaded.value.save_as(path)
    lines = path.read_text().split("\n\n")
    assert lines[2] == "## # When? Say it."
    begin, escaped = len(STORY) + 2, "a\\_b\\*\\[x\\](javascript:1).txt"
    assert lines[4:] == [
        "🏰 It fell.[^1] It was **bold.**[^2][^1]",
        "```\ncode here. more\n```",
        "[^1]",
        "The `end`.[^1]",
        f"[^1]: {escaped}, characters {begin} to {begin + len(FACT)}: “{FACT}”",
        f"[^2]: {escaped}, characters {begin + len(FACT) + 1} to {begin + len(FACT) + 19}: "
        "“\\<b\\>Bold\\</b\\> \\# \\[\\^1\\]”\n",
    ]
    assert KEY not in path.read_text()
