"""Room in the engine's core: what pinned prefixes make it refuse, and who goes before whom."""

from __future__ import annotations

from unittest import mock

import pytest

from razor_dist.config.errors import RequestError
from razor_dist.protocol.messages import Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from tests.engine.pages_only import MAX_LEN, TAIL, WIDEST, add, make_core, run, step


@pytest.mark.parametrize("chained", [0, 10])
def test_a_pinned_prefix_leaves_room_for_a_token(chained: int) -> None:
    core, _ = make_core(pages=60)
    prefix = None
    if chained:
        add(core, "first", chained, pin=True)
        prefix = "first"
    with pytest.raises(RequestError, match=r"holds 40 tokens; the pinned prefix has 40") as error:
        add(core, "doc", MAX_LEN - chained, pin=True, prefix=prefix)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    add(core, "doc", MAX_LEN - 1 - chained, pin=True, prefix=prefix)
    run(core)


def test_pinned_prefixes_in_every_slot_refuse_what_could_never_start() -> None:
    core, _ = make_core(slots=2)
    add(core, "one", 4, pin=True)
    add(core, "two", 4, pin=True)  # nothing has run yet: what waits counts as well
    for prefix in (None, "one"):
        with pytest.raises(
            RequestError, match=r"hold 2 of .* 2 seq.*max_num.*\(2 are pinned: one, two\)$"
        ) as error:
            add(core, "question", 3, prefix=prefix)
        assert error.value.code == "pinned_prefixes_hold_cache"
    with pytest.raises(RequestError, match="max_num_seqs"):
        add(core, "three", 4, pin=True)
    run(core)
    core.abort("one")
    add(core, "question", 3, prefix="two")
    assert [m.finish for m in run(core) if isinstance(m, Token)] == ["length"]
    assert (core.scheduler.active, core.scheduler.sequences) == (0, 1)


def test_pinned_prefixes_in_the_pages_refuse_what_could_never_start() -> None:
    core, runner = make_core(pages=10)
    add(core, "doc", 12, pin=True)
    with pytest.raises(
        RequestError, match=r"hold 12 of the 20 .* needs 10; .*kv_tok.*: doc\)$"
    ) as no:
        add(core, "other", 8, 2)
    assert no.value.code == "pinned_prefixes_hold_cache"
    add(core, "fits", 7, 1)
    add(core, "question", 7, 1, prefix="doc")  # shares the document's pages
    with pytest.raises(RequestError, match="needs 22 tokens") as too_large:
        add(core, "never", 9, 1, prefix="doc")
    assert too_large.value.code == "kv_capacity_exceeded"
    run(core)
    core.abort("doc")
    add(core, "other", 8, 2)
    run(core)
    assert runner.pools[0].free_pages == 10


def test_pinned_prefixes_in_the_streaming_caches_refuse_what_could_never_start() -> None:
    """A continuation shares the pages of its prefix, but has a window of its own."""
    core, runner = make_core(pages=60, places=WIDEST - TAIL + 8)
    add(core, "doc", 30, pin=True)
    with pytest.raises(RequestError, match=r"needs 37 tokens of the str.*has 30; .*window_max"):
        add(core, "question", 2, 4, prefix="doc")
    with pytest.raises(RequestError, match=r"hold 17 of the 30 .* needs 14; .*: doc\)$") as no:
        add(core, "other", 20, 4)
    assert no.value.code == "pinned_prefixes_hold_cache"
    add(core, "fits", 8, 2)
    run(core)
    core.abort("doc")
    add(core, "other", 20, 4)
    run(core)
    assert runner.streaming[0].free_places == runner.streaming[0].arena.places


@pytest.mark.parametrize("pin", [False, True])
def test_others_pass_a_request_whose_prefix_is_being_prefilled(pin: bool) -> None:
    """With a pinned prefix behind it, too."""
    core, _ = make_core(pages=30)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "doc", 24, pin=True)
    add(core, "question", 2, 1, prefix="doc")
    if pin:
        add(core, "another doc", 3, pin=True)
    add(core, "other", 3, 1)
    ends = [m.id for m in run(core) if isinstance(m, Token) and m.finish]
    assert ends == ["other", "question"]


