"""Why a method lost samples that full attention answered: its heads, its windows, or the model.

A folder of a suite names the samples. For each, full attention answers once more while every head
is watched from the question on, and variants of the method are held against its answer, token by
token (`razor_dist.evals.fidelity`): exact prefill, windows of twice the length, and as many other
KV heads, those whose windows drop the most of their attention in this very sample. A variant keeps
the answer if each token that earned the score is its likeliest one, so that it says it itself.
Samples that the method kept are watched too: without them no figure says anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity.model import FidelityModel, Scored
from razor_dist.evals.methods import FULL, FULL_METHOD, Method, methods_of
from razor_dist.evals.one_rank import StreamingPolicy, run_core
from razor_dist.evals.report import CONFIG, Run
from razor_dist.evals.suites.config import CONFIGS, SuiteConfig
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.evals.suites.tasks import Task
from razor_dist.evals.watch import Mass, Watch
from razor_dist.heads.decision import flags
from razor_dist.jobs.results import differences, read_job
from razor_dist.jobs.task import ExternalEngineConfig, Item, job_settings, settings_hash
from razor_dist.protocol.sampling_params import SamplingParams

KIND = "why"  # of task, in a folder's settings
LOST, KEPT = "lost", "kept"
_HEADS_SHOWN = 5
# Full attention was unsure of a token that it gave less than this.
UNSURE = 0.5
# Nats by which a method may find the answer less likely where that loss is called chance.
CHANCE = 1.0
# Settings that the model is loaded by, once for the method and full attention.
_OF_MODEL = ("device", "dtype", "weight_dtype", "rope_scaling")


def variants(method: Method, others: Method | None, tokens: int) -> dict[str, Method]:
    """Return the method and what is tried in its place on a text of ``tokens``, by what differs."""
    own = method.settings
    lengths = {name: own[name] for name in ("window_min", "window_ratio", "window_max")}
    window = StreamingPolicy(**lengths).window(tokens - 1)
    wider = {"window_min": 2 * window, "window_ratio": None, "window_max": None}
    windows = method.windows and tuple(tuple(w and 2 * w for w in row) for row in method.windows)
    found = {
        "as it is": method,
        "longer windows": replace(method, settings={**own, **wider}, windows=windows),
    }
    exact = own["prefill"] != "exact"
    if exact:
        found["exact prefill"] = replace(method, settings={**own, "prefill": "exact"})
    if others is not None:
        found["other heads"] = others
        if exact:
            settings = {**own, "prefill": "exact"}
            found["other heads, exact prefill"] = replace(others, settings=settings)
    return found


def verdict(tried: Mapping[str, Mapping[str, Any]]) -> tuple[str, float]:
    """Return the reason of a loss, by what was tried (`WhyModel.compare`), and a probability.

    It is what would have kept the answer. Full attention was unsure if it gave the first token
    that was lost less than `UNSURE`; that probability is returned. Then one token says little, so
    the loss of the whole answer decides: if the method adds less than `CHANCE` to it, the reason
    is ``model``, else each change that takes away more than half of what it adds.
    """
    own = tried["as it is"]
    if own["kept"]:  # what follows the part that earned the score differs
        return "the answer's end", 1.0
    sure = math.exp(-own["loss_full"][own["first"]])
    kept = {name: result["kept"] for name, result in tried.items()}
    if sure < UNSURE:
        added = {name: result["loss"] - sum(own["loss_full"]) for name, result in tried.items()}
        if added["as it is"] < CHANCE:
            return "model", sure
        kept = {name: nats < added["as it is"] / 2 for name, nats in added.items()}
    single = {"other heads": "heads", "longer windows": "windows", "exact prefill": "local prefill"}
    if found := [reason for name, reason in single.items() if kept.get(name)]:
        return " or ".join(found), sure
    both = kept.get("other heads, exact prefill")
    return "heads and local prefill" if both else "more than one of these", sure


class WhyModel(FidelityModel):
    def answer(self, ids: Sequence[int], most: int) -> list[int]:
        """Return full attention's answer to a prompt, greedily, of up to ``most`` tokens."""
        engine = self.read(FULL_METHOD, len(ids) + most, list(ids[:-1]))
        params = SamplingParams(temperature=0, max_tokens=most)
        engine.core.add("question", list(ids[-1:]), params, prefix_id="document")
        with self.whole_or_forgotten():
            return run_core(engine.core)

    def watched(self, text: Scored, method: Method, begin: int, places: Sequence[range]) -> Mass:
        """Return where full attention's heads look from the position ``begin`` on."""
        marks = torch.zeros(len(text.ids), dtype=torch.bool)
        for place in places:
            marks[place.start : place.stop] = True
        self._full = self._read = None
        self.replay.watch = Watch(begin, marks, self._dropped(method))
        try:
            self._reference(text)
            # Leave out tokens generated after the text.
            count = text.positions.stop - begin
            return Mass(*(found[:count] for found in self.replay.watch.mass))
        finally:
            self.replay.watch = None

    def _dropped(self, method: Method) -> Any:
        own = {name: value for name, value in method.settings.items() if name != "head_map"}
        shared = self.config.model_dump(include=set(EngineConfig.model_fields)) | own
        policy = StreamingPolicy.of(EngineConfig(**shared | {"attention": "razor"}))

        def dropped(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
            row = method.windows[layer] if method.windows else [None] * self.shape.kv_heads
            heads = [policy.with_window(window, alibi=self.shape.alibi) for window in row]
            starts = [[head.start(at) for at in positions.tolist()] for head in heads]
            sinks = torch.tensor([head.sinks for head in heads], device=positions.device)
            return sinks, torch.tensor(starts, device=positions.device)

        return dropped

    def compare(self, method: Method, text: Scored) -> dict[str, Any]:
        """Hold a variant against full attention's answer: the text behind the prompt."""
        figures, _ = self.measure(method, text, one_by_one=True)
        different = (~figures.same).nonzero().flatten().tolist()
        return {
            "kept": not different,
            "first": different[0] if different else None,
            "loss": figures.loss.sum().item(),
            "loss_full": figures.loss_full.tolist(),
        }


def other_heads(method: Method, dropped: Tensor, group: int) -> Method | None:
    """Return the method with as many retrieval heads, chosen by the mass that windows drop.

    ``dropped`` is `Mass.dropped`, averaged over positions; a KV head's loss is the largest of its
    query heads'. None if no head of the method is a retrieval head, or all are.
    """
    total = 0 if method.retrieval is None else sum(map(sum, method.retrieval))
    by_kv = dropped.mean(0).unflatten(-1, (-1, group)).amax(-1)  # [layers, K]
    if total in (0, by_kv.numel()):
        return None
    order = by_kv.flatten().argsort(descending=True, stable=True)[:total].tolist()
    layers, heads = by_kv.shape
    chosen = flags([divmod(at, heads) for at in order], layers, heads)
    if method.windows is None:
        return replace(method, retrieval=chosen)
    # The bytes stay equal: each new retrieval head hands its window to a former one.
    windows = [list(row) for row in method.windows]
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    freed = [(i, j) for i, j in every if chosen[i][j] and windows[i][j] is not None]
    lost = [(i, j) for i, j in every if not chosen[i][j] and windows[i][j] is None]
    for (i, j), (layer, head) in zip(lost, freed, strict=True):
        windows[i][j], windows[layer][head] = windows[layer][head], None
    return replace(method, retrieval=chosen, windows=tuple(map(tuple, windows)))


def attention_figures(mass: Mass, method: Method, group: int, answer: int) -> dict[str, Any]:
    """Return the report's attention figures, from the last ``answer`` positions.

    Heads are ``[layer, query head, part of its weight, retrieval]``.
    """
    layers, heads = mass.places.shape[1:]
    kept = torch.zeros(layers, heads, dtype=torch.bool)
    if method.retrieval is not None:
        kept = torch.tensor(method.retrieval).repeat_interleave(group, 1)
    places, dropped = (found[-answer:] for found in mass)

    def top(found: Tensor, count: int) -> list[list[Any]]:
        best = found.flatten().argsort(descending=True, stable=True)[:count].tolist()
        at = [divmod(number, heads) for number in best]
        return [[*place, round(found[place].item(), 4), bool(kept[place])] for place in at]

    on_places = places.mean(0)
    return {
        "carriers": top(on_places, _HEADS_SHOWN),
        "steps": [top(step, 1)[0] for step in places],
        "carried_by_retrieval": (on_places[kept].sum() / on_places.sum().clamp(min=1e-9)).item(),
        "dropped_answer": dropped[:, ~kept].mean().item() if not kept.all() else 0.0,
        "dropped_question": mass.dropped[:-answer, ~kept].mean().item() if not kept.all() else 0.0,
        "dropped_most": top(dropped.mean(0).masked_fill(kept, 0), _HEADS_SHOWN),
    }


def config_of(folder: Path) -> SuiteConfig:
    """Return the settings that a suite's folder was run with, those that are no defaults."""
    task = read_job(folder).settings["task"]
    if (kind := task.get("kind")) not in CONFIGS:
        raise ConfigError(f"{folder} holds results of {kind}; give one of {', '.join(CONFIGS)}")
    try:
        noted = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / CONFIG}: {error}") from None
    config = CONFIGS[kind]
    defaults = config.model_construct().model_dump(mode="json")
    # ``auto`` may be another text here.
    noted |= {"haystack": task["haystack"]} if "haystack" in task else {}
    known = {name: value for name, value in noted.items() if name in config.model_fields}
    return config(**{name: own for name, own in known.items() if own != defaults.get(name)})


