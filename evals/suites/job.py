"""A suite as a job; an item is one sample, whose questions one method answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import fmean
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import sentences_of
from razor_dist.evals.methods import check_lengths
from razor_dist.evals.suites.config import SuiteConfig
from razor_dist.evals.suites.sample import Sample
from razor_dist.evals.suites.tasks import DataFile, Material, Questions
from razor_dist.evals.texts import Corpus, Prompter, same_paragraphs
from razor_dist.jobs.task import Item
from razor_dist.llm.llm import LLM
from razor_dist.models.registry import display_name
from razor_dist.protocol.sampling_params import SamplingParams

# The last sample, with the arguments that made it: fitting a sample tokenises its text many
# times, and the next task may ask about the same sample.
_last: list[tuple[tuple[object, ...], Sample]] = []


@dataclass(frozen=True)
class SuiteTask:
    config: SuiteConfig
    haystack: Corpus
    data: dict[str, str]  # fingerprint of each file that a task reads

    @classmethod
    def plan(cls, config: SuiteConfig) -> SuiteTask:
        """Settle the prose by what is installed, and read the tasks' files once."""
        (shape, _), longest = config.limits(), max(config.lengths)
        check_lengths(config, shape, longest, 0)
        config.refuse_shares(shape, longest)
        return cls(config, Corpus.of(config.haystack), data_fingerprints(config.files))

    @property
    def settings(self) -> Mapping[str, Any]:
        config = self.config
        return {
            "kind": config.suite.name,
            "version": config.suite.version,
            "model": display_name(config.model),
            "tasks": list(config.task_names),
            "lengths": sorted(config.lengths),
            "samples": config.samples,
            "methods": list(config.method_settings),
            **self.haystack._asdict(),
            "data": self.data,
            "seed": config.seed,
            **({"in_turns": True} if config.in_turns else {}),
            **({"one_document": True} if config.suite.one_document else {}),
            **({"counts": fewer} if (fewer := self._fewer) else {}),
        }

    def extends(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
        """Return whether a job ``here`` has all that one ``there`` has, and more of it.

        That is samples, tasks, lengths and methods; with lengths, engines' ``max_model_len`` grows.
        """
        (old, old_engines), (new, new_engines) = (
            (dict(job["task"]), job["engines"]) for job in (there, here)
        )
        if old.get("kind") != new["kind"]:
            return False
        more = old.pop("samples", 0) <= new.pop("samples")
        for name in ("tasks", "lengths", "methods"):
            more &= set(old.pop(name, ())) <= set(new.pop(name))
        more &= old.pop("data", {}).items() <= new.pop("data").items()
        for name, own in old_engines.items():
            served, longest = new_engines.get(name, {}), max(here["task"]["lengths"])
            more &= {**own, "max_model_len": longest} == {**served, "max_model_len": longest}
        old.pop("counts", None)
        new.pop("counts", None)
        return more and old == new

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return {method: self.config.engine(method) for method in self.config.method_settings}

    def items(self) -> Sequence[Item]:
        config, names = self.config, ("task", "length", "number")
        every = itertools.product(config.method_settings, config.task_names, sorted(config.lengths))
        found = [
            Item("/".join(map(str, at)), at[2], at[0], dict(zip(names, at[1:], strict=True)))
            for method, task, length in every
            for at in itertools.product([method], [task], [length], range(config.count(task)))
        ]
        if config.suite.one_document:
            # One after the other: the prefix cache has the document for all tasks but the first.
            found.sort(key=lambda item: item.data["number"])
        return found

    @property
    def _fewer(self) -> dict[str, int]:
        """Sample counts of the tasks with fewer samples than the settings ask for."""
        counts = {task: self.config.count(task) for task in self.config.task_names}
        return {task: count for task, count in counts.items() if count < self.config.samples}

    def conversations(self, sample: Sample) -> list[tuple[str, str, tuple[tuple[str, str], ...]]]:
        """Return each question's message, the answer's beginning, and the earlier turns.

        In turns, the questions before it stand with their right answers, whatever was answered:
        one that is wrong spoils no other, and every method is asked the same.
        """
        found, earlier = [], list[tuple[str, str]]()
        for question in sample.questions:
            text = question.text if earlier else sample.message(question)
            found.append((text, question.cue, tuple(earlier)))
            if self.config.in_turns:
                earlier.append((text, question.answered))
        return found

    def prompts(self, prompter: Prompter, sample: Sample) -> list[list[int]]:
        return [prompter.whole(*asked) for asked in self.conversations(sample)]

    def sample(self, prompter: Prompter, task: str, length: int, number: int) -> Sample:
        """Make a sample; see `Suite.sample` for what is refused."""
        suite, seed = self.config.suite, self.config.seed
        at = None if suite.one_document else task
        data = tuple(sorted(self.data.items()))
        key = (suite.name, at, length, number, seed, self.haystack, data, id(prompter.tokenizer))
        found = next((sample for known, sample in _last if known == key), None)
        if found is None:
            material = material_of(self.haystack, self.config.files, self.data)
            longest = partial(self._longest, prompter)
            found = suite.sample(task, length, number, seed, material, longest)
            _last[:] = [(key, found)]
        return found.of_task(task)

    def _longest(self, prompter: Prompter, sample: Sample) -> int:
        return max(map(len, self.prompts(prompter, sample)))

    def run(self, llm: LLM, item: Item) -> Mapping[str, Any]:
        """Make a sample, ask its questions together, score the answers.

        The longest prompt is the first in the batch: the others wait until it is read and take what
        they share with it from the prefix cache. In turns that is nearly all of each.
        """
        prompter = Prompter(llm.get_tokenizer())
        sample = self.sample(prompter, **item.data)
        task = self.config.suite.tasks[item.data["task"]]
        params = SamplingParams(temperature=0, max_tokens=task.answer_tokens, stop=task.stop)
        prompts = self.prompts(prompter, sample)
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        began = time.perf_counter()
        outputs = llm.generate([prompts[index] for index in order], params)
        seconds = time.perf_counter() - began
        said = {index: output.outputs[0].text for index, output in zip(order, outputs, strict=True)}
        answers: list[dict[str, Any]] = [
            {
                "prompt_tokens": len(ids),
                "answer": said[index],
                "wanted": list(question.answers),
                "score": task.score(said[index], question.answers),
            }
            for index, (question, ids) in enumerate(zip(sample.questions, prompts, strict=True))
        ]
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {
            **item.data,
            "method": item.engine,
            "answers": answers,
            "score": fmean(answer["score"] for answer in answers),
            "timing": {"seconds": seconds, "cached_tokens": cached},
        }


def material_of(
    haystack: Corpus, files: Mapping[str, DataFile], data: Mapping[str, str]
) -> Material:
    """Return what samples are made of: prose of a corpus, questions by their files.

    Raises `ConfigError` for a file of another fingerprint than the job's ``data`` has.
    """
    questions = {task: _same_questions(file, data[task]) for task, file in files.items()}
    return Material(_essay(*haystack), questions)


def data_fingerprints(files: Mapping[str, DataFile]) -> dict[str, str]:
    """Return the fingerprint of each task's file; refuse one that is not readable."""
    return {task: file.fingerprint for task, file in files.items() if file.content}


@lru_cache(maxsize=16)  # each file is read and hashed once in a process
def _same_questions(file: DataFile, fingerprint: str) -> Questions:
    if file.fingerprint != fingerprint:
        raise ConfigError(
            f"{file.path} differs from the file with which the job was begun; give one that all "
            "nodes share"
        )
    return file.content


@lru_cache(maxsize=1)
def _essay(name: str, text: str) -> tuple[str, ...]:
    """Return the prose's sentences; refuse prose that differs from the job's."""
    return tuple(s for p in same_paragraphs(name, text)[1] for s in sentences_of(p))
