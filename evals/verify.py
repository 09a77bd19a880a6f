"""A short needle grid with full attention and with a head map: what the map loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.haystack import open_haystack
from razor_dist.evals.grid import (
    ANSWER_TOKENS,
    FULL,
    FULL_METHOD,
    GridSettings,
    Method,
    Prompter,
    streaming_settings,
)
from razor_dist.evals.grid_results import Results, Score
from razor_dist.evals.grid_run import GridModel, Say
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.heads.verification import Verification
from razor_dist.models.alibi import is_alibi
from razor_dist.models.loader import dtype_name, read_config
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape

_LEAST_TOKENS = 2500
# Of the context, for the chat template, the question and the answer.
_ROOM = 100 + ANSWER_TOKENS


@dataclass(frozen=True)
class Check:
    """How a head map is to be verified; settled before the work of finding it.

    Attributes
    ----------
    config : EngineConfig
        The model, and what a streaming head sees unless its map gives it a window of its own.
    tokens : int, optional
        Of a document; by default twice the least window, but at least 2500 and at most `most`.
    most : int
        Tokens of a document that the model's context holds with a question and its answer.
    haystack : str
        See `open_haystack`.
    seed : int
    """

    config: EngineConfig
    tokens: int | None
    most: int
    haystack: str
    seed: int

    @classmethod
    def plan(cls, config: EngineConfig, tokens: int | None, haystack: str, seed: int) -> Check:
        """Refuse what can be known to be of no use; see `Check` for the parameters.

        The windows of a model biased by distance (ALiBi) are its map's, so that `run` looks at
        them.

        Raises
        ------
        ConfigError
            If a document does not fit, or fits into the window, so that nothing would be tested.
        ModelError
            If the model has no tokenizer.
        """
        path = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
        model_config = read_config(path, trust_remote_code=config.trust_remote_code)
        context = ModelShape.from_config(model_config).max_positions
        check = cls(config, tokens, context - _ROOM, haystack, seed)
        length = check._length(config.window_min)
        if not 0 < length <= check.most:
            raise ConfigError(
                f"--verify-tokens is {length}, but the model's context of {context} tokens holds "
                f"documents of 1 to {check.most} with a question and its answer"
            )
        if not is_alibi(model_config):
            check._refuse_nothing(
                length, StreamingPolicy.of(config), ["give a smaller --verify-window"]
            )
        Prompter.of_model(path, trust_remote_code=config.trust_remote_code)
        return check

    def _length(self, window: int) -> int:
        """Tokens of a document, where the least window is ``window``."""
        if self.tokens is not None:
            return self.tokens
        return min(self.most, max(_LEAST_TOKENS, 2 * window))

    def _refuse_nothing(
        self, length: int, policy: StreamingPolicy, remedies: Sequence[str]
    ) -> None:
        """Refuse documents of which a streaming head that sees ``policy`` drops nothing."""
        if policy.dropped(length - 1):
            return
        if length < self.most:
            remedies = [*remedies, f"give more --verify-tokens, up to {self.most}"]
        raise ConfigError(
            f"--verify tests nothing: a streaming head's window of at least {policy.window_min} "
            f"tokens holds a document of {length} whole"
            + ("; " + ", or ".join(remedies) if remedies else ", the longest that fits")
        )

    def settle(self, head_map: HeadMap) -> tuple[int, dict[str, Any]]:
        """Tokens of a document, and of the settings those that act on the map's streaming heads.

        Raises
        ------
        ConfigError
            If a document fits into the least of the map's own windows, or no head is streaming.
        """
        settings = streaming_settings(self.config, self.config.prefill)
        if head_map.windows is None:
            return self._length(self.config.window_min), settings
        windows = [w for row in head_map.windows for w in row if w is not None]
        if not windows:
            raise ConfigError("--verify would test nothing: every head keeps the whole context")
        length = self._length(min(windows))
        self._refuse_nothing(length, StreamingPolicy.of(self.config).with_window(min(windows)), [])
        return length, {name: settings[name] for name in ("prefill", "block")}

    def run(self, head_map: HeadMap, say: Say) -> Verification:
        """Ask for the needles with full attention and with a head map.

        Raises
        ------
        ConfigError
            As `settle`.
        """
        tokens, settings = self.settle(head_map)
        grid = GridSettings(lengths=(tokens,), needles=1, haystack=self.haystack, seed=self.seed)
        model = GridModel(self.config)
        head_map.validate(model.shape, model.fingerprint)
        haystack = open_haystack(grid.haystack, model.prompter.encode)
        methods = [
            FULL_METHOD,
            Method(head_map.method, settings, head_map.retrieval, head_map.windows),
        ]
        results = Results(None, {})
        model.run(methods, grid.documents(haystack), results, say)
        full, own = (Score.of(name, results.cells) for name in (FULL, head_map.method))
        return Verification(
            documents=own.total,
            tokens=tokens,
            haystack=haystack.name,
            haystack_fingerprint=haystack.fingerprint,
            seed=self.seed,
            dtype=dtype_name(model.replay.dtype),
            settings=settings,
            found_full=full.right,
            found=own.right,
            lost=own.lost,
            gained=own.gained,
            kv_bytes_full=round(full.kv_bytes),
            kv_bytes=round(own.kv_bytes),
        )
