"""Asks the questions of a grid: one model, many engines around it.

With exact prefill the keys and values of a document are those of full attention, whatever the
heads' decision: it decides only what is kept of them. So a document is prefilled once, with full
attention, and every other engine with exact prefill gets its keys and values layer by layer, as if
its own model had just computed them (`Replay`). That is most of a grid's time. With local prefill
a document has to be read by every method.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from razor_dist.config.schema import EngineConfig
from razor_dist.documents.haystack import Document
from razor_dist.engine.build import Engine, check_model, make_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.device import torch_device, torch_dtype
from razor_dist.engine.runner import ModelRunner
from razor_dist.engine.sampling_params import SamplingParams
from razor_dist.engine.weights import head_map_of
from razor_dist.evals.grid import ANSWER_TOKENS, Method, Place, Prompter
from razor_dist.evals.grid import FULL_METHOD as FULL
from razor_dist.evals.grid_results import Cell, Results
from razor_dist.evals.timing import Say
from razor_dist.models.loader import eos_token_ids, load_model, model_fingerprint
from razor_dist.models.longrope import plain_positions
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.ring import ring_attention
from razor_dist.parallel.zigzag import Chunk

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values ``[K, T, D]`` of each layer."""

_GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)


class Replay:
    """A model that can also give keys and values that it computed before.

    Parameters
    ----------
    model : PreTrainedModel
        Loaded with our attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.base_model = model.base_model
        self._shape = ModelShape.from_config(model.config)
        self._layers: Layers | None = None

    def parameters(self) -> Iterator[Tensor]:
        """The model's."""
        return self.model.parameters()

    @contextmanager
    def giving(self, layers: Layers) -> Iterator[None]:
        """Give these keys and values instead of running the model."""
        self._layers = layers
        try:
            yield
        finally:
            self._layers = None

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass, or the replay of one: without attention, and with logits of 0."""
        if self._layers is None:
            return self.model(**inputs)
        positions = plain_positions(inputs["position_ids"][0])
        # A view of one zero: nothing is computed from it.
        q = (
            self._layers[0][0]
            .new_zeros(1, 1, 1)
            .expand(self._shape.query_heads, len(positions), self._shape.head_dim)
        )
        for layer, (k, v) in enumerate(self._layers):
            inputs["attention_context"].attend(layer, q, k[:, positions], v[:, positions], 1.0)
        logits = q.new_zeros(1, 1, self._shape.vocab_size)
        return CausalLMOutput(logits=cast("torch.FloatTensor", logits))

    def ring(self, comm: Communicator, chunk: Chunk, q: Tensor, *others: Any) -> Tensor:
        """`ring_attention`, left out in a replay."""
        return ring_attention(comm, chunk, q, *others) if self._layers is None else q


class GridModel:
    """A model to try methods on.

    Parameters
    ----------
    config : EngineConfig
        What all methods share; one rank.

    Raises
    ------
    ConfigError, ModelError
        If the model cannot be loaded, or has no tokenizer.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        device = torch_device(config, 0)
        trust = config.trust_remote_code
        path = resolve_model(config.model, trust_remote_code=trust)
        self.prompter = Prompter.of_model(path, trust_remote_code=trust)
        torch.set_num_threads(config.threads_per_rank(1))
        model = load_model(
            path, device=device, dtype=torch_dtype(config, device), trust_remote_code=trust
        )
        check_model(model, config.model)
        self.replay = Replay(model)
        self.shape = ModelShape.from_config(model.config)
        self.fingerprint = model_fingerprint(model.config)
        self._eos = eos_token_ids(path)

    def engine(self, method: Method, tokens: int) -> Engine:
        """An engine with a method's settings, for a document and its question of ``tokens``."""
        own = {name: value for name, value in method.settings.items() if name != "head_map"}
        shared = self.config.model_dump() | {"max_num_seqs": 2, "cuda_graphs": False}
        config = EngineConfig(**(shared | own | {"max_model_len": tokens}))
        retrieval, windows = method.retrieval, method.windows
        if retrieval is None:
            head_map = head_map_of(config, self.shape, self.fingerprint)
            retrieval, windows = head_map.retrieval, head_map.windows
        return make_engine(
            cast("PreTrainedModel", self.replay),
            config,
            retrieval,
            Communicator(None),
            eos_token_ids=self._eos,
            windows=windows,
            ring=self.replay.ring,
        )

    def run(
        self,
        methods: Sequence[Method],
        documents: Mapping[Place, Document],
        results: Results,
        say: Say,
    ) -> None:
        """Run what ``results`` lacks; first what shares its prefill, for that takes less time."""
        for shared in (True, False):
            group = [method for method in methods if method.shares_prefill is shared]
            for place, document in documents.items():
                (needle,) = document.needles
                prompts = self.prompts(document)
                prints = {m.name: m.fingerprint(self.config.model, prompts) for m in group}
                todo = [m for m in group if not results.has((m.name, *place), prints[m.name])]
                for method, answer, kv_bytes, seconds in self._answers(todo, *prompts):
                    length, depth, which = place
                    cell = Cell(
                        method=method.name,
                        length=length,
                        depth=depth,
                        needle=which,
                        expected=needle.number,
                        answer=answer,
                        right=needle.found_in(answer),
                        kv_bytes=kv_bytes,
                        prefill_seconds=round(seconds, 2),
                        settings=prints[method.name],
                    )
                    results.add([cell])
                    mark = "right" if cell.right else f"WRONG {answer!r}"
                    say(f"{method.name} {length} {depth}% {needle.number}: {mark}")

    def current(
        self, methods: Sequence[Method], documents: Mapping[Place, Document], results: Results
    ) -> list[Cell]:
        """The cells of these methods and documents that were run with the settings at hand."""
        wanted = {
            (method.name, *place, method.fingerprint(self.config.model, self.prompts(document)))
            for place, document in documents.items()
            for method in methods
        }
        return [cell for cell in results.cells if (*cell.key, cell.settings) in wanted]

    def prompts(self, document: Document) -> tuple[list[int], list[int]]:
        """Token ids of a document, and of the question that continues it."""
        (needle,) = document.needles
        return self.prompter.document(document), self.prompter.question(needle)

    def _answers(
        self, methods: Sequence[Method], document: list[int], question: list[int]
    ) -> Iterator[tuple[Method, str, int, float]]:
        """Answer, KV bytes of the document and seconds of its prefill, for every method."""
        if not methods:
            return
        tokens = len(document) + len(question) + ANSWER_TOKENS
        if not methods[0].shares_prefill:
            for method in methods:
                core = self.engine(method, tokens).core
                seconds = prefill(core, document)
                yield method, *self._ask(core, question), seconds
            return
        full = self.engine(FULL, tokens)
        seconds = prefill(full.core, document)
        layers = kept_layers(full.runner)
        for method in methods:
            if method.settings.get("attention") == "full":
                yield method, *self._ask(full.core, question), seconds
                continue
            core = self.engine(method, tokens).core
            with self.replay.giving(layers):
                prefill(core, document)
            yield method, *self._ask(core, question), seconds

    def _ask(self, core: EngineCore, question: list[int]) -> tuple[str, int]:
        kv_bytes = core.stats()["kv_bytes_per_rank"][0]
        core.add("question", question, _GREEDY, prefix_id="document")
        return self.prompter.decode(run_core(core)), kv_bytes


def run_core(core: EngineCore) -> list[int]:
    """Step until nothing is left to do; the tokens that came."""
    tokens: list[int] = []
    while core.has_work:
        tokens += [message["token"] for message in core.step() if message["t"] == "token"]
    return tokens


def prefill(core: EngineCore, document: list[int]) -> float:
    """Prefill a document and keep it; seconds."""
    began = time.perf_counter()
    core.add("document", document, _GREEDY, pin=True)
    run_core(core)
    return time.perf_counter() - began


def kept_layers(runner: ModelRunner) -> Layers:
    """Keys and values of the one sequence of an engine on one rank whose heads all keep all."""
    (sequence,) = runner.sequences.values()
    pages, layout = runner.caches.pages, runner.caches.layout
    assert not layout.streaming_rows, "only full attention keeps every head's keys"
    extents = pages.extents(sequence.table, 0, sequence.table.tokens)
    return [_joined(pages.segments(layer.retrieval_rows, extents)) for layer in layout.layers]


def _joined(segments: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(segments) == 1:
        return segments[0]
    keys, values = zip(*segments, strict=True)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)
