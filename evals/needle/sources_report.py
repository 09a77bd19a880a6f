"""The report on sources: by number of heads, beside random heads and BM25, and with no needle."""

from __future__ import annotations

import base64
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from razor_dist.attention.sources import TOP, Sources
from razor_dist.evals.needle.documents import Prompter
from razor_dist.evals.needle.sources import Document, SourcesTask
from razor_dist.evals.run_notes import join, markdown
from razor_dist.frontend.outputs import Source
from razor_dist.frontend.passages import PromptText, Trace, sentences
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.models.registry import resolve_model

_RANDOM_DRAWS = 5
_WORD = re.compile(r"\w+")
# How many of the strongest heads are tried.
_COUNTS = (1, 2, 4, 8, 16, 32)


class Asked(NamedTuple):
    """A document that was asked, and what its answer's tokens attended to."""

    document: Document
    text: PromptText
    result: Mapping[str, Any]
    positions: torch.Tensor  # [tokens, heads, TOP]
    weights: torch.Tensor

    @property
    def right(self) -> bool:
        return self.result["score"] == 1

    def sources(self, heads: Sequence[int]) -> tuple[list[Source], float]:
        """Return what the engine would say if it asked these heads."""
        ids = np.empty(self.result["prompt_tokens"], np.int32)
        trace = Trace(ids, self.text, None, most=1 << 20, least=0.0)
        chosen = list(heads)
        for positions, weights in zip(self.positions, self.weights, strict=True):
            trace.add(Sources(positions[chosen], weights[chosen]).merged())
        sources, grounded = trace.sources()
        return sources, grounded or 0.0

    def rank(self, sources: Sequence[Source]) -> int | None:
        """Return the place, from 1, of the source that holds what was asked for."""
        assert self.document.needle is not None
        begin, end = self.document.needle
        holds = (n for n, s in enumerate(sources, 1) if s.start <= begin and end <= s.end)
        return next(holds, None)

    def bm25(self) -> list[Source]:
        """Return the document's sentences by their likeness to question and answer."""
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


def bm25(
    query: Sequence[str], sentences: Sequence[Sequence[str]], k1: float = 1.2, b: float = 0.75
) -> list[float]:
    """Score sentences for a query by Okapi BM25."""
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


def roc_auc(yes: Sequence[float], no: Sequence[float]) -> float:
    """Return the chance that one of ``yes`` is above one of ``no``; half for equal ones."""
    pairs = [(a > b) + 0.5 * (a == b) for a in yes for b in no]
    return sum(pairs) / max(1, len(pairs))