@pytest.mark.parametrize(
    ("answer", "order"), [(1, ["asks", "question"]), (12, ["question", "asks"])]
)
def test_a_pinned_prefix_passes_a_request_that_fits_beside_it(
    answer: int, order: list[str]
) -> None:
    """The request waits until its document is read, and would wait for ever without its room."""
    core, _ = make_core(pages=20)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "document", 24, pin=True)
    add(core, "question", 2, answer, prefix="document")
    add(core, "mark", 3, pin=True)
    add(core, "asks", 2, 1, prefix="mark")
    assert [m.id for m in run(core) if isinstance(m, Token) and m.finish] == order


def test_others_pass_a_pinned_prefix_while_no_more_may_be_pinned() -> None:
    core, _ = make_core(pages=60, places=9 * WIDEST, share=True)
    for name in "abcd":
        add(core, name, 3, pin=True, salt=name)
    run(core)
    add(core, "long", 3, 20, prefix="d")
    step(core)
    core.abort("d")  # which goes with the answer that continues it
    add(core, "e", 3, pin=True, salt="e")
    add(core, "other", 3, 1)
    messages = run(core)
    ends = [m.id for m in messages if isinstance(m, Token) and m.finish]
    assert ends == ["other", "long"]
    assert {request.id for request in core.scheduler.pinned.values()} == set("abce")


def test_pages_that_pinned_prefixes_share_count_once() -> None:
    core, _ = make_core(pages=8, share=True, tail=TAIL)
    add(core, "first", 8, pin=True)
    run(core)
    add(core, "question", 4, prefix="first")
    run(core)
    add(core, "second", 4, pin=True, prefix="first")  # begins with the question, 12 tokens
    cached = {m.cached for m in run(core) if isinstance(m, Progress) and m.id == "second"}
    assert cached == {11}


@pytest.mark.parametrize("answer, more, pages", [(2, 3, 10), (3, 3, 11), (4, 2, 11)])
def test_what_continues_a_waiting_prefix_fits_beside_it_as_it_is_dealt(
    answer: int, more: int, pages: int
) -> None:
    """Tokens from the cache are dealt to ranks less evenly than tokens that are read anew."""
    core, _ = make_core(ranks=2, pages=pages, slots=1, places=9 * WIDEST, share=True, tail=TAIL)
    core.scheduler.prefill_policy.is_short = lambda *_: False
    core.add("turn", [1] * 11, SamplingParams(temperature=0, max_tokens=answer))
    run(core)
    text = [1] * 11 + [0] * (answer - 1) + [2] * more
    core.add("doc", text, SamplingParams(), pin=True)
    add(core, "question", 1, None, prefix="doc")  # all that is left
    assert [m.id for m in run(core) if isinstance(m, Token) and m.finish] == ["question"]


def test_a_released_prompt_that_is_still_continued_holds_nothing_back() -> None:
    core, runner = make_core(pages=10, slots=2)
    add(core, "doc", 12, pin=True)
    add(core, "question", 2, 3, prefix="doc")
    core.abort("doc")
    add(core, "large", 16, 2)  # waits for the question, with which the document goes
    messages = run(core)
    ends = [m.id for m in messages if isinstance(m, Token) and m.finish]
    assert ends == ["question", "large"]
    assert not any(m.id == "doc" for m in messages)
    assert runner.pools[0].free_pages == 10


def test_a_released_prompt_that_a_pinned_one_continues_counts() -> None:
    core, runner = make_core(slots=2)
    add(core, "first", 4, pin=True)
    add(core, "second", 4, pin=True, prefix="first")
    core.abort("first")
    with pytest.raises(RequestError, match=r"hold 2 .*: second, first\)$") as error:
        add(core, "question", 1, prefix="second")
    assert error.value.code == "pinned_prefixes_hold_cache"
    run(core)  # the second holds the pages of both
    assert [request.id for request in core.scheduler.pinned.values()] == ["second"]
    add(core, "question", 1, prefix="second")
    run(core)
    core.abort("second")
    assert runner.lengths == {}


