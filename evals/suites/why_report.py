"""The report of ``eval why``: each lost answer with its reason, and lost beside kept ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from razor_dist.evals.report import (
    INTERVAL,
    grouped,
    interval,
    join,
    markdown,
    section,
    write_json,
    write_page,
)
from razor_dist.evals.suites.why import CHANCE, KEPT, LOST, UNSURE, verdict

SUMMARY, PAGE = "why.json", "report.md"
Result = Mapping[str, Any]
_FIGURES = {
    "carried_by_retrieval": "on the place, by retrieval heads",
    "dropped_question": "dropped, question",
    "dropped_answer": "dropped, answer",
}


def write_report(
    folder: Path, method: str, results: Sequence[Result], *, one_document: bool = False
) -> str:
    """Write the JSON and Markdown report of a `WhyTask`; returns the Markdown.

    With ``one_document`` all tasks ask about the same documents.
    """
    lost = [{**result, **_reason(result)} for result in results if result["kind"] == LOST]
    write_json(folder / SUMMARY, {"method": method, "lost": lost, "results": list(results)})
    reasons = Counter(result["reason"] for result in lost)
    counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    return write_page(
        folder / PAGE,
        f"# Why {method} lost {len(lost)} answers",
        f"{counts}. `model`: full attention gave the first lost token less than {UNSURE:.0%}, and "
        f"{method} adds less than {CHANCE:g} nat to the loss of the whole answer. Else the reason "
        "is the change that keeps the answer: each of the tokens that earned full attention's "
        "score is then the likeliest, or, where full attention was that unsure, at most half of "
        "the added loss remains. Other heads are as many KV heads, those whose "
        "windows drop most of their attention in this sample: a bound, not a map to be had.",
        _answers(lost),
        _heads(lost),
        _beside_kept(results, one_document=one_document),
    )


def _reason(result: Result) -> dict[str, Any]:
    reason, sure = verdict(result["variants"])
    return {"reason": reason, "sure": sure}


def _name(result: Result) -> str:
    question = f", question {result['question'] + 1}" if result["question"] else ""
    return f"{result['task']} {result['length']}/{result['number']}{question}"


def _answers(lost: Sequence[Result]) -> str:
    tried = list(dict.fromkeys(name for result in lost for name in result["variants"]))
    rows = [["answer", "wanted", "full says", "reason", "full was sure", *tried]]
    for result in lost:
        cells = [
            f"{'kept, ' if own['kept'] else ''}{own['loss']:.2f}"
            if (own := result["variants"].get(name))
            else "-"
            for name in tried
        ]
        texts = (", ".join(result["wanted"]), result["answer"])
        shown = (" ".join(text.split())[:60] for text in texts)
        rows.append([_name(result), *shown, result["reason"], f"{result['sure']:.0%}", *cells])
    note = "Numbers are the loss of full attention's answer in nats, all of its tokens together."
    return section("## Answers", rows, note)


def _heads(lost: Sequence[Result]) -> str:
    rows = [["answer", "on the place, at most", "step by step", "dropped, at most"]]
    for result in lost:
        carriers = _shown(result["carriers"]) if result["places"] else "-"
        steps = _shown(result["steps"]) if result["places"] else "-"
        rows.append([_name(result), carriers, steps, _shown(result["dropped_most"])])
    note = (
        "Layer.head, and the part of its attention, of full attention: on the tokens that state "
        "the answer, mean over the answer's tokens and the strongest at each; and of streaming "
        "heads, on what their windows drop. `*` marks the method's retrieval heads."
    )
    return section("## Heads", rows, note)


def _shown(heads: Sequence[Sequence[Any]]) -> str:
    return ", ".join(
        f"{layer}.{head}{'*' if kept else ''} {weight:.0%}" for layer, head, weight, kept in heads
    )


def _beside_kept(results: Sequence[Result], *, one_document: bool) -> str:
    rows = [["answers", "", *_FIGURES.values()]]
    for kind in (LOST, KEPT):
        own = [result for result in results if result["kind"] == kind]
        if own:
            means = [_mean(own, name, one_document=one_document) for name in _FIGURES]
            rows.append([kind, str(len(own)), *means])
    note = (
        f"Means over documents with their {INTERVAL}: of the attention to the "
        "tokens that state the answer, the part that is the retrieval heads' (where they are "
        "stated); and of streaming heads' attention the part that their windows drop."
    )
    return join("## Lost beside kept", markdown(rows), note)


def _mean(results: Sequence[Result], name: str, *, one_document: bool) -> str:
    stated = [r for r in results if r["places"] or name != "carried_by_retrieval"]
    if not stated:
        return "-"
    # Questions about one document are not independent.
    documents = grouped(stated, lambda r: (r["length"], r["number"], one_document or r["task"]))
    found = [fmean(result[name] for result in own) for own in documents.values()]
    low, high = interval(found)
    return f"{fmean(found):.1%} ({low:.1%}-{high:.1%})"
