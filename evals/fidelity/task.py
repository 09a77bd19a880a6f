"""``eval fidelity`` as a job: an item is one text, read by one method and by full attention."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import haystack_paragraphs
from razor_dist.documents.read import kind_of, read_document
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.fidelity.model import FidelityModel, Scored
from razor_dist.evals.methods import Method, methods_of, shape_of
from razor_dist.evals.texts import Prompter
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.jobs.task import Item
from razor_dist.models.registry import display_name

KIND = "fidelity"  # of task, in a folder's settings


@dataclass(frozen=True)
class Text:
    name: str
    ids: bytes  # int32 token ids
    prompt: int  # tokens that are read before the first that is compared

    @property
    def digest(self) -> str:
        about = self.ids + self.prompt.to_bytes(8)
        return hashlib.sha256(about).hexdigest()[:12]

    @property
    def scored(self) -> Scored:
        return Scored(tuple(np.frombuffer(self.ids, "<i4").tolist()), self.prompt)


@dataclass(frozen=True)
class FidelityTask:
    """A task of `razor_dist.jobs`; build it with `plan`.

    A folder may be continued with other texts and methods: the ids of what is there name both by
    their content.
    """

    config: FidelityConfig
    texts: tuple[Text, ...]
    methods: tuple[Method, ...]

    @classmethod
    def plan(cls, config: FidelityConfig, files: Sequence[Path]) -> FidelityTask:
        """Read and tokenise the texts; without a file it is the haystack of the needle tests."""
        methods = tuple(methods_of(config, config.method_settings))
        context = shape_of(config).max_positions
        most = min(config.max_model_len or context, context) - 1  # one is generated
        if config.tokens is not None and config.tokens > most:
            raise ConfigError(
                f"tokens is {config.tokens}, but {config.model} holds {most} and one that follows"
            )
        names = [file.name for file in files]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two texts are named {min(twice)}; rename one")
        found = dict(zip(names, map(_text_of, files), strict=True)) or _haystack()
        encoder = PromptEncoder(Prompter.of(config).tokenizer)
        texts = []
        for name, text in found.items():
            ids = encoder.text(text)[: config.tokens or most]
            wanted = config.tokens or (config.prompt_tokens or 1) + 2
            if len(ids) < wanted:
                raise ConfigError(f"{name} has {len(ids)} tokens, fewer than the {wanted} wanted")
            prompt = config.prompt_tokens or len(ids) // 2
            texts.append(Text(name, np.array(ids, "<i4").tobytes(), prompt))
        return cls(config, tuple(texts), methods)

    @property
    def settings(self) -> Mapping[str, Any]:
        config = self.config
        return {
            "kind": KIND,
            "model": display_name(config.model),
            "ranges": config.ranges,
            "steps": config.steps,
        }

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return {"shared": self.config.engine}

    def items(self) -> Sequence[Item]:
        """Return each text with all methods, one after the other: full attention reads it once."""
        return [
            Item(
                "/".join((text.name, text.digest, method.name, method.fingerprint)),
                len(text.ids) // 4,
                "shared",
                {"text": number, "method": index},
            )
            for (number, text), (index, method) in itertools.product(
                enumerate(self.texts), enumerate(self.methods)
            )
        ]

    def run(self, llm: Any, item: Item) -> Mapping[str, Any]:
        model: FidelityModel = llm
        text, method = self.texts[item.data["text"]], self.methods[item.data["method"]]
        one_by_one = self.config.steps == "decode"
        figures, cost = model.measure(method, text.scored, one_by_one=one_by_one)
        count = len(text.scored.positions)
        edges = [count * part // self.config.ranges for part in range(self.config.ranges + 1)]
        return {
            "text": text.name,
            "tokens": len(text.ids) // 4,
            "prompt_tokens": text.prompt,
            "method": method.name,
            "method_settings": dict(method.settings),
            "retrieval_heads": None
            if method.retrieval is None
            else sum(map(sum, method.retrieval)),
            "dtype": model.dtype,
            "kv_bytes": cost["kv_bytes"],
            "kv_bytes_full": cost["kv_bytes_full"],
            "all": figures.summary(),
            "ranges": [
                {"begin": text.prompt + begin, "end": text.prompt + end}
                | figures.summary(begin, end)
                for begin, end in itertools.pairwise(edges)
                if end > begin
            ],
            "timing": {"seconds": round(cost["seconds"], 3)},
        }


def _haystack() -> dict[str, str]:
    name, paragraphs = haystack_paragraphs("auto")
    return {name: "\n\n".join(paragraphs)}


def _text_of(file: Path) -> str:
    """Return a document's text; a file of an unknown kind is plain text."""
    kind = kind_of(file)
    if kind in (None, "jsonl"):
        kind = "text"
    try:
        gz = file.suffix.lower() == ".gz"
        return read_document(file.read_bytes(), kind, gz=gz).text
    except OSError as error:
        raise ConfigError(f"cannot read the text {file}: {error.strerror}") from None
    except DocumentError as error:
        raise ConfigError(f"{file} {error}") from None
