"""Head maps: which KV heads keep the whole context, and the scores that say why."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.files import replacing
from razor_dist.heads.decision import Flags, Pairs, Scores, Windows, flags, heads_of_percent, ranked
from razor_dist.models import smollm2

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from razor_dist.config.schema import EngineConfig
    from razor_dist.models.shape import ModelShape

FORMAT_VERSION: Final = 1
FOLDER_HEAD_MAP: Final = "head_map.json"  # a model's own, in its folder
# RazorAttention's Table 4 varies the share of induction heads beside 1 % of echo heads.
_ECHO_PERCENT: Final = 1.0
_STRICT = ConfigDict(strict=True, extra="forbid")
# A string, or an innermost array of numbers and flags.
_STRING_OR_ROW: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^][{}"]*\]')


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Fidelity:
    """A head map's loss and divergence from full attention, on prose without needles."""

    tokens: int = Field(ge=1)  # that were compared, a document's second half
    loss_full: float  # nats per token, as are loss and kl
    loss: float
    kl: float = Field(ge=0)  # mean divergence from full attention's distribution
    same: float = Field(ge=0, le=1)  # fraction of tokens with the same likeliest token

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens of prose: a loss of {self.loss:.3f} nats per token instead of "
            f"{self.loss_full:.3f}, KL {self.kl:.4f}; likeliest token the same {self.same:.1%}"
        )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Verification:
    """Needles found with full attention and with a head map, one asked for in each document.

    ``settings`` are the engine's prefill and streaming policy; the windows are the map's own if it
    has any. Bytes of keys and values are measured, the median over the documents.
    """

    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)  # of a document
    haystack: str
    haystack_fingerprint: str
    seed: int
    dtype: str
    settings: dict[str, Any]
    found_full: int = Field(ge=0)
    found: int = Field(ge=0)
    lost: int = Field(ge=0)  # found with full attention only
    gained: int = Field(ge=0)  # found with the map only
    kv_bytes_full: int = Field(ge=1)
    kv_bytes: int = Field(ge=1)
    fidelity: Fidelity | None = None

    def __str__(self) -> str:
        least = self.settings.get("window_min")
        window = "" if least is None else f", window of at least {least}"
        return (
            f"{self.documents} documents of {self.tokens} tokens ({self.haystack}), "
            f"{self.settings.get('prefill')} prefill{window}: full attention finds "
            f"{self.found_full}, this map {self.found}; {self.lost} lost, {self.gained} gained\n"
            f"KV of a document: {self.kv_bytes / 2**20:.1f} MiB instead of "
            f"{self.kv_bytes_full / 2**20:.1f} ({self.kv_bytes / self.kv_bytes_full:.0%})"
            + ("" if self.fidelity is None else f"\n{self.fidelity}")
        )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class HeadMap:
    """The retrieval heads of one model. A file may leave out the fields with a default.

    Tables are ``[layers][heads]``. ``selected`` has, for each kind of score, the query heads that
    were chosen by it, which make their KV heads retrieval heads; it is empty for a method that
    chooses KV heads.
    """

    format_version: Literal[1] = FORMAT_VERSION
    model: str  # its name, for people
    fingerprint: str  # see `razor_dist.models.loader.model_fingerprint`; "any" fits every model
    method: str  # one of `identify`; constructed (the needle model); full, streaming
    settings: dict[str, Any]  # of the method
    query_heads: int = Field(ge=1)  # per layer
    retrieval: Flags = Field(min_length=1)  # the decision; the engine does not use scores
    selected: dict[str, Pairs]
    scores: dict[str, Scores]  # of query heads, by kind of score
    kv_scores: dict[str, Scores] = Field(default_factory=dict)  # of KV heads, by kind of score
    windows: Windows | None = None  # None: streaming heads have the settings' window
    verification: Verification | None = None  # the map's measured loss

    @model_validator(mode="after")
    def _sizes_agree(self) -> HeadMap:
        layers, kv_heads = len(self.retrieval), len(self.retrieval[0])
        if any(len(row) != kv_heads for row in self.retrieval):
            raise ValueError(f"retrieval: every layer needs {kv_heads} KV heads, like the first")
        if kv_heads == 0 or self.query_heads % kv_heads:
            raise ValueError(
                f"query_heads: {self.query_heads} is not a multiple of the {kv_heads} KV heads"
            )
        for field, tables, heads, what in (
            ("scores", self.scores, self.query_heads, "query heads"),
            ("kv_scores", self.kv_scores, kv_heads, "KV heads"),
        ):
            for kind, rows in tables.items():
                if len(rows) != layers or any(len(row) != heads for row in rows):
                    raise ValueError(f"{field}.{kind}: needs {layers} layers of {heads} {what}")
        both = sorted(self.scores.keys() & self.kv_scores.keys())
        if both:
            raise ValueError(
                f"kv_scores.{both[0]}: scores has this kind too; a kind belongs to query heads or "
                "to KV heads"
            )
        if self.windows is not None:
            self._check_windows(self.windows)
        for kind, pairs in self.selected.items():
            for layer, head in pairs:
                if not (0 <= layer < layers and 0 <= head < self.query_heads):
                    raise ValueError(f"selected.{kind}: there is no layer {layer}, head {head}")
        return self

    def _check_windows(self, windows: Windows) -> None:
        sizes = [len(row) for row in self.retrieval]
        if [len(row) for row in windows] != sizes:
            raise ValueError(f"windows: needs {len(sizes)} layers of {sizes[0]} KV heads")
        for layer, row in enumerate(self.retrieval):
            for head, flag in enumerate(row):
                if flag is not (windows[layer][head] is None):
                    kind = "retrieval head and has none" if flag else "streaming head and needs one"
                    raise ValueError(f"windows: layer {layer}, KV head {head} is a {kind}")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that a model must have for this map."""
        return {
            "layers": len(self.retrieval),
            "query heads": self.query_heads,
            "KV heads": len(self.retrieval[0]),
        }

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // len(self.retrieval[0])

    @property
    def kv_fraction(self) -> float:
        """Fraction of KV heads that keep the whole context."""
        flags = [flag for row in self.retrieval for flag in row]
        return sum(flags) / len(flags)

    @property
    def selected_fraction(self) -> float:
        """Fraction of query heads that were selected by their own scores."""
        chosen = {pair for pairs in self.selected.values() for pair in pairs}
        return len(chosen) / (len(self.retrieval) * self.query_heads)

    @classmethod
    def of_model(cls, name: str, config: PretrainedConfig, **fields: Any) -> HeadMap:
        """Build a map with these ``fields`` for the model of a configuration."""
        from razor_dist.models.loader import model_fingerprint
        from razor_dist.models.shape import ModelShape

        return cls(
            model=name,
            fingerprint=model_fingerprint(config),
            query_heads=ModelShape.from_config(config).query_heads,
            **{"selected": {}, "scores": {}, **fields},
        )

    @classmethod
    def uniform(cls, method: Literal["full", "streaming"], shape: ModelShape) -> HeadMap:
        """A map with retrieval heads only ("full"), or streaming heads only (StreamingLLM)."""
        return cls(
            model="any",
            fingerprint="any",
            method=method,
            settings={},
            query_heads=shape.query_heads,
            retrieval=((method == "full",) * shape.kv_heads,) * shape.layers,
            selected={},
            scores={},
        )

    def validate(self, shape: ModelShape, fingerprint: str) -> None:
        """Raise `HeadMapError`, with both values, unless this map fits the model."""
        wanted = (shape.layers, shape.query_heads, shape.kv_heads)
        for (what, mine), theirs in zip(self.sizes.items(), wanted, strict=True):
            if mine != theirs:
                raise HeadMapError(
                    f"this head map, made for {self.model!r}, has {mine} {what}, but the model "
                    f"has {theirs}"
                )
        if self.fingerprint not in (fingerprint, "any"):
            raise HeadMapError(
                f"this head map was made for {self.model!r} (fingerprint {self.fingerprint}), a "
                f"model of the same sizes but another configuration ({fingerprint})"
            )

    @classmethod
    def load(cls, path: str | Path) -> HeadMap:
        """Read a head map; raise `HeadMapError`, with the wrong field, if that fails."""
        try:
            return _adapter.validate_json(Path(path).expanduser().read_bytes())
        except OSError as error:
            raise HeadMapError(f"cannot read the head map {path}: {error.strerror}") from error
        except ValidationError as error:
            raise HeadMapError(f"head map {path}: {first_fault(error)}") from error

    def save(self, path: str | Path) -> None:
        """Write the map as JSON, one layer a line, without empty optional fields.

        A crash or a full disk leaves the old file or the new one. Raise `ConfigError` if the file
        cannot be written.
        """
        optional = ("kv_scores", "windows", "verification")
        fields = dataclasses.asdict(self).items()
        stored = {name: value for name, value in fields if value or name not in optional}
        text = _STRING_OR_ROW.sub(_on_one_line, json.dumps(stored, indent=2)) + "\n"
        with replacing(Path(path).expanduser().resolve()) as draft:  # where a link leads
            draft.write_text(text, encoding="utf-8")


_adapter = TypeAdapter(HeadMap)


def head_map_of(config: EngineConfig, shape: ModelShape, fingerprint: str) -> HeadMap:
    """The head map of an engine's settings, checked against the model."""
    if config.attention != "razor":
        return HeadMap.uniform(config.attention, shape)
    head_map = HeadMap.load(config.head_map or default_head_map(config.model))
    head_map.validate(shape, fingerprint)
    return head_map


