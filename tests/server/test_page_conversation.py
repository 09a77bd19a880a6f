"""The page at ``/``: a conversation that is changed, interrupted or stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from tests import fake_engine
from tests.server.page_reader import KEY, STORY, Reader
from tests.server.process import ServerProcess


@pytest.fixture
def full(page_server: ServerProcess) -> Iterator[httpx.Response]:
    """A request that fills the queue until it is closed."""
    body = {"model": "smollm2", "prompt": [[fake_engine.HANG]] * 2, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    path = f"{page_server.url()}/v1/completions"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=30) as stream:
        yield stream


def test_new_ends_what_is_being_read_and_asks_nothing(reader: Reader) -> None:
    held: list[Route] = []
    reader.page.route("**/documents/text*", lambda route: held.append(route))
    reader.add(("fox.txt", STORY.encode()))
    expect(reader.pending).to_contain_text("being read")
    reader.question.fill("Who went?")
    reader.question.press("Enter")
    expect(reader.notice).to_have_text("Your question is asked when the document is there.")
    assert len(held) == 1
    reader.new.click()
    reader.page.unroute("**/documents/text*")
    # No upload is waited for: another question is asked at once, and the first one never.
    turn = reader.answered("Hello?")
    expect(reader.page.locator("article")).to_have_count(1)
    expect(turn.locator(".documents")).to_be_empty()


def test_an_answer_without_text_says_so_and_can_be_removed(reader: Reader) -> None:
    turn = reader.told("Anything?", "")
    expect(turn.locator(".note")).to_have_text("The model ended without an answer.")
    turn.get_by_role("button", name="Delete").click()
    expect(reader.page.locator("article")).to_have_count(0)


def test_stop_ends_the_wait_for_a_server_that_does_not_answer(reader: Reader) -> None:
    held: list[Route] = []
    reader.page.route("**/v1/chat/completions", lambda route: route.abort())
    reader.page.route("**/health", lambda route: held.append(route))
    reader.ask("Still there?")
    expect(reader.stop).to_be_visible()
    reader.page.wait_for_timeout(500)
    reader.stop.click()
    expect(reader.notice).to_have_text("Stopped before an answer came.")
    expect(reader.question).to_have_value("Still there?")
    reader.page.unroute_all(behavior="ignoreErrors")


@pytest.mark.long
def test_what_is_stopped_can_be_asked_again(
    browser: Browser, page_server: ServerProcess, unread: Path
) -> None:
    reader = Reader(browser.new_context(), page_server.url(), max_tokens=8000)
    reader.add(("fox-2.txt", STORY.encode() * 2))
    expect(reader.pending).to_contain_text("fox-2.txt")
    turn = reader.ask("Who went?")
    expect(turn.locator(".reading p")).to_contain_text("a second")
    reader.page.keyboard.press("Escape")  # while it is read: nothing is lost
    expect(reader.notice).to_have_text("Stopped before an answer came.")
    unread.unlink()
    expect(reader.question).to_have_value("Who went?")
    expect(reader.pending).to_contain_text("fox-2.txt")
    turn = reader.ask("Who went?")
    expect(turn.locator(".answer")).to_contain_text("went")
    reader.stop.click()  # while it is answered: what has come stays
    expect(turn.locator(".note")).to_have_text("Stopped.")
    expect(reader.send).to_be_visible()
    turn = reader.ask("Go on")
    expect(turn.locator(".answer")).to_contain_text("Go on")
    # The ranks die in mid-answer; the next question waits until they are back.
    body = {"model": "smollm2", "prompt": [fake_engine.DIE]}
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{page_server.url()}/v1/completions", json=body, headers=headers).is_error
    expect(turn.locator(".note")).to_contain_text("rank")
    again = reader.ask("Still there?")
    expect(again.locator(".answer")).to_contain_text("there", timeout=60_000)
    reader.context.close()


def test_a_busy_server_is_asked_again(reader: Reader, full: httpx.Response) -> None:
    turn = reader.ask("Is there room?")
    words = turn.locator(".reading p")
    said = r"The server is busy \(the queue is full: .*\)\. Asking again in \d+ s\."
    expect(words).to_have_text(re.compile(said))
    full.close()
    expect(turn.locator(".answer")).to_contain_text("room")


def test_ranks_that_end_while_they_read_are_asked_once_more(reader: Reader) -> None:
    progress = {"choices": [], "prompt_progress": {"total": 9, "cache": 0, "processed": 3}}
    failure = {"error": {"message": "rank 1 died", "code": "engine_error"}}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (progress, failure))
    headers, path = {"Content-Type": "text/event-stream"}, "**/v1/chat/completions"
    reader.page.route(path, lambda route: route.fulfill(body=body, headers=headers), times=1)
    expect(reader.answered("Still there?").locator(".answer")).to_contain_text("there")
    reader.page.route(path, lambda route: route.fulfill(body=body, headers=headers), times=2)
    reader.ask("Once more?")
    expect(reader.notice).to_have_text("rank 1 died")
    expect(reader.question).to_have_value("Once more?")


@pytest.mark.long
def test_a_server_that_is_gone_is_waited_for(reader: Reader) -> None:
    reader.context.set_offline(True)
    turn = reader.ask("Anybody?")
    expect(turn.locator(".reading p")).to_contain_text("cannot be reached. Your question is kept")
    expect(reader.state).to_have_text("The server cannot be reached")
    reader.context.set_offline(False)
    expect(turn.locator(".answer")).to_contain_text("Anybody")
    expect(reader.state).to_have_text("Ready")


def test_a_browser_without_abort_signal_any_waits_as_well(reader: Reader) -> None:
    """Safari has it since 17.4, Firefox since 124."""
    reader.page.evaluate("delete AbortSignal.any")
    reader.page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
    turn = reader.ask("Anybody?")
    expect(turn.locator(".reading p")).to_have_text("The server did not answer. Asking again.")
    expect(turn.locator(".answer")).to_contain_text("Anybody")


def test_a_server_that_no_question_reaches_is_not_flooded(reader: Reader) -> None:
    asked: list[Route] = []
    chats = "**/v1/chat/completions"
    reader.page.route(chats, lambda route: (asked.append(route), route.abort()))
    turn = reader.ask("Anybody?")
    expect(turn.locator(".reading p")).to_have_text("The server did not answer. Asking again.")
    reader.page.wait_for_timeout(3000)
    assert len(asked) <= 3
    reader.page.unroute(chats)
    expect(turn.locator(".answer")).to_contain_text("Anybody")


@pytest.mark.long
def test_a_turn_is_asked_again_changed_and_deleted(reader: Reader) -> None:
    reader.add(("fox.txt", STORY.encode()))
    expect(reader.pending).to_contain_text("waits for a question")
    first = reader.answered("Who **went** over the hill?")
    second = reader.answered("And why?")
    expect(first.locator(".regenerate")).to_be_hidden()
    with reader.page.expect_request("**/v1/chat/completions") as sent:
        second.locator(".regenerate").click()
    body = sent.value.post_data_json
    assert body["messages"][-1]["content"] == "And why?" and isinstance(body["seed"], int)
    expect(second.locator(".copy")).to_be_visible()
    expect(reader.page.locator("article")).to_have_count(2)
    first.locator(".remove").click()
    expect(reader.page.locator("article h3")).to_have_text(["And why?"])
    expect(reader.pending).to_contain_text("fox.txt")  # its document goes to the next question
    reader.notice.get_by_role("button", name="Undo").click()
    expect(reader.page.locator("article")).to_have_count(2)
    first.locator(".edit").click()
    expect(reader.question).to_have_value("Who **went** over the hill?")
    expect(reader.page.locator("article")).to_have_count(0)
    with reader.page.expect_request("**/v1/chat/completions") as sent:
        reader.answered("Who went?")
    (message,) = sent.value.post_data_json["messages"]
    assert STORY in message["content"] and message["content"].endswith("Who went?")


def test_what_is_added_before_undo_stays(reader: Reader) -> None:
    items = reader.pending.locator("li")
    waiting = items.filter(has_text="waits for a question")
    held: list[Route] = []
    reader.add(("first.txt", b"One."))
    expect(waiting).to_have_count(1)
    reader.page.route("**/documents/text*", lambda route: held.append(route))
    for number, is_read in ((2, False), (3, True)):
        items.first.locator(".remove").click()
        reader.add((f"{number}.txt", b"Two."))
        expect(items.last).to_contain_text("being read")
        while not held:
            reader.page.wait_for_timeout(20)
        if is_read:
            held.pop().continue_()
            expect(items.last).to_contain_text("waits for a question")
        reader.notice.get_by_role("button", name="Undo").click()
        if not is_read:
            held.pop().continue_()
        expect(waiting).to_have_count(number)
    expect(items).to_contain_text(["first.txt", "2.txt", "3.txt"])


def test_what_is_added_while_an_answer_is_asked_again_stays(reader: Reader) -> None:
    reader.answered("First?")
    held: list[Route] = []
    for path in ("**/documents/text*", "**/v1/chat/completions"):
        reader.page.route(path, lambda route: held.append(route))
    reader.add(("late.txt", b"Late."))
    expect(reader.pending).to_contain_text("being read")
    reader.page.locator("article .regenerate").click()
    while len(held) < 2:
        reader.page.wait_for_timeout(20)
    upload, answer = held
    upload.continue_()
    expect(reader.pending.locator("[data-ready]")).to_contain_text("late.txt")
    answer.fulfill(status=500, json={"error": {"message": "rank 1 died"}})
    expect(reader.notice).to_have_text("rank 1 died")
    expect(reader.page.locator("article h3")).to_have_text(["First?"])
    expect(reader.pending.locator("[data-ready]")).to_contain_text("late.txt")


def test_a_reload_keeps_an_answer_that_is_asked_for_again(reader: Reader) -> None:
    old = reader.answered("First?").locator(".answer").inner_text()
    held: list[Route] = []
    reader.page.route("**/v1/chat/completions", lambda route: held.append(route))
    reader.page.locator("article .regenerate").click()
    while not held:
        reader.page.wait_for_timeout(20)
    reader.page.reload()
    expect(reader.page.locator("article h3")).to_have_text(["First?"])
    expect(reader.page.locator("article .answer")).to_have_text(old)


def test_what_is_pressed_twice_is_done_once(reader: Reader) -> None:
    page, items = reader.page, reader.pending.locator("[data-ready]")
    undo = reader.notice.get_by_role("button", name="Undo")
    reader.add(("caf\u00e9.txt", "Le caf\u00e9".encode("latin-1")))
    page.get_by_role("button", name="Read in this encoding").dblclick()
    expect(items).to_have_count(1)
    reader.answered("Quoi?")
    expect(items).to_have_count(1)
    reader.new.click()
    reader.new.click()
    expect(page.locator("article")).to_have_count(0)
    undo.click()
    expect(page.locator("article")).to_have_count(1)
    context = {"id": "ctx_1", "tokens": 9, "begins": "Kept.", "bytes": {}, "expires_at": 2**32}
    listed = {"data": [{**context, "last_used_at": 1}], "limit_bytes": 2**20}
    messages = {"messages": [{"role": "user", "content": "Kept."}], "goes_on": True}
    page.route("**/v1/contexts", lambda route: route.fulfill(json=listed))
    page.route("**/v1/contexts/*/messages", lambda route: route.fulfill(json=messages))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    reader.contexts.get_by_role("button", name="Ask Kept.").dblclick()
    expect(items).to_contain_text(["Kept text"])
    undo.click()
    expect(page.locator("article")).to_have_count(1)
    page.route("**/v1/contexts*/**", lambda route: route.abort())
    page.route("**/v1/contexts", lambda route: route.abort())
    reader.contexts.get_by_role("button", name="End Kept.").click()
    expect(reader.notice).to_have_text("The server cannot be reached.")
    page.unroute_all(behavior="ignoreErrors")


def test_escape_that_ends_the_composing_of_a_word_stops_no_answer(
    reader: Reader, unread: Path
) -> None:
    turn = reader.ask(STORY)
    expect(turn.locator(".reading p")).to_contain_text("a second")
    reader.question.dispatch_event("keydown", {"key": "Escape", "isComposing": True})
    unread.unlink()
    expect(turn.locator(".copy")).to_be_visible()


def test_an_answer_from_right_to_left(reader: Reader) -> None:
    turn = reader.told("\u05de\u05d4?", "\u05e9\u05dc\u05d5\u05dd.\n\nAnd so on.")
    reader.question.fill("\u05de\u05d4?")
    left = """(one) => {
      const range = document.createRange();
      range.selectNodeContents(one);
      return range.getBoundingClientRect().left - one.getBoundingClientRect().left;
    }"""
    hebrew, english = turn.locator(".answer p").all()
    assert hebrew.evaluate(left) > 100 and english.evaluate(left) < 1
    assert reader.question.evaluate("(one) => getComputedStyle(one).direction") == "rtl"


@pytest.mark.long
def test_a_server_that_does_not_answer_is_told(reader: Reader) -> None:
    held: list[Route] = []
    reader.page.route("**/health", lambda route: held.append(route))
    expect(reader.state).to_have_text("The server cannot be reached")
    reader.page.unroute_all(behavior="ignoreErrors")
    expect(reader.state).to_have_text("Ready")


def test_an_answer_of_marks_within_marks_is_shown(reader: Reader) -> None:
    answers = [">" * 6000, "1. " * 2000, "![" * 1500 + "](" * 1500]
    for answer in answers:
        turn = reader.told("Quote.", answer)
        assert turn.locator(".answer").evaluate("(one) => one.textContent.length") > 1000
    reader.open()
    expect(reader.page.locator("article")).to_have_count(len(answers))


@pytest.mark.long
def test_only_what_closed_tabs_have_left_is_removed(reader: Reader) -> None:
    reader.answered("First?")
    closed = reader.context.new_page()
    closed.goto(reader.url)
    closed.locator("#samples button").first.click()
    expect(closed.locator("article .copy")).to_be_visible()
    closed.close()
    script = """async (age) => {
      const done = (request) => new Promise((resolve) => {
        request.onsuccess = () => resolve(request.result);
      });
      const opened = await done(indexedDB.open("razor_dist", 1));
      const tabs = opened.transaction("tabs", "readwrite").objectStore("tabs");
      const keys = await done(tabs.getAllKeys());
      for (const key of age ? keys : []) {
        await done(tabs.put({ ...(await done(tabs.get(key))), time: 0 }, key));
      }
      return keys.length;
    }"""
    assert reader.page.evaluate(script, True) == 2
    other = reader.context.new_page()
    other.goto(reader.url)
    expect(other.locator("html[data-loaded]")).to_be_attached()
    reader.page.reload()
    expect(reader.page.locator("article h3")).to_have_text(["First?"])
    assert reader.page.evaluate(script, False) == 2  # this tab's and the other's


def test_a_duplicated_tab_has_a_conversation_of_its_own(reader: Reader) -> None:
    reader.answered("First?")
    with reader.page.expect_popup() as opened:
        reader.page.evaluate("void open(location.href)")  # with a copy of sessionStorage
    copy = opened.value
    expect(copy.locator("article")).to_have_count(1)
    reader.answered("Second?")
    copy.locator("article .remove").click()
    expect(copy.locator("article")).to_have_count(0)
    for page, turns in ((reader.page, 2), (copy, 0)):
        page.reload()
        expect(page.locator("html[data-loaded]")).to_be_attached()
        expect(page.locator("article")).to_have_count(turns)


def test_after_a_failure_each_turn_is_still_itself(reader: Reader) -> None:
    first = reader.answered("First?")
    reader.answered("Second?")
    answer = {"status": 500, "json": {"error": {"message": "rank 1 died"}}}
    reader.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    reader.ask("Third?")
    expect(reader.notice).to_have_text("rank 1 died")
    first.locator(".remove").click()
    expect(reader.page.locator("article h3")).to_have_text(["Second?"])


@pytest.mark.long
def test_the_sample_answers_and_a_reload_stays_where_it_was(reader: Reader) -> None:
    reader.samples.get_by_role("button", name="Who built the harbour?").click()
    turn = reader.page.locator("article")
    expect(turn.locator(".copy")).to_be_visible()
    expect(reader.pending).to_contain_text("harbour.md")
    for number in range(4):
        reader.answered(f"And then {number}?")
    reader.page.evaluate("scrollTo(0, 222)")
    reader.open()
    assert reader.page.evaluate("scrollY") == 222
    reader.page.emulate_media(media="print")
    assert not reader.page.locator("#ask").is_visible()


@pytest.mark.slow
def test_five_megabytes(reader: Reader) -> None:
    paragraph = "It was the best of times, it was the worst of times.\n"
    reader.add(("long.txt", (paragraph * (5 * 2**20 // len(paragraph))).encode()))
    expect(reader.pending).to_contain_text("about 1,310,7")
    turn = reader.ask("How were the times?")
    expect(turn.locator(".reading p")).to_contain_text("a second", timeout=60_000)
    expect(turn.locator(".copy")).to_be_visible()
    expect(turn.locator(".usage")).to_contain_text("Prompt 1,")
