"""transformers' own model with a press of kvpress: reads a text, keeps a part of it, answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.baselines.presses import PRESSES, BaselineConfig
from razor_dist.evals.one_rank import torch_device, torch_dtype
from razor_dist.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from razor_dist.heads.head_map import default_head_map
from razor_dist.models.loader import eos_token_ids, quiet_transformers, read_config
from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.memory import DryRun
from razor_dist.protocol.sampling_params import SamplingParams


def load_stock(
    config: EngineConfig, device: torch.device, attention: str = "sdpa"
) -> PreTrainedModel:
    """Load transformers' own model as an engine of such settings would, in the same dtype."""
    trust = config.trust_remote_code
    folder = resolve_model(config.model, trust_remote_code=trust)
    with quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            config=read_config(folder, **config.model_options),
            dtype=torch_dtype(config, device),
            attn_implementation=attention,
            trust_remote_code=trust,
            local_files_only=True,
        )
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved.eval()


class Budget:
    """Bytes and tokens that one method may keep of a text.

    Razor's bytes are not estimated: the engine's own caches are made (on torch's meta device) and
    asked what a sequence takes of them, as an engine of one rank reports it. Raises `HeadMapError`
    if razor decides the budget and there is no head map.
    """

    def __init__(self, config: BaselineConfig, kind: str) -> None:
        if config.kv_budget is None and config.head_map is None:
            default_head_map(config.model)  # or refuses: the planner would assume one
        self._config = config
        self._deployment = Deployment.of(config, "cuda" if kind == "cuda" else "cpu")
        self._dry_run = DryRun(self._deployment)

    @property
    def token_bytes(self) -> int:
        return self._deployment.full_kv_bytes

    def nbytes(self, tokens: int) -> int:
        if self._config.kv_budget is not None:
            return int(self._config.kv_budget * tokens * self.token_bytes)
        longest = self._config.max_model_len or self._deployment.shape.max_positions
        kept = self._dry_run.caches(longest, tokens)
        return kept["sequence_retrieval_kv"] + kept["sequence_streaming_cache"]

    def tokens(self, read: int) -> int:
        """Return the tokens of ``read`` that every head may keep; refuse none at all."""
        kept = min(read, self.nbytes(read) // self.token_bytes)
        if kept < 1:
            budget = self._config.kv_budget
            who = "razor's budget" if budget is None else f"kv_budget {budget}"
            raise ConfigError(f"{who} leaves nothing of {read} tokens; raise kv_budget")
        return kept


def compression_ratio(read: int, kept: int) -> float:
    """Return kvpress's setting for which ``kept`` of ``read`` tokens remain.

    It rounds ``read·(1 − ratio)`` down, and PyramidKV spreads that mean over the layers and rounds
    each: a quarter of a token more makes the former exact and leaves the latter within half a token
    per layer.
    """
    return 0.0 if kept >= read else 1 - (kept + 0.25) / read


class PressedModel:
    """One sequence whose cache is compressed once, with the methods of `LLM` that items call.

    Every head attends in full while a text is read; a layer's cache is compressed when that layer
    is done. What follows is added to it in full. kvpress replaces transformers' attention
    functions, in this process for good.
    """

    def __init__(self, config: BaselineConfig) -> None:
        import kvpress

        torch.set_num_threads(config.threads_per_rank(1))
        self._press = PRESSES[config.press]
        self._device = torch_device(config, 0)
        self._model: Any = load_stock(config, self._device, self._press.attention)
        self._budget = Budget(config, self._device.type)
        trust = config.trust_remote_code
        folder = resolve_model(config.model, trust_remote_code=trust)
        self._tokenizer = load_tokenizer(folder, trust_remote_code=trust)
        self._eos = eos_token_ids(folder)
        self._make_press = getattr(kvpress, self._press.name)
        self._ids = itertools.count()
        self._cache: Any = None
        self._read = 0

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    def stats(self) -> Mapping[str, Any]:
        """Return ``kv_bytes_per_rank``: what is kept of the text that was read, on one rank."""
        layers = [] if self._cache is None else self._cache.layers
        kept = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return {"kv_bytes_per_rank": [sum(x.untyped_storage().nbytes() for x in kept)]}

    @contextmanager
    def prefill(self, ids: Sequence[int]) -> Iterator[int]:
        """Read a text until the ``with`` block ends; yields its length, for `generate`."""
        self.read(ids)
        try:
            yield len(ids)
        finally:
            self._cache = None

    def generate(
        self, prompts: Any, sampling_params: SamplingParams, prefix: int | None = None
    ) -> list[RequestOutput]:
        """Answer prompts that continue what was read, ``{"prompt_token_ids": [...]}`` each.

        Without the ``prefix`` that `prefill` yielded, answer prompts that are wholes, a list of ids
        each, of which all but the last token is read and compressed. Their texts end before the
        first of ``stop``; the tokens are those of the whole answers.
        """
        most, stop = sampling_params.max_tokens, sampling_params.stop
        assert most is not None
        served = SamplingParams(temperature=0, max_tokens=most, stop=stop)
        assert sampling_params == served, sampling_params
        if prefix is not None:
            assert not stop
            return [self._output(list(prompt["prompt_token_ids"]), most) for prompt in prompts]
        outputs = [self._whole(ids, most) for ids in prompts]
        for [answer], text in itertools.product((output.outputs for output in outputs), stop):
            if text in answer.text:
                answer.text, answer.finish_reason = answer.text.partition(text)[0], "stop"
        return outputs

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> None:
        """Read a text in place of the one before, and compress."""
        self._cache = None  # frees it
        kept = self._budget.tokens(len(ids))
        press = self._make_press(compression_ratio=compression_ratio(len(ids), kept))
        cache: Any = DynamicCache()
        with press(self._model):
            self._model.model(
                input_ids=self._tensor(ids),
                past_key_values=cache,
                use_cache=True,
                # The presses ask for it, and transformers' models hand it on, but make none.
                cache_position=torch.arange(len(ids), device=self._device),
            )
        self._cache, self._read = cache, len(ids)

    @torch.inference_mode()
    def answer(self, ids: list[int], max_tokens: int) -> list[int]:
        """Continue what was read, greedily; the cache is then as it was before.

        The tokens go one at a time: layers may have kept different numbers (PyramidKV), for which
        transformers' one mask would be wrong.
        """
        before = [(layer.keys, layer.values) for layer in self._cache.layers]
        generated: list[int] = []
        todo = list(ids)
        try:
            for position in range(self._read, self._read + len(ids) + max_tokens - 1):
                output = self._model(
                    input_ids=self._tensor([todo.pop(0)]),
                    position_ids=self._tensor([position]),
                    past_key_values=self._cache,
                    use_cache=True,
                )
                if todo:
                    continue
                generated.append(int(output.logits[0, -1].argmax()))
                if generated[-1] in self._eos:
                    break
                todo.append(generated[-1])
        finally:
            # Each step concatenates into new tensors; the old ones are untouched.
            for layer, (keys, values) in zip(self._cache.layers, before, strict=True):
                layer.keys, layer.values = keys, values
        return generated

    def _whole(self, ids: Sequence[int], max_tokens: int) -> RequestOutput:
        *text, last = ids
        began = time.perf_counter()
        with self.prefill(text):
            output = self._output([last], max_tokens)
        output.prompt_token_ids = [*text, last]
        output.metrics.total_seconds = time.perf_counter() - began
        return output

    def _output(self, ids: list[int], max_tokens: int) -> RequestOutput:
        began = time.perf_counter()
        tokens = self.answer(ids, max_tokens)
        ended = tokens[-1] in self._eos
        said, text = tokens[:-1] if ended else tokens, ""
        if self._tokenizer is not None:
            text = str(self._tokenizer.decode(said, skip_special_tokens=True))
        reason = "stop" if ended else "length"
        answer = CompletionOutput(text=text, token_ids=tokens, finish_reason=reason)
        metrics = RequestMetrics(total_seconds=time.perf_counter() - began)
        name = str(next(self._ids))
        return RequestOutput(name, None, ids, outputs=[answer], finished=True, metrics=metrics)

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self._device)
