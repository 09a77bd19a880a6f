"""A job's work: tasks, their items and parts of items, and the settings that decide the results."""

from __future__ import annotations

import hashlib
import json
import pkgutil
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.heads.head_map import default_head_map
from razor_dist.models.content import content_hash

if TYPE_CHECKING:
    from razor_dist.llm.llm import LLM

# Engine settings that do not change answers: the ranks and how they share the work
# (`tests/test_invariance.py`), capacities and time-outs. A job may continue with other values.
# seed and generation_config are not among them: they decide the draws, temperature, ... of a
# request that does not set its own.
_INDIFFERENT = """
    world_size max_num_seqs kv_tokens page_size chunked_prefill_size max_step_ms scheduling_policy
    cuda_graphs shared_memory threads collective_timeout heartbeat_timeout decode
    prefix_cache prefix_tail_tokens prefix_host_gb prefix_store prefix_store_gb speculative_config
"""
# Error codes of refusals that depend on these settings, which the next run may change, or on how
# busy the machine is.
RETRYABLE = frozenset({"kv_capacity_exceeded", "max_num_seqs_exceeded", "priority_not_heard"})
RETRYABLE |= {"structured_outputs_timeout"}
_CONTENT = "model_content"  # among an engine's settings: what its model's folder holds


class ExternalEngineConfig(EngineConfig):
    """Settings of a model that another library runs, in an engine's place in a task; frozen.

    Its fields beside the engine's and `opens` decide the results, too.
    """

    # The class to open, "module:class", which takes these settings. By itself it decides nothing.
    opens: str = Field(exclude=True)

    def open(self) -> Any:
        """Return the model that items get as their ``llm``; called in a process of its own.

        It must have the methods of `razor_dist.LLM` that the task calls, and may have ``close()``.
        Task and `opens` are imported from modules, so neither may be defined in a script.
        """
        return pkgutil.resolve_name(self.opens)(self)


@dataclass(frozen=True)
class Item:
    """One piece of work, with one result.

    Its ``id`` is unique in the job and the same in every run: an id that is in the results is not
    computed again. If an item may change between runs, such as a file's text, put a hash of it
    into the id.
    """

    id: str
    # An estimate of the work in tokens, at least 1: the order of the items (`run_items`) and the
    # time left are reckoned by it.
    size: int = 1
    engine: str = "default"  # the task's engine that it runs on
    data: Mapping[str, Any] = field(default_factory=dict)  # for the task; travels by pickle
    # Results of parts that earlier attempts stored, by their keys: see `PartResult`.
    parts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.id and self.size >= 1, self


@dataclass(frozen=True)
class ItemSize:
    """An item's true size, and its number of ``parts``, of which ``stored`` exist already.

    ``tokens`` is the work that is left, in prefilled tokens (`ANSWER_TOKEN`).
    """

    tokens: int
    parts: int = 1
    stored: int = 0


@dataclass(frozen=True)
class PartResult:
    """A part of an item that is done: it is stored at once, and `Item.parts` has it next time.

    ``key`` names the part within its item, the same in every run, and differs where the part does;
    ``result`` is plain JSON data; ``tokens`` is the part's size. A part that is not ``whole``,
    such as the beginning of an answer, is stored too, but not logged.
    """

    key: str
    result: Mapping[str, Any]
    tokens: int
    whole: bool = True


# Prefilled tokens that take about as long as a token of an answer: 16 to 20 on two cores with the
# embedded model. A job's time left is reckoned in prefilled tokens.
ANSWER_TOKEN = 16


@dataclass(frozen=True)
class TokensDone:
    """Tokens since the item's last update.

    ``found`` were in the caches, and ``found_answer`` stored as the beginning of an answer.
    ``left`` is the work that the item still takes, in prefilled tokens (`ANSWER_TOKEN`).
    """

    prefilled: int = 0
    generated: int = 0
    found: int = 0
    found_answer: int = 0
    left: int = 0


Update = ItemSize | PartResult | TokensDone
# A stream of updates that returns the result.
Updates = Generator[Update, None, Mapping[str, Any]]


def work_of(result: Mapping[str, Any] | Updates) -> Updates:
    """Return a task's or an engine's result as a stream; a plain result has no updates."""
    if isinstance(result, Generator):
        result = yield from result
    return result


class Task(Protocol):
    """A job's work. It travels to every engine by pickle, so it holds plain data only.

    A task may also have

    - ``extends``, as `ResultStore.open` takes it;
    - ``measured(items)``, which gets the items that are to be worked on, before any engine is
      opened, and returns them with their true sizes;
    - ``at_once``, the number of items that an engine gets at a time, each in a thread that calls
      `run`; by default one.
    """

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that decides the results, apart from the engines' settings: plain JSON data."""

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        """The settings of the engines that `Item.engine` names; items run in this order."""

    def items(self) -> Sequence[Item]:
        """Return all items, in the order in which the finished results list them."""

    def run(self, llm: LLM, item: Item) -> Mapping[str, Any] | Updates:
        """Do one item's work while it has the engine to itself, or shares it (``at_once``).

        Runs in a process on the node of the engine's rank 0. Whatever it leaves in ``llm`` (a
        prefix that is not released) takes room in the caches from the next item.

        The result is plain JSON data without NaN. Measured times belong under the key ``timing``:
        the rest is to be the same in every run. One with ``"retryable": True`` is computed again by
        the next run, whose engine may have other settings. An item of many hours is a generator
        that returns it, and yields a `PartResult` whenever something is done that no later attempt
        need repeat, and an `ItemSize` once it knows it.

        Raises `EngineError` if the engine fails: the item is tried again, on this engine or
        another. Anything else is recorded as the item's failure, and it is not tried again.
        """


def job_settings(task: Task) -> dict[str, Any]:
    """Return all that decides a task's results, as plain JSON data.

    Head maps count by their content: another path of the same map is the same job. With full
    attention a given one counts, since it chooses the heads of sources. A model in a local folder
    counts by its path and its content.
    Raises `ConfigError` if the task's settings are not JSON data, or a head map cannot be read, and
    `HeadMapError` if an engine needs a head map and its model has none.
    """
    contents = {config.model: content_hash(config.model) for config in task.engines.values()}
    engines = {
        name: engine_settings(config, contents[config.model])
        for name, config in task.engines.items()
    }
    try:
        # Read back: a tuple and a list, or 1 and "1" as a key, are the same in a file.
        settings: dict[str, Any] = json.loads(
            json.dumps({"task": dict(task.settings), "engines": engines}, allow_nan=False)
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the task's settings are not JSON data: {error}") from None
    return settings


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Name settings by the first 16 hexadecimal digits of the SHA-256 of their JSON."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def engine_settings(config: EngineConfig, content: str | None) -> dict[str, Any]:
    """Return an engine's part of `job_settings`; ``content`` is its model's `content_hash`."""
    settings = _deciding(config)
    return settings if content is None else settings | {_CONTENT: content}


def _deciding(config: EngineConfig) -> dict[str, Any]:
    names = set(EngineConfig.model_fields) - {*_INDIFFERENT.split(), "head_map"}
    if isinstance(config, ExternalEngineConfig):
        names |= set(type(config).model_fields) - set(EngineConfig.model_fields)
    fields = config.model_dump(mode="json", include=names)
    if config.attention == "razor" or (config.attention == "full" and config.head_map):
        path = Path(config.head_map or default_head_map(config.model))
        try:
            fields["head_map"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise ConfigError(f"cannot read the head map {path}: {error.strerror}") from None
    return fields