@dataclass(frozen=True)
class WhyTask:
    """A task of `razor_dist.jobs`; build it with `plan`. An item is a question of a sample."""

    suite: SuiteTask
    method: str
    questions: tuple[tuple[str, str, int, int, int], ...]  # kind, task, length, number, question
    fingerprint: str  # of the method's engine, its head map included

    @classmethod
    def plan(cls, folder: Path, config: SuiteConfig, method: str, most: int) -> WhyTask:
        """Choose up to ``most`` lost and as many kept questions of a suite's folder."""
        if method not in config.method_settings or method == FULL:
            names = [name for name in config.method_settings if name != FULL]
            raise ConfigError(f"--method: {method!r} is none of the folder's {', '.join(names)}")
        if "press" in config.method_settings[method]:
            raise ConfigError(f"--method: {method} is kvpress's, whose heads cannot be watched")
        if config.engine(method).attention == "full":
            raise ConfigError(f"--method: {method} has no streaming heads that could lose answers")
        run, suite = Run(folder, config.suite.name, config.suite.title), SuiteTask.plan(config)
        if other := differences(run.settings, suite.settings):
            raise ConfigError(f"the samples of {folder} cannot be made again: {'; '.join(other)}")
        scores: dict[str, dict[tuple[str, int, int, int], float]] = {FULL: {}, method: {}}
        for result in run.results:
            for index, answer in enumerate(result.get("answers", ())):
                at = result["task"], result["length"], result["number"], index
                scores.setdefault(result["method"], {})[at] = answer["score"]
        found: dict[str, list[tuple[str, int, int, int]]] = {LOST: [], KEPT: []}
        for at, full in scores[FULL].items():
            own = scores[method].get(at)
            if full > 0 and own is not None:
                found[LOST if own < full else KEPT].append(at)
        if not found[LOST]:
            raise ConfigError(f"{folder} holds no answer that full attention had and {method} lost")
        for name in _OF_MODEL:
            if getattr(config.engine(method), name) != getattr(config.engine(FULL), name):
                raise ConfigError(
                    f"--method: {method} has another {name} than {FULL}, but here one model answers"
                )
        own = job_settings(suite)["engines"][method]
        # An earlier version may have recorded more settings, or fewer.
        both = own.keys() & run.engines[method].keys()
        there, here = ({name: e[name] for name in both} for e in (run.engines[method], own))
        if other := differences(there, here):
            raise ConfigError(f"{folder} is of another {method}: {'; '.join(other)}")
        chosen = [(kind, *at) for kind, every in found.items() for at in _spread(every, most)]
        return cls(suite, method, tuple(chosen), settings_hash(own))

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**self.suite.settings, "kind": KIND, "suite": self.suite.config.suite.name}

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        # Full attention's, so that what answers again is what answered then.
        own = self.suite.config.engine(FULL).model_dump(include=set(EngineConfig.model_fields))
        own |= {"head_map": None, "world_size": 1, "prefix_cache": False}
        return {KIND: ExternalEngineConfig(opens="razor_dist.evals.suites.why:WhyModel", **own)}

    @property
    def _tried(self) -> Method:
        engine, full = (self.suite.config.engine(name) for name in (self.method, FULL))
        [found] = methods_of(engine, {self.method: {"attention": engine.attention}})
        both = {name: getattr(engine, name) for name in ("kv_dtype", "retrieval_share")}
        own = {name: value for name, value in both.items() if value != getattr(full, name)}
        return replace(found, settings={**found.settings, **own})

    def items(self) -> Sequence[Item]:
        return [
            Item("/".join(map(str, (self.method, self.fingerprint, *at))), at[2], KIND, {"at": at})
            for at in self.questions
        ]

    def run(self, llm: Any, item: Item) -> Mapping[str, Any]:
        model: WhyModel = llm
        kind, name, length, number, index = item.data["at"]
        method = self._tried
        sample = self.suite.sample(model.prompter, name, length, number)
        question, task = sample.questions[index], self.suite.config.suite.tasks[name]
        ids, prompt, ends = model.prompter.with_ends(*self.suite.conversations(sample)[index])
        document, asked = prompt.index(sample.document), prompt.rindex(question.text)

        def token(character: int) -> int:
            return int(np.flatnonzero(ends > character)[0])

        begin = token(asked)
        places = [
            range(token(document + first), token(document + last - 1) + 1)
            for first, last in question.places
        ]
        said = model.answer(ids, task.answer_tokens)
        text, score = earned(task, model, said, question.answers)
        scored = Scored((*ids, *text), len(ids) - 1)
        mass = model.watched(scored, method, begin, places)
        group = model.shape.query_heads // model.shape.kv_heads
        others = other_heads(method, mass.dropped, group)
        tried = variants(method, others, len(ids)) if kind == LOST else {}
        return {
            "kind": kind,
            "task": name,
            "length": length,
            "number": number,
            "question": index,
            "wanted": list(question.answers),
            "answer": model.prompter.decode(text),
            "score": score,
            "places": len(places),
            "variants": {what: model.compare(own, scored) for what, own in tried.items()},
            **attention_figures(mass, method, group, len(text)),
        }


def _spread(every: Sequence[Any], most: int) -> list[Any]:
    """Return up to ``most`` at even distances, so that each task and length has some."""
    count = min(most, len(every))
    return [every[number * len(every) // count] for number in range(count)]


def earned(
    task: Task, model: WhyModel, said: Sequence[int], wanted: Sequence[str]
) -> tuple[list[int], float]:
    """Return the tokens of an answer up to where it has its whole score, and the score."""
    score = task.score(model.prompter.decode(said), wanted)
    count = len(said)
    # From the end: a score may fall and rise again (F1), and a word may go on.
    while count > 1 and task.score(model.prompter.decode(said[: count - 1]), wanted) == score:
        count -= 1
    return list(said[:count]), score
