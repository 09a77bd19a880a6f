"""How many tokens a press may keep: as many bytes as razor keeps, or a part of full attention's."""

from __future__ import annotations

from razor_dist.config.errors import ConfigError
from razor_dist.evals.baselines.presses import BaselineConfig
from razor_dist.heads.head_map import shipped_head_map
from razor_dist.plan.deployment import Deployment
from razor_dist.plan.dry_run import DryRun


class Budget:
    """Bytes and tokens that one method may keep of a text.

    Razor's bytes are not estimated: the engine's own caches are made (on torch's meta device) and
    asked what a sequence takes of them, so that the number is the one that an engine of one rank
    reports after it has read the text.

    Parameters
    ----------
    config : BaselineConfig
    kind : {"cpu", "cuda"}
        Where the model computes, which decides the dtype.

    Raises
    ------
    HeadMapError
        If razor decides the budget and there is no head map.
    """

    def __init__(self, config: BaselineConfig, kind: str) -> None:
        if config.kv_budget is None and config.head_map is None:
            shipped_head_map(config.model)  # or refuses: the planner would assume one
        self._config = config
        self._deployment = Deployment.of(config, "cuda" if kind == "cuda" else "cpu")
        self._dry_run = DryRun(self._deployment)

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in all heads."""
        return self._deployment.full_kv_bytes

    def nbytes(self, tokens: int) -> int:
        """What may be kept of a text of so many tokens."""
        if self._config.kv_budget is not None:
            return int(self._config.kv_budget * tokens * self.token_bytes)
        longest = self._config.max_model_len or self._deployment.shape.max_positions
        kept = self._dry_run.caches(longest, tokens)
        return kept["sequence_retrieval_kv"] + kept["sequence_streaming_cache"]

    def tokens(self, read: int) -> int:
        """How many of ``read`` tokens every head may keep, if all keep the same number.

        Raises
        ------
        ConfigError
            If that is none.
        """
        kept = min(read, self.nbytes(read) // self.token_bytes)
        if kept < 1:
            budget = self._config.kv_budget
            who = "razor's budget" if budget is None else f"kv_budget {budget}"
            raise ConfigError(f"{who} leaves nothing of {read} tokens; raise kv_budget")
        return kept


def compression_ratio(read: int, kept: int) -> float:
    """kvpress's setting for which ``kept`` of ``read`` tokens remain.

    It rounds ``read·(1 − ratio)`` down, and PyramidKV spreads that mean over the layers and rounds
    each: a quarter of a token more makes the former exact and leaves the latter within half a token
    per layer.
    """
    return 0.0 if kept >= read else 1 - (kept + 0.25) / read
