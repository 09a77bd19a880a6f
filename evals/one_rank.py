"""The engine in this process, one rank of it: the one door of evaluations to what is below `llm`.

An evaluation that looks at each step, or gives an engine keys and values that were computed before,
cannot ask an `LLM`, whose ranks are other processes.

**Replays.** With exact prefill the keys and values of a document are those of full attention: the
heads' decision is only about what is kept of them. So a `ReplayModel` prefills a document once,
with full attention, and every other method with exact prefill gets its keys and values layer by
layer, as if its own model had just computed them (`Replay`). That saves most of a grid's time. With
local prefill every method has to read a document by itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from razor_dist.attention.sources import TOP as TOP
from razor_dist.attention.sources import Sources as Sources
from razor_dist.cache.policy import StreamingPolicy as StreamingPolicy
from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import RankEngine as RankEngine
from razor_dist.engine.build import build_engine, check_model, load, make_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.device import torch_device as torch_device
from razor_dist.engine.device import torch_dtype as torch_dtype
from razor_dist.engine.runner import ModelRunner
from razor_dist.evals.methods import FULL_METHOD, Method
from razor_dist.evals.selection import SelectedHeads
from razor_dist.evals.settings import METHOD_SETTINGS
from razor_dist.evals.texts import Prompter
from razor_dist.evals.watch import Watch
from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
from razor_dist.heads.decision import HeadRoles
from razor_dist.heads.head_map import head_map_of
from razor_dist.kernels.quantized import Codes, KeysOrValues
from razor_dist.kernels.query import Query
from razor_dist.models.bridge import AttentionContext
from razor_dist.models.dual_chunk import check_one_chunk
from razor_dist.models.loader import dtype_name, model_fingerprint
from razor_dist.models.longrope import plain_positions
from razor_dist.models.shape import ModelShape
from razor_dist.models.slower_half import slower_half
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.ring import ring_attention
from razor_dist.parallel.zigzag import Chunk
from razor_dist.protocol.messages import AboutRequest, Failed, Token
from razor_dist.protocol.sampling_params import SamplingParams

Layers = Sequence[tuple[Tensor, ...]]  # of each layer, keys and values [K, T, D]


_GREEDY = SamplingParams(temperature=0, max_tokens=1)


# Takes positions [T] and logits [T, V], and returns the logits to go on with.
Observer = Callable[[Tensor, Tensor], Tensor]


class Replay:
    """A model, loaded with our attention, that can also give keys and values computed before."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.observer: Observer | None = None  # of every forward pass, if there is one
        self.selected: SelectedHeads | None = None  # heads whose outputs replace the engine's
        self.watch: Watch | None = None  # of every forward pass, if there is one
        self._shape = ModelShape.from_config(model.config)
        self._layers: Layers | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @contextmanager
    def giving(self, layers: Layers) -> Iterator[None]:
        """Give these keys and values instead of running the model."""
        self._layers = layers
        try:
            yield
        finally:
            self._layers = None

    def __call__(self, **inputs: Any) -> Any:
        """Run a forward pass, or replay one: stored keys and values, no attention, zero logits."""
        positions = plain_positions(inputs["position_ids"][0])
        keep = inputs["logits_to_keep"]
        kept = positions[keep] if isinstance(keep, Tensor) else positions  # 0 keeps all
        if self._layers is None:
            if self.selected is not None or self.watch is not None:
                inputs["attention_context"] = _Seen(self, inputs["attention_context"], positions)
            output = self.model(**inputs)
            if self.observer is not None:
                output.logits = self.observer(kept, output.logits[0]).unsqueeze(0)
            return output
        # A view of one zero: nothing is computed from it.
        zero = self._layers[0][0].new_zeros(1, 1, 1)
        q = zero.expand(self._shape.query_heads, len(positions), self._shape.head_dim)
        query = Query.grouped(q, 1.0, None, self._shape.kv_heads)
        for layer, (k, v) in enumerate(self._layers):
            inputs["attention_context"].attend(layer, query, k[:, positions], v[:, positions])
        logits = zero.new_zeros(1, len(kept), self._shape.vocab_size)
        return CausalLMOutput(logits=cast("torch.FloatTensor", logits))

    def ring(self, comm: Communicator, chunk: Chunk, query: Query, *others: Any) -> Tensor:
        """`ring_attention`, left out in a replay."""
        return ring_attention(comm, chunk, query, *others) if self._layers is None else query.q


