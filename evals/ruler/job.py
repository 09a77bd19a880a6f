"""RULER as a job, and its table; an item is one sample, answered by one method."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import fingerprint, haystack_paragraphs, sentences_of
from razor_dist.evals.baselines.presses import KVPRESS
from razor_dist.evals.report import Run, failures, join, markdown, write_page
from razor_dist.evals.ruler.config import RulerConfig
from razor_dist.evals.ruler.tasks import (
    ANSWER_TOKENS,
    Material,
    QAData,
    make_sample,
    read_hotpotqa,
    read_squad,
    score,
)
from razor_dist.evals.texts import Prompter, same_paragraphs
from razor_dist.jobs.task import Item
from razor_dist.llm.llm import LLM
from razor_dist.models.registry import display_name
from razor_dist.protocol.sampling_params import SamplingParams

PAGE = "report.md"
KIND = "ruler"  # ``settings.task.kind`` of a folder of results
# Of the samples and their scores: raised when the same settings would give others.
_VERSION = 2


@dataclass(frozen=True)
class RulerTask:
    """A task of `razor_dist.jobs`; build it with `plan`."""

    config: RulerConfig
    haystack: tuple[str, str]  # name and fingerprint of the prose
    data: dict[str, str]  # fingerprint of each question task's file

    @classmethod
    def plan(cls, config: RulerConfig) -> RulerTask:
        """Settle the prose by what is installed, and read the questions' files once."""
        _, most = config.limits()
        if (longest := max(config.lengths)) > most:
            raise ConfigError(
                f"lengths: {longest} is beyond {config.model}, which holds {most} tokens of prompt "
                "and answer"
            )
        name, paragraphs = haystack_paragraphs(config.haystack)
        data = data_fingerprints(config.squad, config.hotpotqa)
        return cls(config, (name, fingerprint(paragraphs)), data)

    @property
    def settings(self) -> Mapping[str, Any]:
        config = self.config
        return {
            "kind": KIND,
            "version": _VERSION,
            "model": display_name(config.model),
            "tasks": list(config.task_names),
            "lengths": sorted(config.lengths),
            "samples": config.samples,
            "methods": list(config.method_settings),
            "haystack": self.haystack[0],
            "haystack_fingerprint": self.haystack[1],
            "data": self.data,
            "seed": config.seed,
        }

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return {method: self.config.engine(method) for method in self.config.method_settings}

    def items(self) -> Sequence[Item]:
        config, names = self.config, ("task", "length", "number")
        lengths, numbers = sorted(config.lengths), range(config.samples)
        every = itertools.product(config.method_settings, config.task_names, lengths, numbers)
        return [
            Item("/".join(map(str, at)), at[2], at[0], dict(zip(names, at[1:], strict=True)))
            for at in every
        ]

    def run(self, llm: LLM, item: Item) -> Mapping[str, Any]:
        """Make a sample, ask it, score the answer; see `make_sample` for what is refused."""
        whole = Prompter(llm.get_tokenizer()).whole
        task: str = item.data["task"]
        sample = make_sample(
            **item.data,
            seed=self.config.seed,
            material=material_of(self.haystack, self.config.squad, self.config.hotpotqa),
            tokens=lambda sample: len(whole(sample.text, sample.cue)),
        )
        prompt = whole(sample.text, sample.cue)
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS[task])
        [output] = llm.generate(prompt, params)
        [answer] = output.outputs
        return {
            **item.data,
            "method": item.engine,
            "prompt_tokens": len(prompt),
            "answer": answer.text,
            "wanted": list(sample.answers),
            "score": score(task, answer.text, sample.answers),
            "timing": {"seconds": output.metrics.total_seconds},
        }


def material_of(haystack: tuple[str, str], squad: str | None, hotpotqa: str | None) -> Material:
    """Return what samples are made of: prose by name and fingerprint, questions by their files."""
    data = _questions(squad, hotpotqa)
    return Material(_essay(*haystack), {task: questions for task, (_, questions) in data.items()})


def data_fingerprints(squad: str | None, hotpotqa: str | None) -> dict[str, str]:
    """Return the fingerprint of each question task's file; refuse one that is not readable."""
    return {
        task: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for task, (path, _) in _questions(squad, hotpotqa).items()
    }


@lru_cache(maxsize=1)
def _essay(name: str, text: str) -> tuple[str, ...]:
    """Return the sentences of the prose; refuse another than that which the job was begun with."""
    return tuple(s for p in same_paragraphs(name, text)[1] for s in sentences_of(p))


@lru_cache(maxsize=1)
def _questions(squad: str | None, hotpotqa: str | None) -> dict[str, tuple[Path, QAData]]:
    """Return file and content of each question task's data that are given."""
    given = (("qa_1", squad, read_squad), ("qa_2", hotpotqa, read_hotpotqa))
    return {task: (Path(file), read(Path(file))) for task, file, read in given if file is not None}


def write_report(folder: Path) -> str:
    run = Run(folder, KIND, "RULER")
    return write_page(folder / PAGE, report(run.settings, run.results, run.failed, run.engines))


def report(
    task: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    failed: Mapping[str, str],
    engines: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return the page of a run.

    A cell is the mean score of its samples in percent, a task's row. The average of a length is
    the mean over tasks, as the paper's, and the last column the mean over lengths. An average that
    lacks a cell is not given.
    """
    scores: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for result in results:
        scores[result["method"], result["task"], result["length"]].append(100 * result["score"])
    lengths, tasks, samples = task["lengths"], task["tasks"], task["samples"]
    asked = len(task["methods"]) * len(tasks) * len(lengths) * samples
    parts = [
        f"# RULER: {task['model']}",
        f"{samples} samples of each task and length, seed {task['seed']}, prose: "
        f"{task['haystack']} ({task['haystack_fingerprint']}). Scores in percent.",
    ]
    if failed:
        parts.append(f"{len(failed)} of {asked} samples failed and count in no cell: see below.")
    if missing := asked - len(results) - len(failed):
        parts.append(f"{missing} of {asked} samples have not been asked yet.")
    if presses := [method for method in task["methods"] if "press" in engines.get(method, {})]:
        part = engines[presses[0]]["kv_budget"]
        budget = "as many bytes as razor on one rank" if part is None else f"{part:g} of all"
        parts.append(
            f"{', '.join(presses)}: kvpress {KVPRESS}. Every head reads in full; then {budget} is "
            "kept. The question is a part of what is read: they know it when they drop the rest."
        )
    head = ["task", *map(str, lengths), "average"]
    for method in task["methods"]:
        rows = {name: [_mean(scores[method, name, n]) for n in lengths] for name in tasks}
        rows["**average**"] = [_mean(column) for column in zip(*rows.values(), strict=True)]
        body = [[name, *map(_shown, [*cells, _mean(cells)])] for name, cells in rows.items()]
        parts += [f"## {method}", markdown([head, *body])]
    return join(*parts, failures(failed))


def _mean(cells: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no cells or one lacks its number."""
    known = [cell for cell in cells if cell is not None]
    return fmean(known) if known and len(known) == len(cells) else None


def _shown(cell: float | None) -> str:
    return "-" if cell is None else f"{cell:.1f}"
