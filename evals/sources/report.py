"""The report on sources: by task and choice of heads, beside BM25, and with no needle."""

from __future__ import annotations

import base64
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from razor_dist.evals.one_rank import TOP, Sources
from razor_dist.evals.report import grouped, join, markdown
from razor_dist.evals.sources import separation
from razor_dist.evals.sources.config import GRID, PLACED
from razor_dist.evals.sources.task import Document, SourcesTask
from razor_dist.evals.suites.qa import QA
from razor_dist.evals.texts import Prompter
from razor_dist.frontend.outputs import Source
from razor_dist.frontend.passages import FOUND, PromptText, Trace, sentences
from razor_dist.heads.head_map import head_map_of
from razor_dist.heads.sources import source_heads
from razor_dist.models.loader import model_fingerprint, read_config
from razor_dist.models.registry import config_folder
from razor_dist.models.shape import ModelShape

_RANDOM_DRAWS = 5
_WORD = re.compile(r"\w+")
_VALUE = re.compile(r"\b(?:[0-9a-f]+-){4}[0-9a-f]+\b|\b\d{5,}\b")
# How many of the strongest heads are tried.
_COUNTS = (1, 2, 4, 8, 16, 32)
# Of the heaviest sources, as many as RULER hides places at most.
_SHOWN = 5


class Answered(NamedTuple):
    """A document that was asked, and what its answer's tokens attended to."""

    document: Document
    text: PromptText
    result: Mapping[str, Any]
    positions: torch.Tensor  # [tokens, heads, TOP]
    weights: torch.Tensor

    @property
    def task(self) -> str:
        kind = str(self.result["kind"])
        return kind if kind in PLACED else GRID

    @property
    def right(self) -> bool:
        return self.result["score"] == 1

    @property
    def kind(self) -> str:
        right = "right" if self.right else "wrong"
        return right if self.document.places else "absent"

    @property
    def said(self) -> list[bool]:
        """True for each place whose content the answer gives; for question tasks all or none."""
        if self.task in QA:
            return [self.right] * len(self.document.places)
        score, answer = self.document.score, self.result["answer"]
        return [score(answer, [one]) == 1 for one in self.document.answers]

    @property
    def mistaken(self) -> list[str]:
        """The numbers and UUIDs in the answer that stand in the document and were not asked for."""
        found = _VALUE.findall(self.result["answer"])
        wanted, text = self.document.answers, self.document.content
        return [value for value in found if value in text and value not in wanted]

    def sources(self, heads: Sequence[int]) -> tuple[list[Source], float]:
        """Return the sources that the engine would report from these heads, and `grounded`."""
        # Tokens behind the text's are the answer's beginning, as are its own.
        ids = np.empty(len(self.text.ends), np.int32)
        trace = Trace(ids, self.text, None, most=1 << 20, least=0.0)
        chosen = list(heads)
        for positions, weights in zip(self.positions, self.weights, strict=True):
            trace.add(Sources(positions[chosen], weights[chosen]).merged())
        sources, grounded = trace.sources()
        return sources, grounded or 0.0

    def scores(self, heads: Sequence[int]) -> dict[str, float]:
        """Return scores in [0, 1] that may separate right answers from wrong ones."""
        sources, grounded = self.sources(heads)
        match = self.text.question_match(sources[0]) if sources else 0.0
        match = 1.0 if match is None else match
        return {"grounded": grounded, "question_match": match, "product": grounded * match}

    def ranks(self, sources: Sequence[Source]) -> list[int | None]:
        """Return for each place the rank, from 1, of the first source that contains it."""
        return [
            next((n for n, s in enumerate(sources, 1) if s.start <= begin and end <= s.end), None)
            for begin, end in self.document.places
        ]

    def bm25(self) -> list[Source]:
        """Return the document's sentences, ranked by BM25 for question and answer."""
        [part] = self.text.parts
        found = [
            Source(begin, end, 0.0, part.text[begin:end], part.message)
            for begin, end in sentences(part.text[: part.searched])
        ]
        query = _words(f"{self.document.question} {self.result['answer']}")
        scores = bm25(query, [_words(source.text or "") for source in found])
        return [found[i] for i in sorted(range(len(found)), key=lambda i: -scores[i])]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def bm25(query: Sequence[str], sentences: Sequence[Sequence[str]]) -> list[float]:
    """Score sentences for a query by Okapi BM25, k1 = 1.2 and b = 0.75."""
    k1, b = 1.2, 0.75
    counts = [Counter(words) for words in sentences]
    mean = sum(map(len, sentences)) / max(1, len(sentences))
    scores = [0.0] * len(sentences)
    for word in query:
        having = sum(word in count for count in counts)
        idf = math.log(1 + (len(sentences) - having + 0.5) / (having + 0.5))
        for i, count in enumerate(counts):
            length = k1 * (1 - b + b * len(sentences[i]) / mean)
            scores[i] += idf * count[word] * (k1 + 1) / (count[word] + length)
    return scores