class _Seen:
    """An `AttentionContext` that shows its queries to a watch and replaces selected heads."""

    def __init__(self, replay: Replay, inner: AttentionContext, positions: Tensor) -> None:
        self._inner, self._positions = inner, positions
        self._watch, self._selected = replay.watch, replay.selected

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        # Before the attention, which may turn queries and keys in place.
        found = None
        if self._watch is not None:
            self._watch.look(layer, query, k, self._positions)
        if self._selected is not None:
            found = self._selected.attend(layer, query, k, v, self._positions)
        out = self._inner.attend(layer, query, k, v)
        if self._selected is not None and found is not None:
            groups = out.unflatten(1, (query.q.shape[0], -1))
            groups[:, self._selected.heads[layer]] = found.to(out.dtype)
        return out


class InProcess:
    """A model in this process, in an engine's place in a job."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.prompter = Prompter.of(config)
        torch.set_num_threads(config.threads_per_rank(1))


class TracedModel(InProcess):
    """A one-rank engine in this process that exposes the trace of every step."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._engine = one_rank_engine(config)

    def answer(self, ids: Sequence[int], most: int) -> tuple[list[int], list[Sources]]:
        """Return up to ``most`` tokens, and for each but the first its sources by head."""
        # Greedy, so that the answer is the prompt's and the settings' alone.
        params = SamplingParams(temperature=0, max_tokens=most, return_sources=1)
        self._engine.core.add("question", ids, params)
        tokens: list[int] = []
        traced: list[Sources] = []
        for message in messages(self._engine.core):
            if isinstance(message, Token):
                tokens.append(message.token)
                # A step may give several tokens, each with its own sources.
                traced += [of.pop(0) for of in self._engine.runner.sources.values() if of]
        return tokens, traced


class ReplayModel(InProcess):
    """One model that is asked by many methods, which share the prefill of a document."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        whole = {"attention": "full", "head_map": None, "weights": "replicated"}
        device = torch_device(config, 0)
        loaded = load(config.model_copy(update=whole), Communicator(None), device)
        check_model(loaded.model, config.model)
        self.replay, self._eos = Replay(loaded.model), loaded.eos_token_ids
        self.shape = ModelShape.from_config(loaded.model.config)
        self.fingerprint = model_fingerprint(loaded.model.config)
        self.dtype = dtype_name(self.replay.dtype)
        # The document that was read last with full attention, and the engine with its caches.
        self._read: tuple[list[int], RankEngine] | None = None

    def engine(self, method: Method, tokens: int) -> RankEngine:
        known = {*METHOD_SETTINGS, "retrieval_share"} - {"head_map"}
        if method.selection is not None:  # which chooses in the engine's place
            known.remove("retrieval_share")
        own = {name: value for name, value in method.settings.items() if name in known}
        shared = self.config.model_dump(include=set(EngineConfig.model_fields))
        shared |= {"max_num_seqs": 2, "cuda_graphs": False, "attention": "razor"}
        # A cached prefix would hold another method's keys; a replay gives one token a step. Only
        # methods that say so choose blocks: the methods they are compared with read all.
        shared |= {"prefix_cache": False, "speculative_config": None, "retrieval_share": 0.0}
        config = EngineConfig(**(shared | own | {"max_model_len": tokens}))
        if method.retrieval is None:
            head_map = head_map_of(config, self.shape, self.fingerprint)
            roles = HeadRoles(head_map.retrieval, head_map.windows)
        else:
            roles = HeadRoles(method.retrieval, method.windows)
        model, ring = cast("PreTrainedModel", self.replay), self.replay.ring
        comm = Communicator(None)
        gc.collect()  # of engines of before: their parts refer to each other, and some hold caches
        return make_engine(model, config, roles, comm, eos_token_ids=self._eos, ring=ring)

    @contextmanager
    def whole_or_forgotten(self) -> Iterator[None]:
        """Forget the document if a question about it fails: its engine's state is then unknown."""
        try:
            yield
        except BaseException:
            self._read = None
            raise

    def read(self, method: Method, tokens: int, document: list[int]) -> RankEngine:
        """Return an engine of a method that has read a document; see the module."""
        given: AbstractContextManager[None] = nullcontext()
        self.replay.selected = None
        if method.shares_prefill:
            if self._read is None or self._read[0] != document:
                self._read = None  # frees its caches before there are others
                full = self.engine(FULL_METHOD, tokens)
                prefill(full.core, document)
                self._read = document, full
            if method.is_full:
                return self._read[1]
            given = self.replay.giving(kept_layers(self._read[1].runner))
        engine = self.engine(method, tokens)
        if method.selection is not None:
            slow = slower_half(self.replay.model, self.shape.head_dim)
            check_one_chunk(self.replay.model.base_model, tokens)
            self.replay.selected = SelectedHeads(method.selection, slow, tokens)
        with given:
            prefill(engine.core, document)
        return engine


