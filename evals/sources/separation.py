"""Areas under the ROC curve of numbers that are to separate right answers from others."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from razor_dist.evals.report import markdown, widened

_RESAMPLINGS = 1000

# An answer's kind (right, wrong, absent), its document, and its numbers by their names.
Scored = tuple[str, str, Mapping[str, float]]


def roc_auc(yes: Sequence[float], no: Sequence[float]) -> float:
    """Return the chance that one of ``yes`` is above one of ``no``; half for equal ones."""
    pairs = [(a > b) + 0.5 * (a == b) for a in yes for b in no]
    return sum(pairs) / max(1, len(pairs))


def auc_interval(
    yes: Sequence[Sequence[float]], no: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Return the 95 % interval of `roc_auc` of the numbers of each document's answers.

    Documents of both kinds are resampled. It is `widened` as if there were as many pairs as the
    smaller class has documents: resamplings of classes that are apart are all alike.
    """
    draw = random.Random(0)

    def drawn(documents: Sequence[Sequence[float]]) -> list[float]:
        return list(chain.from_iterable(draw.choices(documents, k=len(documents))))

    found = sorted(roc_auc(drawn(yes), drawn(no)) for _ in range(_RESAMPLINGS))
    outside = _RESAMPLINGS // 40
    inner = found[outside], found[-1 - outside]
    every = roc_auc(*(list(chain.from_iterable(documents)) for documents in (yes, no)))
    return widened(inner, every, min(len(yes), len(no)))


def _by_document(answers: Sequence[Scored], name: str) -> list[list[float]]:
    found = defaultdict[str, list[float]](list)
    for _, document, numbers in answers:
        found[document].append(numbers[name])
    return list(found.values())


def separation(task: str, answers: Sequence[Scored]) -> list[dict[str, Any]]:
    """Return of each number and kind of other answers: both means, the AUC and its interval."""
    rows = []
    right = [answer for answer in answers if answer[0] == "right"]
    for other in ("wrong", "absent"):
        others = [answer for answer in answers if answer[0] == other]
        for name in right[0][-1] if right and others else ():
            yes, no = ([numbers[name] for *_, numbers in of] for of in (right, others))
            documents = _by_document(right, name), _by_document(others, name)
            rows.append(
                {
                    "task": task,
                    "others": other,
                    "counts": (len(yes), len(no)),
                    "number": name,
                    "means": (sum(yes) / len(yes), sum(no) / len(no)),
                    "auc": roc_auc(yes, no),
                    "interval": auc_interval(*documents),
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