@dataclass(frozen=True)
class SourcesReport:
    """The results of a `SourcesTask`; ``count`` is the engine's number of heads."""

    asked: Sequence[Answered]
    count: int
    layers: Sequence[int]  # of the traced heads
    last: int  # the model's last layer

    @classmethod
    def of(cls, task: SourcesTask, results: Sequence[Mapping[str, Any]]) -> SourcesReport:
        config = task.config
        prompter = Prompter.of(config)
        model = read_config(config_folder(config.model), **config.model_options)
        shape = ModelShape.from_config(model)
        head_map = head_map_of(task.traced, shape, model_fingerprint(model))
        layers = [layer for layer, _ in source_heads(task.traced, head_map, model)]
        asked = []
        for item, result in zip(task.items(), results, strict=True):
            document = task.document(prompter, item)
            text = prompter.place(document.content)
            asked.append(Answered(document, text, result, *_arrays(result)))
        return cls(asked, min(config.source_heads, len(layers)), layers, shape.layers - 1)

    @property
    def heads(self) -> dict[str, list[list[int]]]:
        """Choices of heads by name, as indices; several for random ones."""
        every = range(len(self.layers))
        counts = sorted({*_COUNTS, self.count})
        draw = random.Random(0)
        found = {f"{n} strongest": [list(every[:n])] for n in counts if n < len(every)}
        picks = [draw.sample(every, self.count) for _ in range(_RANDOM_DRAWS)]
        found |= {f"all {len(every)}": [list(every)], f"{self.count} random": picks}
        # Only heads that retrieve can be traced: of the last layer, those are taken that do.
        last = [index for index, layer in enumerate(self.layers) if layer == self.last]
        return found | ({f"last layer's {len(last)}": [last]} if last else {})

    def summary(self) -> dict[str, Any]:
        own = list(range(self.count))
        tasks = grouped(self.asked, lambda one: one.task)
        every = {**tasks, "all": self.asked} if len(tasks) > 1 else tasks
        return {
            "tasks": {name: self._figures(asked, own) for name, asked in tasks.items()},
            "separation": [
                row
                for name, asked in every.items()
                for row in separation.separation(
                    name, [(one.kind, one.document.alone, one.scores(own)) for one in asked]
                )
            ],
            "answers": [self._answer(one, own) for one in self.asked],
        }

    def _figures(self, asked: Sequence[Answered], own: list[int]) -> dict[str, Any]:
        there = [one for one in asked if one.document.places]
        rows = []
        for name, choices in self.heads.items():
            draws = [_row([(one, *one.sources(heads)) for one in asked]) for heads in choices]
            mean = {key: sum(row[key] for row in draws) / len(draws) for key in draws[0]}
            rows.append({"heads": name, **mean})
        rows.append({"heads": "BM25", **_row([(one, one.bm25(), None) for one in there])})
        return {
            "asked": len(there),
            "right": sum(one.right for one in there),
            "score": _mean(one.result["score"] for one in there),
            "absent": len(asked) - len(there),
            "heads": rows,
            "precision": self._precision(there, own),
        }

    @staticmethod
    def _precision(there: Sequence[Answered], heads: list[int]) -> list[dict[str, float]]:
        """Return the share of passages above a weight that hold what was asked for."""
        pairs = [
            (source.weight, 1 in one.ranks([source]))
            for one in there
            for source in one.sources(heads)[0][:_SHOWN]
        ]
        return [
            {"weight": least, "passages": len(kept), "precision": _mean(kept)}
            for least in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
            if (kept := [yes for weight, yes in pairs if weight >= least])
        ]

    @staticmethod
    def _answer(one: Answered, heads: list[int]) -> dict[str, Any]:
        sources, grounded = one.sources(heads)
        names = ("kind", "length", "depth", "number", "expected", "answer")
        return {
            **{name: one.result[name] for name in names if name in one.result},
            "right": one.right,
            "said": one.said if one.document.places else [],
            "grounded": round(grounded, 4),
            "question_match": round(one.scores(heads)["question_match"], 4),
            "ranks": one.ranks(sources),
            "sources": [{"weight": round(s.weight, 4), "text": s.text} for s in sources[:_SHOWN]],
        }