@pytest.mark.parametrize("marked", [10, 11])
def test_a_page_of_its_own_keeps_no_pinned_prefix_from_the_cache(marked: int) -> None:
    core, _ = make_core(share=True, tail=TAIL, pages=60, places=9 * WIDEST)
    add(core, "turn", 18)
    add(core, "mark", marked, pin=True)
    run(core)
    add(core, "rest", 18 - marked, pin=True, prefix="mark")
    progress = [m for m in run(core) if isinstance(m, Progress) and m.id == "rest"]
    assert progress[-1].cached == 17


def test_a_sequence_in_use_is_never_evicted() -> None:
    """Even if reading it again would cost less than what the cache keeps."""
    core, runner = make_core(pages=14, share=True)
    add(core, "kept", 12, salt="1")
    run(core)
    add(core, "used", 4, 6, salt="2")
    messages = []
    while not any(isinstance(m, Token) for m in messages):
        messages += step(core)
    [kept] = runner.cached
    [used] = core.scheduler.running
    add(core, "other", 10, salt="3")
    messages += step(core)
    assert kept not in runner.tables and used in runner.tables
    messages += run(core)
    assert [m.id for m in messages if isinstance(m, Token)].count("used") == 6


def test_what_a_prompt_begins_from_is_not_evicted_for_it() -> None:
    core, runner = make_core(pages=15, share=True)
    add(core, "begun", 12)
    run(core)
    [begun] = runner.cached
    add(core, "worth more", 16, salt="2")
    run(core)
    add(core, "longer", 20)
    messages = run(core)
    assert {m.cached for m in messages if isinstance(m, Progress)} == {12}
    assert begun in runner.cached and len(runner.cached) == 2


def test_exact_prefill_needs_scratch_pages_for_the_prompt_alone() -> None:
    with pytest.raises(RequestError, match=r"20 in all\), which has 8; .* larger kv_tokens"):
        add(make_core(pages=4, scratch=20)[0], "long", 19)
    core, runner = make_core(pages=20, scratch=4)
    add(core, "fits", 8, 4)
    add(core, "doc", 8, pin=True)
    add(core, "question", 9, prefix="doc")  # what continues a prompt is read with local prefill
    run(core)
    assert runner.scratch[0].free_pages == 4


def test_a_prompt_of_fewer_tokens_than_shards_is_not_read_beyond_its_end() -> None:
    core, runner = make_core(ranks=8)
    core.scheduler.prefill_policy.is_short = lambda *_: False
    add(core, "a", 13, 2)
    run(core)
    assert runner.lengths == {}


def test_priority_overtakes_no_request_that_alone_keeps_a_released_prefix() -> None:
    core, runner = make_core(pages=10, slots=3, by_priority=True)
    add(core, "doc", 8, pin=True)
    run(core)
    add(core, "r", 9, 2)
    step(core)
    add(core, "q", 8, 4, prefix="doc", priority=1)
    step(core)
    core.abort("doc")  # kept for q, which waits for r's pages
    add(core, "b", 16, 3, priority=-1)
    run(core)
    assert runner.lengths == {}