@dataclass(frozen=True)
class SourcesReport:
    """The results of a `SourcesTask`; ``count`` is the engine's number of heads."""

    asked: Sequence[Asked]
    count: int

    @classmethod
    def of(cls, task: SourcesTask, results: Sequence[Mapping[str, Any]]) -> SourcesReport:
        config = task.config
        path = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
        prompter = Prompter.of_model(path, trust_remote_code=config.trust_remote_code)
        encoder = PromptEncoder(prompter.tokenizer)
        asked = []
        for item, result in zip(task.items(), results, strict=True):
            document = task.document(prompter, item)
            _, text = encoder.chat_with_ends(document.messages)
            asked.append(Asked(document, text, result, *_arrays(result)))
        return cls(asked, config.source_heads)

    @property
    def heads(self) -> dict[str, list[list[int]]]:
        """Choices of heads by name, as indices; several for random ones."""
        every = range(self.asked[0].result["heads"])
        counts = sorted({*_COUNTS, self.count})
        draw = random.Random(0)
        found = {f"{n} strongest": [list(every[:n])] for n in counts if n < len(every)}
        picks = [draw.sample(every, self.count) for _ in range(_RANDOM_DRAWS)]
        return {**found, f"all {len(every)}": [list(every)], f"{self.count} random": picks}

    def summary(self) -> dict[str, Any]:
        """Return all figures as JSON data."""
        there = [one for one in self.asked if one.document.needle]
        absent = [one for one in self.asked if not one.document.needle]
        rows = []
        for name, choices in self.heads.items():
            draws = [self._row(there, absent, heads) for heads in choices]
            mean = {key: sum(row[key] for row in draws) / len(draws) for key in draws[0]}
            rows.append({"heads": name, **mean})
        ranks = [one.rank(one.bm25()) for one in there if one.right]
        rows.append({"heads": "BM25", "top_right": _share(rank == 1 for rank in ranks)})
        own = list(range(self.count))
        return {
            "asked": len(there),
            "right": sum(one.right for one in there),
            "absent": len(absent),
            "heads": rows,
            "precision": self._precision(there, own),
            "answers": [self._answer(one, own) for one in self.asked],
        }

    @staticmethod
    def _row(there: Sequence[Asked], absent: Sequence[Asked], heads: list[int]) -> dict[str, float]:
        found = [(one, *one.sources(heads)) for one in there]
        right = [(one.rank(sources), grounded) for one, sources, grounded in found if one.right]
        wrong = [(one.rank(sources), grounded) for one, sources, grounded in found if not one.right]
        missing = [one.sources(heads)[1] for one in absent]
        scores = [grounded for _, grounded in right]
        row = {
            "top_right": _share(rank == 1 for rank, _ in right),
            "top3_right": _share(rank is not None and rank <= 3 for rank, _ in right),
            "grounded_right": _mean(scores),
        }
        if wrong:
            row["top_wrong"] = _share(rank == 1 for rank, _ in wrong)
            row["grounded_wrong"] = _mean(grounded for _, grounded in wrong)
            row["auc_wrong"] = roc_auc(scores, [grounded for _, grounded in wrong])
        if missing:
            row["grounded_absent"] = _mean(missing)
            row["auc_absent"] = roc_auc(scores, missing)
        return row

    @staticmethod
    def _precision(there: Sequence[Asked], heads: list[int]) -> list[dict[str, float]]:
        """Return the share of passages above a weight that hold what was asked for."""
        pairs = [
            (source.weight, one.rank([source]) == 1)
            for one in there
            for source in one.sources(heads)[0][:3]
        ]
        return [
            {"weight": least, "passages": len(kept), "precision": _share(kept)}
            for least in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
            if (kept := [yes for weight, yes in pairs if weight >= least])
        ]

    @staticmethod
    def _answer(one: Asked, heads: list[int]) -> dict[str, Any]:
        sources, grounded = one.sources(heads)
        about = {k: one.result[k] for k in ("kind", "length", "depth", "expected", "answer")}
        top = [{"weight": round(s.weight, 4), "text": s.text} for s in sources[:3]]
        rank = one.rank(sources) if one.document.needle else None
        return {
            **about,
            "right": one.right,
            "grounded": round(grounded, 4),
            "rank": rank,
            "sources": top,
        }

    def page(self) -> str:
        """Return the report as Markdown."""
        found = self.summary()
        header = ["heads", "top, right", "top 3, right", "top, wrong"]
        header += ["grounded: right", "wrong", "absent", "AUC absent", "AUC wrong"]
        keys = ["top_right", "top3_right", "top_wrong"]
        more = ["grounded_right", "grounded_wrong", "grounded_absent", "auc_absent", "auc_wrong"]
        rows = [
            [
                row["heads"],
                *(f"{100 * row[k]:.0f} %" if k in row else "" for k in keys),
                *(f"{row[k]:.2f}" if k in row else "" for k in more),
            ]
            for row in found["heads"]
        ]
        weights = [
            [f"{row['weight']:.2f}", str(row["passages"]), f"{100 * row['precision']:.0f} %"]
            for row in found["precision"]
        ]
        intro = (
            f"{found['asked']} documents with a needle, {found['right']} answered right, and "
            f"{found['absent']} without one. Top: the heaviest passage holds the number asked for."
        )
        return join(
            "# Sources",
            intro,
            markdown([header, *rows], "numbers"),
            markdown([["weight of at least", "passages", "hold the number"], *weights], "numbers"),
        )


def _arrays(result: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    def array(name: str, dtype: str) -> torch.Tensor:
        data = np.frombuffer(base64.b64decode(result[name]), dtype)
        return torch.from_numpy(data.reshape(-1, result["heads"], TOP).copy())

    return array("positions", "<i4"), array("weights", "<f4")


def _share(yes: Iterable[bool]) -> float:
    return _mean(float(one) for one in yes)


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / max(1, len(found))
