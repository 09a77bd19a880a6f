"""Lines and rates of a job, by what was read and written."""

from __future__ import annotations

import pytest

from razor_dist.config.errors import DocumentError, EngineError
from razor_dist.jobs.pool import ItemUpdate, Outcome
from razor_dist.jobs.progress import JobProgress
from razor_dist.jobs.task import ANSWER_TOKEN, Item, ItemSize, PartResult, TokensDone


def test_the_progress_counts_what_was_read() -> None:
    now = [0.0]
    items = [Item("a", size=1000), Item("b", size=3000), Item("c", size=10**9), Item("d", size=5)]
    with JobProgress(items, before=2, clock=lambda: now[0]) as progress:
        now[0] = 60.0  # of which the engine took 50 to start
        unread = Outcome(items[2], None, DocumentError("x"), attempts=1, seconds=0.0, engine=0)
        progress.finished(unread)
        assert progress.line(unread).endswith("nothing read so far, time left unknown")
        now[0] = 70.0
        outcome = Outcome(items[0], {}, None, attempts=1, seconds=10.0, engine=0)
        progress.finished(outcome)
        expected = "4/6 (1 failed) | a done in 10.0 s | 100.0 tokens/s, 00:30 left"
        assert progress.line(outcome) == expected
        progress.updated(ItemUpdate(items[1], ItemSize(1000, 3, 1)))  # less than was estimated
        progress.updated(ItemUpdate(items[3], ItemSize(500)))
        progress.updated(ItemUpdate(items[1], PartResult("k", {}, 500)))
        assert progress.rate() == "150.0 tokens/s, 00:06 left"
        outcome = Outcome(items[1], None, EngineError("x"), attempts=3, seconds=1.0, engine=0)
        progress.finished(outcome)
        assert progress.line(outcome) == (
            "5/6 (2 failed) | b FAILED (attempts: 3): EngineError('x') | 150.0 tokens/s, 00:03 left"
        )


def test_prompts_and_answers_in_work_count_as_they_grow(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    item, refused = Item("a", size=9999), Item("refused", size=500)
    with JobProgress([item, refused], clock=lambda: now[0]) as progress, caplog.at_level("INFO"):

        def tell(update: ItemSize | PartResult | TokensDone) -> None:
            progress.updated(ItemUpdate(item, update))

        tell(ItemSize(2000 + 50 * ANSWER_TOKEN))
        tell(TokensDone(found=600, found_answer=7, left=1400 + 43 * ANSWER_TOKEN))
        assert progress.rate() == "nothing read so far, time left unknown"
        now[0] = 10.0
        tell(TokensDone(prefilled=1400, left=43 * ANSWER_TOKEN))
        # 140 tokens/s, so 43 of an answer take 4.9 s, and 500 of another prompt 3.6 s.
        assert progress.rate() == "140.0 tokens/s, 00:08 left"
        tell(PartResult("k+0", {"tokens": [1]}, 0, whole=False))
        progress.updated(ItemUpdate(refused, ItemSize(0)))
        progress.finished(Outcome(refused, {"status_code": 400}, None, 1, 0.0, 0))
        assert progress.rate() == "140.0 tokens/s, 00:04 left"
        now[0] = 20.0
        tell(TokensDone(generated=30, left=0))
        progress.finished(Outcome(item, {}, None, attempts=1, seconds=20.0, engine=0))
        assert progress.rate() == "70.0 tokens/s, 00:00 left"
    told = [record.getMessage() for record in caplog.records]
    assert "a: 600 tokens of a prompt and 7 of its answer are there from an earlier run" in told
    assert "1,400 tokens of prompts read, 30 of answers written (100 %) | 70.0 tokens/s" in told[-2]


def test_parts_that_are_done_before_their_number_is_known(caplog: pytest.LogCaptureFixture) -> None:
    item = Item("a", size=200)
    with JobProgress([item]) as progress, caplog.at_level("INFO"):
        progress.updated(ItemUpdate(item, PartResult("k", {}, 100)))
        progress.updated(ItemUpdate(item, ItemSize(200, 3, 1)))
        progress.updated(ItemUpdate(item, PartResult("l", {}, 100)))
    assert [record.getMessage().partition(" |")[0] for record in caplog.records] == [
        "a: part 1 done",
        "a: 1 of 3 parts are there already",
        "a: part 2 of 3 done",
    ]
