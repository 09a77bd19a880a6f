"""The demo's pure parts; `make demo` itself is run by hand."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from rich.console import Console

from razor_dist import cli
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import reference_paragraphs
from razor_dist.evals import demo, serving
from razor_dist.evals.demo import Savings
from razor_dist.plan.deployment import Deployment


def words(text: str) -> int:
    return len(text.split())


def test_the_document_hides_the_sentence_once_and_where_it_says() -> None:
    document = demo.build_document(words)
    assert document.count(demo.SENTENCE) == document.count(demo.NUMBER) == 1
    assert demo.DOCUMENT_TOKENS - 250 <= words(document) <= demo.DOCUMENT_TOKENS
    depth = 100 * document.index(demo.SENTENCE) / len(document)
    assert depth == pytest.approx(demo.DEPTH, abs=1)
    assert f"\n\n{reference_paragraphs()[1]}\n\n" in document


def test_events_are_the_data_lines_up_to_done() -> None:
    lines = ["", "", ": comment", "", 'data: {"a": 1}', "", "data: [DONE]", 'data: {"a": 2}']
    assert list(serving.events(lines)) == [{"a": 1}]


def test_a_log_read_while_it_is_written_keeps_every_line() -> None:
    """The program's standard output and the reader are one open file: a seek would move both."""
    program = "for i in range(20_000): print('line', i, flush=True)"
    with serving.ServerProcess(sys.executable, "-c", program) as server:
        while server.process.poll() is None:
            assert "line 0\n".startswith(server.log[:7])
    assert server.log.splitlines() == [f"line {i}" for i in range(20_000)]


def test_decode_speed_leaves_the_first_token_out() -> None:
    answer = serving.Answer("", 7000, 0, 11, first_token_seconds=20.0, total_seconds=25.0)
    assert answer.tokens_per_second == 2.0


def counters(ring: int, peak: list[int]) -> dict[str, object]:
    return {
        "world_size": 2,
        "retrieval_fraction": 0.25,
        "decode": "replicated",
        "peak_kv_bytes_per_rank": peak,
        "bytes_sent": {"ring": ring, "halo": 0},
    }


def savings(peak: list[int]) -> Savings:
    return Savings.between(
        counters(100, [0, 0]),
        counters(1100, peak),
        tokens=12,
        prompt_tokens=10,
        token_bytes=1000,
    )


def test_savings_are_the_difference_between_two_readings() -> None:
    saved = savings([3000, 5000])
    assert saved.kv_bytes_per_rank == 5000
    assert saved.bytes_sent == {"ring": 1000}
    assert saved.full_per_rank == 6000
    assert saved.full_ring_bytes == 4000, "a quarter of the heads sent 1000"


def printed(shown: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_a_loss_is_said_with_where_the_saving_begins() -> None:
    assert "from about" not in printed(savings([5000, 0]).tables())
    # 1500 of 7000 bytes are the retrieval heads'; a token of the others takes 750.
    page = printed(savings([7000, 0]).tables())
    assert "window whole, 7 tokens; a share of full attention's is 6." in page
    assert "2 ranks keep less than full attention from about 15 tokens on." in page
    shared = printed(replace(savings([7000, 0]), shared=True).tables())
    assert "window whole" not in shared and shared.count("MB") == page.count("MB")


def test_one_rank_sends_nothing() -> None:
    alone = replace(savings([7000]), world_size=1, bytes_sent={})
    page = printed(alone.tables())
    assert "sent between" not in page and "share of 1" not in page


def test_the_sizes_of_full_attention_are_the_models() -> None:
    deployment = Deployment.of(EngineConfig(model=demo.MODEL), "cpu")
    assert deployment.full_kv_bytes == 2 * 30 * 3 * 64 * 4


def test_progress_without_a_terminal_is_lines() -> None:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture, demo._activity("reading", console) as progress:
        for done in (0, 10, 20):
            progress(done, 20)
    assert capture.get() == "   reading ...\n   reading: 20 of 20 tokens\n"


def test_other_flags_go_to_the_server_and_prevail(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def no_server(*flags: str, **_: object) -> None:
        given.extend(flags)
        raise serving.ServingError("none here")

    monkeypatch.setattr(demo, "serve", no_server)
    assert cli.main(["demo", "--world-size", "3", "--window-ratio", "7"]) == 1
    assert "--world-size=3" in given and given[-2:] == ["--window-ratio", "7"]
