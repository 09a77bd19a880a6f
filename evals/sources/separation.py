"""Areas under the ROC curve of numbers that are to separate right answers from others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from razor_dist.evals.report import markdown, widened

_RESAMPLINGS = 1000

# An answer's kind (right, wrong, absent), and its numbers by their names.
Scored = tuple[str, Mapping[str, float]]


def roc_auc(yes: Sequence[float], no: Sequence[float]) -> float:
    """Return the chance that one of ``yes`` is above one of ``no``; half for equal ones."""
    pairs = [(a > b) + 0.5 * (a == b) for a in yes for b in no]
    return sum(pairs) / max(1, len(pairs))


def auc_interval(yes: Sequence[float], no: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of `roc_auc`, by resampling both.

    It is `widened` as if there were as many pairs as the smaller class has answers: resamplings of
    classes that are apart are all alike.
    """
    draw = random.Random(0)
    found = sorted(
        roc_auc(draw.choices(yes, k=len(yes)), draw.choices(no, k=len(no)))
        for _ in range(_RESAMPLINGS)
    )
    outside = _RESAMPLINGS // 40
    inner = found[outside], found[-1 - outside]
    return widened(inner, roc_auc(yes, no), min(len(yes), len(no)))


def separation(task: str, answers: Sequence[Scored]) -> list[dict[str, Any]]:
    """Return of each number and kind of other answers: both means, the AUC and its interval."""
    rows = []
    right = [numbers for kind, numbers in answers if kind == "right"]
    for other in ("wrong", "absent"):
        others = [numbers for kind, numbers in answers if kind == other]
        for name in right[0] if right and others else ():
            yes, no = ([numbers[name] for numbers in of] for of in (right, others))
            rows.append(
                {
                    "task": task,
                    "others": other,
                    "counts": (len(yes), len(no)),
                    "number": name,
                    "means": (sum(yes) / len(yes), sum(no) / len(no)),
                    "auc": roc_auc(yes, no),
                    "interval": auc_interval(yes, no),
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `separation` as Markdown."""
    head = ["task", "others", "right, others", "number", "mean: right", "others", "AUC", "95 %"]
    body = [
        [
            row["task"],
            row["others"],
            ", ".join(map(str, row["counts"])),
            f"`{row['number']}`",
            *(f"{value:.2f}" for value in (*row["means"], row["auc"])),
            " to ".join(f"{value:.2f}" for value in row["interval"]),
        ]
        for row in rows
    ]
    return markdown([head, *body], "numbers")