# Figures of a row, by their names in JSON and in the table.
_PERCENT = {
    "top_right": "top, right",
    "top_wrong": "top, wrong",
    "top_mistaken": "top, mistaken",
    "shown_said": "shown, said",
    "shown_unsaid": "not said",
    "told_right": "told, right",
    "told_wrong": "told, wrong",
    "told_absent": "told, absent",
}
_NUMBERS = {
    "grounded_right": "grounded: right",
    "grounded_wrong": "wrong",
    "grounded_absent": "absent",
    "auc_absent": "AUC absent",
    "auc_wrong": "AUC wrong",
}


def _row(found: Sequence[tuple[Answered, list[Source], float | None]]) -> dict[str, float]:
    """Return the figures of documents with their sources and `grounded`; none of no documents."""
    lists: defaultdict[str, list[float]] = defaultdict(list)
    for one, sources, grounded in found:
        kind = "right" if one.right else "wrong"
        if one.document.places:
            ranks = one.ranks(sources)
            lists[f"top_{kind}"].append(1 in ranks)
            for rank, said in zip(ranks, one.said, strict=True):
                shown = rank is not None and rank <= _SHOWN
                lists["shown_said" if said else "shown_unsaid"].append(shown)
            if kind == "wrong" and one.mistaken:
                top = sources[0].text or "" if sources else ""
                lists["top_mistaken"].append(any(value in top for value in one.mistaken))
        else:
            kind = "absent"
        if grounded is not None:
            lists[f"told_{kind}"].append(grounded >= FOUND)
            lists[f"grounded_{kind}"].append(grounded)
    row = {name: _mean(numbers) for name, numbers in lists.items()}
    right = lists["grounded_right"]
    for kind in ("wrong", "absent"):
        if right and (others := lists[f"grounded_{kind}"]):
            row[f"auc_{kind}"] = separation.roc_auc(right, others)
    return row


def _table(name: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Return a table of rows' figures, without the columns that none has."""

    def cell(key: str, row: Mapping[str, float]) -> str:
        if key not in row:
            return ""
        return f"{row[key]:.2f}" if key in _NUMBERS else f"{100 * row[key]:.0f} %"

    titles = _PERCENT | _NUMBERS
    shown = [key for key in titles if any(key in row for _, row in rows)]
    body = [[about, *(cell(key, row) for key in shown)] for about, row in rows]
    return markdown([[name, *(titles[key] for key in shown)], *body], "numbers")


def page(summary: Mapping[str, Any], count: int) -> str:
    """Return a report's summary as Markdown; ``count`` is the engine's number of heads."""
    tasks = summary["tasks"]
    parts = [
        "# Sources",
        "Top: the heaviest passage holds a place that was asked for; mistaken: where a wrong "
        "answer gives another number of the document, it holds that one. Shown: of the places "
        f"asked for, the part that the {_SHOWN} heaviest hold, of those whose content the "
        "answer gives (said) and of the others. Told: grounded enough to have sources. An "
        "answer is right if it gives all that was asked for.",
    ]
    if len(tasks) > 1:
        rows = []
        for task, found in tasks.items():
            # Or all, where there are fewer.
            named = (f"{count} strongest", "all ")
            own = next(row for row in found["heads"] if row["heads"].startswith(named))
            rows.append((f"{task}, {found['right']} of {found['asked']} right", own))
        parts += [f"## By task: {rows[0][1]['heads']} heads", _table("task", rows)]
    parts += [
        "## Right answers from others",
        "Areas under the ROC curve with their 95 % interval, of 1,000 resamplings and by Clopper "
        "and Pearson's bound for what they miss; product: of `grounded` and `question_match`.",
        separation.table(summary["separation"]),
    ]
    for task, found in tasks.items():
        absent = f", and {found['absent']} without a place" if found["absent"] else ""
        weights = [
            [f"{row['weight']:.2f}", str(row["passages"]), f"{100 * row['precision']:.0f} %"]
            for row in found["precision"]
        ]
        parts += [
            f"## {task}",
            f"{found['asked']} documents, {found['right']} answered right (mean score "
            f"{found['score']:.2f}){absent}.",
            _table("heads", [(row["heads"], row) for row in found["heads"]]),
            markdown([["weight of at least", "passages", "hold a place"], *weights], "numbers"),
        ]
    return join(*parts)


def _arrays(result: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    def array(name: str, dtype: str) -> torch.Tensor:
        data = np.frombuffer(base64.b64decode(result[name]), dtype)
        return torch.from_numpy(data.reshape(-1, result["heads"], TOP).copy())

    return array("positions", "<i4"), array("weights", "<f4")


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / max(1, len(found))