def default_head_map(model: str) -> Path:
    """Return the map in a model's folder, or the shipped one; `HeadMapError` without either."""
    own = Path(model).expanduser() / FOLDER_HEAD_MAP
    return own if own.is_file() and model != smollm2.NAME else shipped_head_map(model)


def shipped_head_map(model_name: str) -> Path:
    """Return the path of the head map that comes with razor_dist for a model, or `HeadMapError`."""
    path = _shipped(model_name)
    if path.is_file():
        return path
    raise HeadMapError(
        f"no head map is shipped for the model {model_name!r}; make one with: "
        f"razor-dist identify razor {model_name} --out heads.json, and give it as --head-map "
        "heads.json; or keep all heads with --attention full"
    )


def head_map_file(name: str) -> Path:
    """``name`` as a path, or else the path of the shipped map of this name."""
    path, shipped = Path(name).expanduser(), _shipped(name)
    return shipped if shipped.is_file() and not path.exists() else path


def _shipped(name: str) -> Path:
    folder = files("razor_dist").joinpath("configs", "head_maps")
    return Path(str(folder.joinpath(name.replace("/", "--") + ".json")))  # / of a hub id


def first_fault(error: ValidationError) -> str:
    """The first wrong field, and what is wrong with it."""
    fault = error.errors(include_url=False)[0]
    if fault["loc"] == ("format_version",):
        return f"format_version is {fault['input']!r}, but this release reads {FORMAT_VERSION}"
    field = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def _on_one_line(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else "[" + " ".join(text[1:-1].split()) + "]"


@dataclass(frozen=True)
class KeptHeads:
    """The KV heads that a map would keep at a budget."""

    kept: Pairs  # in the order of choice: a larger budget's list begins with a smaller one's
    retrieval: Flags
    selected: dict[str, int]  # number of selected query heads by kind of score, if the map has any


def kv_budget(head_map: HeadMap, percent: float) -> int:
    """Count the KV heads that are ``percent`` of all; raise `ConfigError` unless 0 < it <= 100."""
    if not 0 < percent <= 100:
        raise ConfigError(f"a budget must be a percentage above 0 and up to 100, got {percent:g}")
    return heads_of_percent(percent, sum(map(len, head_map.retrieval)))


def choose(head_map: HeadMap, kv_heads: int) -> KeptHeads:
    """Choose the best KV heads by a map's own scores; equal scores by layer, then head.

    A score of KV heads ranks them directly. RazorAttention scores query heads: the best 1 % of all
    by echo score are selected, whatever the budget, then more one by one by induction score, until
    their groups are as many KV heads as the budget. Each adds at most one KV head, so the budget is
    met exactly. Raise `HeadMapError` if the map has neither kind of scores.
    """
    selected: dict[str, int] = {}
    if head_map.scores.keys() >= {"induction", "echo"}:
        selected = {"echo": 0, "induction": 0}
        # Insertion-ordered: the KV heads, first come first.
        found: dict[tuple[int, int], None] = {}
        echo, induction = (ranked(head_map.scores[kind]) for kind in selected)
        echo = echo[: heads_of_percent(_ECHO_PERCENT, len(echo))]
        for kind, order in (("echo", echo), ("induction", induction)):
            for layer, head in order:
                if len(found) == kv_heads:
                    break
                selected[kind] += 1
                found[layer, head // head_map.group] = None
        kept = tuple(found)
    elif len(head_map.kv_scores) == 1 and not head_map.scores:
        (scores,) = head_map.kv_scores.values()
        kept = ranked(scores)[:kv_heads]
    else:
        kinds = [*head_map.scores, *head_map.kv_scores]
        raise HeadMapError(
            f"a head map of method {head_map.method!r} with scores {kinds} ranks no KV heads: it "
            "needs induction and echo scores, or one score of KV heads"
        )
    retrieval = flags(kept, len(head_map.retrieval), len(head_map.retrieval[0]))
    return KeptHeads(kept, retrieval, selected)