@dataclass
class MethodEngine:
    """A method's engine, with the methods of `LLM` that `ask` calls."""

    model: ReplayModel
    method: Method
    tokens: int  # of a document, its question and answer
    _core: EngineCore | None = None

    def stats(self) -> Mapping[str, Any]:
        kv = [0] if self._core is None else self._core.stats().kv_bytes_per_rank
        return {"kv_bytes_per_rank": kv}

    @contextmanager
    def prefill(self, ids: list[int]) -> Iterator[str]:
        """Read a document; yields the prefix id that `generate` takes."""
        self._core = self.model.read(self.method, self.tokens, ids).core
        try:
            yield "document"
        finally:
            self._core = None

    def generate(
        self, prompts: Sequence[Mapping[str, list[int]]], params: SamplingParams, prefix: str
    ) -> list[RequestOutput]:
        """Answer prompts of token ids that continue the document."""
        assert self._core is not None
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            self._core.add(f"question-{number}", ids, params, prefix_id=prefix)
            with self.model.whole_or_forgotten():
                said = run_core(self._core)
            answer = CompletionOutput(text=self.model.prompter.decode(said), token_ids=said)
            outputs.append(RequestOutput(str(number), None, ids, outputs=[answer]))
        return outputs


def one_rank_engine(config: EngineConfig) -> RankEngine:
    return build_engine(config, Communicator(None), torch_device(config, 0))


def messages(core: EngineCore) -> Iterator[AboutRequest]:
    """Step until no work is left; yield each step's messages, and raise a request's failure."""
    while core.has_work:
        for message in core.step():
            if isinstance(message, Failed):
                raise message.exception
            yield message


def run_core(core: EngineCore) -> list[int]:
    """Step until no work is left; return the generated tokens."""
    return [message.token for message in messages(core) if isinstance(message, Token)]


def prefill(core: EngineCore, document: list[int]) -> None:
    core.add("document", document, _GREEDY, pin=True)
    run_core(core)


def kept_layers(runner: ModelRunner) -> Layers:
    """Return the keys and values that a one-rank engine with full attention holds of one sequence.

    Quantised codes are read back as numbers, which quantise to the same codes again.
    """
    (sequence,) = runner.sequences.values()
    pages, layout = runner.caches.pages, runner.caches.layout
    assert not layout.streaming_rows, "only full attention keeps every head's keys"
    spans = pages.spans(sequence.table, 0, sequence.table.tokens)
    found = [pages.segments(layer.retrieval_rows, spans) for layer in layout.layers]
    dtype = runner.model.dtype

    def whole(parts: Sequence[KeysOrValues]) -> Tensor:
        tensors = [x.to(dtype) if isinstance(x, Codes) else x for x in parts]
        return tensors[0] if len(parts) == 1 else torch.cat(tensors, dim=1)

    return [tuple(map(whole, zip(*segments, strict=True))) for segments in found]
