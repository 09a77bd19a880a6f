"""The needle test as a job: an item is one document with its questions, asked by one method."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.evals.baselines.presses import PRESSES
from razor_dist.evals.needle.config import NeedleConfig
from razor_dist.evals.needle.documents import (
    Documents,
    Reading,
    Spot,
    share_out,
    with_questions,
)
from razor_dist.evals.needle.model import check_needle_model
from razor_dist.evals.needle.presets import Preset
from razor_dist.evals.needle.results import KIND
from razor_dist.evals.texts import Corpus, Prompter, same_haystack
from razor_dist.heads.head_map import HeadMap, head_map_file
from razor_dist.jobs.host_engine import host_pool
from razor_dist.jobs.job import run_task
from razor_dist.jobs.results import read_job
from razor_dist.jobs.task import Item, Task
from razor_dist.llm.llm import LLM
from razor_dist.models.registry import display_name
from razor_dist.protocol.sampling_params import SamplingParams

_UNITS = ("seconds", "cpu_seconds")


@dataclass(frozen=True)
class NeedleTask:
    config: NeedleConfig
    lengths: tuple[int, ...]  # tokens of prompt and answer
    haystack: Corpus | None  # None where the preset makes the text

    @classmethod
    def plan(cls, config: NeedleConfig) -> NeedleTask:
        """Settle the lengths by the model, the haystack by what is installed; refuse misfits."""
        shape, most = config.limits()
        lengths = config.lengths(most)
        config.refuse_shares(shape, lengths[-1])
        if config.preset == "words":
            check_needle_model("preset words", config.model, shape.vocab_size)
        if config.duo_head_map is not None:
            found = HeadMap.load(head_map_file(config.duo_head_map))
            if found.method != "duo":
                raise HeadMapError(
                    f"duo_head_map is {config.duo_head_map}, made by method {found.method!r}, "
                    "not duo"
                )
        own = config.settings.haystack
        haystack = Corpus.of(config.haystack or own) if own else None
        return cls(config, lengths, haystack)

    @property
    def settings(self) -> Mapping[str, Any]:
        config = self.config
        own = {"preset", "query", "needles", "share_depths", "repeats", "seed"}
        name, text = self.haystack or (None, None)
        return {
            "kind": KIND,
            "model": display_name(config.model),
            "lengths": list(self.lengths),
            "depths": list(config.depths),
            "methods": list(config.method_settings),
            "haystack": name,
            "haystack_fingerprint": text,
            **config.model_dump(mode="json", include=own),
            "version": config.settings.version,
        }

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        config, longest = self.config, self.lengths[-1]
        return {method: config.engine(method, longest) for method in config.method_settings}

    @property
    def _documents(self) -> list[list[Spot]]:
        config = self.config
        return share_out(config.depths, config.needles, together=config.share_depths)

    def items(self) -> Sequence[Item]:
        """Return a document for each method, length, repeat and set of spots."""
        names, numbers = ("length", "repeat", "document"), range(len(self._documents))
        repeats = range(self.config.repeats)
        every = itertools.product(self.config.method_settings, self.lengths, repeats, numbers)
        return [
            Item("/".join(map(str, at)), at[1], at[0], dict(zip(names, at[1:], strict=True)))
            for at in every
        ]

    def run(self, llm: LLM, item: Item) -> Mapping[str, Any]:
        length, repeat, document = item.data.values()
        preset, prompter = self.config.settings, Prompter(llm.get_tokenizer())
        seed = f"{self.config.seed}:{length}:{repeat}:{document}"
        haystack = self.haystack and same_haystack(*self.haystack, prompter.tokenizer)
        number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6])
        query, spots = self.config.query, self._documents[document]
        made = Documents(preset, prompter, haystack).readings(query, length, spots, number)
        press = self.config.method_settings[item.engine].get("press")
        if press is not None and PRESSES[press].with_question:
            made = with_questions(made)
        about = {"method": item.engine, "length": length, "repeat": repeat}
        return about | ask(llm, preset, made)


def ask(llm: LLM, preset: Preset, made: Sequence[Reading]) -> dict[str, Any]:
    """Read each prefix once, ask its questions, and score the answers.

    The result has ``cells``, one for each question; ``kv_bytes`` of the rank that holds most, once
    the document is read; ``prefill_bytes`` and ``answer_bytes``, which all ranks sent, by purpose;
    ``timing``: seconds, CPU seconds of all ranks, and the highest resident memory of a rank since
    its start. An external engine reports neither bytes sent, nor CPU, nor memory.
    """
    # Greedy, so that the answer is the prompt's and the settings' alone.
    params = SamplingParams(temperature=0, max_tokens=preset.answer_tokens)
    cells: list[dict[str, Any]] = []
    spent: dict[str, Counter[str]] = {"prefill": Counter(), "answer": Counter()}
    kv_bytes = 0
    for reading in made:
        begun = _stats(llm)
        with llm.prefill(reading.prefix) as prefix:
            read = _stats(llm)
            prompts = [{"prompt_token_ids": question.ids} for question in reading.questions]
            outputs = llm.generate(prompts, params, prefix=prefix)
            answered = _stats(llm)
        for name, before, after in (("prefill", begun, read), ("answer", read, answered)):
            spent[name].update(after["spent"])
            spent[name].subtract(before["spent"])
        kv_bytes = max(kv_bytes, *read["kv_bytes_per_rank"])
        for question, output in zip(reading.questions, outputs, strict=True):
            answer, expected = output.outputs[0].text, question.expected
            score = preset.score(answer, expected)
            about = {"expected": expected, "answer": answer, "score": score}
            cells.append(question.spot._asdict() | about)
    result: dict[str, Any] = {"cells": cells, "kv_bytes": kv_bytes}
    timing: dict[str, Any] = {}
    for name, counter in spent.items():
        units = [unit for unit in _UNITS if unit in counter]
        timing |= {f"{name}_{unit}": round(counter.pop(unit), 3) for unit in units}
        if counter:
            result[f"{name}_bytes"] = dict(counter)
    if "peak_rss_per_rank" in answered:
        timing["rss_bytes"] = max(answered["peak_rss_per_rank"])
    return result | {"timing": timing}


def _stats(llm: LLM) -> Mapping[str, Any]:
    """Return an engine's statistics, with all that counts upwards as ``spent``."""
    stats = llm.stats()
    spent = {"seconds": time.perf_counter()} | stats.get("bytes_sent", {})
    if "cpu_us_per_rank" in stats:
        spent["cpu_seconds"] = 1e-6 * sum(stats["cpu_us_per_rank"])
    return {**stats, "spent": spent}


def run_here(task: Task, folder: Path) -> list[dict[str, Any]]:
    """Run on this host what a job's folder lacks; return the results of all items, in order.

    Raises `ConfigError` if the folder is another job's, or if an item has failed.
    """
    summary = run_task(task, folder, host_pool(task), JobConfig(retry_failed=True))
    found = {record["id"]: record for record in read_job(summary.folder).records}
    records = [found[item.id] for item in task.items()]
    for record in records:
        if record["status"] == "failed":
            raise ConfigError(f"{record['id']} failed: {record['error']['message']}")
    return [record["result"] for record in records]