def test_a_request_that_waits_for_a_prefill_is_looked_up_once() -> None:
    """In a prefix of a million tokens, a look-up takes milliseconds for each waiting request."""
    core, _ = make_core(pages=120, slots=8, places=9 * WIDEST, share=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    for name in "abcd":
        add(core, name, 30)
    cache = core.scheduler.room.prefix_cache
    with mock.patch.object(cache, "find", wraps=cache.find) as find:
        for _ in range(4):
            step(core)
            assert find.call_count == 4 and len(core.scheduler.prefills) == 1
        run(core)
    assert find.call_count == 4 + 3  # the others, once they can begin from the first


@pytest.mark.parametrize(("position", "begin"), [(0, 10), (18, 0)])
def test_a_prompt_does_not_wait_for_the_end_of_a_much_longer_one(position: int, begin: int) -> None:
    """They share 11 tokens: the longer one stops there for a copy, unless it has gone further."""
    core, _ = make_core(pages=120, slots=8, places=40 * WIDEST, share=True, tail=MAX_LEN)
    core.scheduler.prefill_policy.joins = lambda *_: False
    core.scheduler.prefill_policy.is_quick = lambda *_: False
    add(core, "long", 38)
    step(core)
    [long] = core.scheduler.prefills.values()
    while long.position < position:
        step(core)
    add(core, "short", 14, text=2)
    while len(core.scheduler.prefills) < 2:
        step(core)
    _, short = core.scheduler.prefills.values()
    assert (long.position, short.begin) == (max(position, begin), begin)
    run(core)


def test_nothing_waits_for_a_prefill_of_a_later_priority() -> None:
    """Requests of an earlier priority may keep coming, so that the prefill would never go on."""
    core, _ = make_core(pages=120, share=True, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "later", 30, priority=1)
    step(core)
    step(core)
    add(core, "first", 30, salt="another")
    step(core)
    add(core, "same", 30)
    step(core)
    assert [one.request.id for one in core.scheduler.prefills.values()] == [
        "later",
        "first",
        "same",
    ]
    run(core)


def test_an_aborted_prompt_that_is_kept_ends_before_others_of_any_priority() -> None:
    """Requests of an earlier priority may keep coming, and it has all its caches until then."""
    core, _ = make_core(pages=200, slots=6, places=9 * WIDEST, share=True, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "later", 39, priority=5)
    while not any(p.position >= 32 for p in core.scheduler.prefills.values()):
        step(core)
    core.abort("later")
    for name in "ab":
        add(core, name, 38, priority=-1, salt=name)
    for _ in range(3):
        step(core)
    assert [one.request.id for one in core.scheduler.prefills.values()] == ["a", "b"]
    run(core)


def test_a_prefix_is_prefilled_with_the_priority_of_what_waits_for_it() -> None:
    core, _ = make_core(pages=120, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "doc", 30, pin=True)
    step(core)
    add(core, "first", 30, priority=-1)
    add(core, "question", 2, prefix="doc", priority=-2)
    ends = [m.id for m in run(core) if isinstance(m, Token) and m.finish]
    assert ends == ["question", "first"]


def test_a_prefix_has_the_priority_of_what_still_waits_for_it() -> None:
    core, _ = make_core(pages=120, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "doc", 30, pin=True, priority=1)
    step(core)
    add(core, "first", 30, priority=-1)
    add(core, "question", 2, prefix="doc")
    add(core, "urgent", 2, prefix="doc", priority=-2)
    doc = core.scheduler.prefills[min(core.scheduler.prefills)].request
    assert doc.priority == -2
    core.abort("urgent")
    assert doc.priority == 0
    ends = [m.id for m in run(core) if isinstance(m, Token) and m.finish]
    assert ends == ["first", "question"]


def test_a_request_waits_for_a_prefill_of_its_own_priority_while_others_go_first() -> None:
    core, _ = make_core(pages=120, share=True, by_priority=True)
    core.scheduler.prefill_policy.joins = lambda *_: False
    add(core, "later", 30, priority=1)
    step(core)
    add(core, "same", 30, priority=1)
    step(core)
    add(core, "first", 30, salt="another")
    step(core)
    step(core)
    assert [one.request.id for one in core.scheduler.prefills.values()] == ["later", "first"]
    run(core)


def test_what_waits_for_a_place_asks_nothing_of_the_answers_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every step would see how far each can be cut back, which takes milliseconds for 64."""
    core, _ = make_core(pages=60, slots=2, places=9 * WIDEST, share=True)
    core.scheduler.batch.drafter = None
    for name, answer in (("a", 12), ("b", 20)):
        add(core, name, 4, answer, salt=name)
    while len(core.scheduler.running) < 2:
        step(core)
    add(core, "c", 4)
    looked: list[int] = []
    monkeypatch.setattr(core.scheduler.room, "grown", lambda key, _: looked.append(key))
    for _ in range(3):
        step(core)
    assert not looked and len(core.scheduler.waiting) == 1
    [longer] = [key for key, of in core.scheduler.running.items() if of.id == "b"]
    run(core)
    assert looked == [longer]
