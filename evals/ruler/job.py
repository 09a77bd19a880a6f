"""RULER as a job; an item is one sample, answered by one method."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import fingerprint, haystack_paragraphs, sentences_of
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.evals.needle.documents import Prompter, same_paragraphs
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
from razor_dist.jobs.task import Item
from razor_dist.llm.llm import LLM
from razor_dist.models.registry import display_name

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
        """Settle the prose by what is installed, and read the questions' files once.

        Raises as `ComparingConfig.limits`, and `ConfigError` for lengths, text or data.
        """
        _, most = config.limits()
        if (longest := max(config.lengths)) > most:
            raise ConfigError(
                f"lengths: {longest} is beyond {config.model}, which holds {most} tokens of prompt "
                "and answer"
            )
        name, paragraphs = haystack_paragraphs(config.haystack)
        data = {
            task: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for task, (path, _) in _questions(config.squad, config.hotpotqa).items()
        }
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
            material=self._material(),
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

    def _material(self) -> Material:
        essay = _essay(*self.haystack)
        data = _questions(self.config.squad, self.config.hotpotqa)
        return Material(essay, {task: questions for task, (_, questions) in data.items()})


@lru_cache(maxsize=1)
def _essay(name: str, text: str) -> tuple[str, ...]:
    """Return the sentences of the prose; refuse another than that which the job was begun with."""
    return tuple(s for p in same_paragraphs(name, text)[1] for s in sentences_of(p))


@lru_cache(maxsize=1)
def _questions(squad: str | None, hotpotqa: str | None) -> dict[str, tuple[Path, QAData]]:
    """Return file and content of each question task's data that are given."""
    given = (("qa_1", squad, read_squad), ("qa_2", hotpotqa, read_hotpotqa))
    return {task: (Path(file), read(Path(file))) for task, file, read in given if file is not None}
