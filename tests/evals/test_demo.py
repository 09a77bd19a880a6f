"""The demo's pure parts; `make demo` itself is run by hand."""

from __future__ import annotations

import pytest
from rich.console import Console

from razor_dist.evals import demo
from razor_dist.evals.savings import Savings

PARAGRAPHS = [f"Paragraph {i} says\nnothing  of note." for i in range(3000)]


def words(text: str) -> int:
    return len(text.split())


def test_the_document_hides_the_sentence_once_and_where_it_says() -> None:
    document = demo.build_document(PARAGRAPHS, words)
    assert document.count(demo.SENTENCE) == document.count(demo.NUMBER) == 1
    assert demo.DOCUMENT_TOKENS - 20 <= words(document) <= demo.DOCUMENT_TOKENS
    depth = 100 * document.index(demo.SENTENCE) / len(document)
    assert depth == pytest.approx(demo.DEPTH, abs=1)
    assert "\n\nParagraph 1 says nothing of note.\n\n" in document
    assert document == demo.build_document(PARAGRAPHS, words)


def test_too_little_prose_is_refused() -> None:
    with pytest.raises(ValueError, match="the document wants 7000"):
        demo.build_document(PARAGRAPHS[:10], words)


def test_events_are_the_data_lines_up_to_done() -> None:
    lines = [": heartbeat", "", 'data: {"a": 1}', "", "data: [DONE]", 'data: {"a": 2}']
    assert list(demo.events(lines)) == [{"a": 1}]


def test_decode_speed_leaves_the_first_token_out() -> None:
    answer = demo.Answer("", 7000, 11, first_token_seconds=20.0, total_seconds=25.0)
    assert answer.tokens_per_second == 2.0


def counters(ring: int, peak: list[int]) -> dict[str, object]:
    return {
        "world_size": 2,
        "retrieval_fraction": 0.25,
        "peak_kv_bytes_per_rank": peak,
        "bytes_sent": {"ring": ring, "halo": 0},
    }


def savings(peak: list[int]) -> Savings:
    return Savings.between(
        counters(100, [0, 0]),
        counters(1100, peak),
        tokens=12,
        prompt_tokens=10,
        full_kv_bytes_per_token=1000,
    )


def test_savings_are_the_difference_between_two_readings() -> None:
    saved = savings([3000, 5000])
    assert saved.kv_bytes_per_rank == 5000
    assert saved.bytes_sent == {"ring": 1000, "halo": 0}
    assert saved.full_on_one_rank == 12_000
    assert saved.full_per_rank == 6000
    assert saved.full_ring_bytes == 10_000


@pytest.mark.parametrize(("peak", "said"), [(5000, False), (7000, True)])
def test_a_loss_is_said(peak: int, said: bool) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(savings([peak, 0]).table())
    assert ("outweighs" in capture.get()) == said


def test_the_sizes_of_full_attention_are_the_models() -> None:
    from razor_dist.evals.savings import full_kv_bytes

    assert full_kv_bytes("smollm2") == 2 * 30 * 3 * 64 * 4
