"""An engine that this process has started: ranks, event loop and tokenizer."""

from __future__ import annotations

import weakref
from typing import Any, Self

import msgspec
from transformers import PreTrainedTokenizerBase

from razor_dist.config.errors import EngineError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import build_config
from razor_dist.engine.device import prepare_device
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.grammar_process import GrammarProcess
from razor_dist.frontend.managed_engine import ManagedEngine
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.frontend.ranks import RankGroup, StartRanks
from razor_dist.llm.loop_thread import CLOSED, LoopThread
from razor_dist.models.registry import resolve_model
from razor_dist.models.tokenizer import load_tokenizer
from razor_dist.protocol.messages import EngineInfo
from razor_dist.protocol.sampling_params import SamplingParams, request_defaults


class EngineHandle:
    """The engine under `LLM`: ready when the constructor returns, ended by `close`.

    A context manager. Settings and errors are those of `LLM`.
    """

    start_ranks: StartRanks = RankGroup.start

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = build_config(EngineConfig, **config)
        trust = self.config.trust_remote_code
        prepare_device(self.config)
        folder = resolve_model(self.config.model, trust_remote_code=trust)
        # By name: the model's recommendations that differ from the defaults of `SamplingParams`.
        self.sampling_defaults = request_defaults(folder, self.config)
        self.loop = LoopThread()
        self._engine = ManagedEngine(self.config, start_ranks=self.start_ranks)
        self._close = weakref.finalize(self, _close, self.loop, self._engine)
        try:
            self.loop.run(self._engine.start())
            # While the ranks load the model:
            tokenizer = load_tokenizer(folder, trust_remote_code=trust)
            self._encoder = PromptEncoder(tokenizer)
            client = self._engine.client
            client.grammars = GrammarProcess(tokenizer, client.require_ready)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        self.loop.run(self._engine.client.ready())

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any: the model's recommended ones."""
        return SamplingParams(**self.sampling_defaults)

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; ``None`` if its folder has none."""
        return self._encoder.tokenizer

    def stats(self) -> dict[str, Any]:
        """The fields of `razor_dist.protocol.counters.Counters`."""
        found: dict[str, Any] = msgspec.to_builtins(self.loop.run(self.client.stats()))
        return found

    @property
    def info(self) -> EngineInfo:
        """The engine's description, such as ``max_model_len``; waits until it is ready.

        `EngineError` if it cannot be started again after a failure.
        """
        return self.loop.run(self.client.ready())

    @property
    def failed(self) -> bool:
        """True if the ranks died too often to be started again: every call will fail."""
        return self._engine.client.status.state == "failed"

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, by rank; empty while they are being started and once closed."""
        return self._engine.pids

    def close(self) -> None:
        """End the ranks. Another `close` does nothing; other calls raise `EngineError`."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def client(self) -> EngineClient:
        """The engine's client; `EngineError` once `close` was called."""
        if not self._close.alive:
            raise EngineError(CLOSED)
        return self._engine.client


def _close(loop: LoopThread, engine: ManagedEngine) -> None:
    loop.finish(engine.close(reason="the LLM was closed"))
