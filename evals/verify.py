"""A short needle grid with full attention and with a head map: what the map loses."""

from __future__ import annotations

from dataclasses import dataclass

from razor_dist.config import EngineConfig
from razor_dist.errors import ConfigError
from razor_dist.evals.grid import (
    ANSWER_TOKENS,
    FULL,
    FULL_METHOD,
    GridSettings,
    Method,
    Prompter,
    local_settings,
)
from razor_dist.evals.grid_results import Results, Score
from razor_dist.evals.grid_run import GridModel, Say
from razor_dist.evals.haystack import open_haystack
from razor_dist.heads.head_map import HeadMap
from razor_dist.heads.verification import Verification
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
        The model, and what a local head sees.
    grid : GridSettings
    """

    config: EngineConfig
    grid: GridSettings

    @classmethod
    def plan(cls, config: EngineConfig, tokens: int | None, haystack: str, seed: int) -> Check:
        """Settle on documents in which a local head drops something.

        Parameters
        ----------
        config : EngineConfig
        tokens : int, optional
            Of a document; by default twice the least window, but at least 2500 and at most what
            the model's context holds.
        haystack : str
            See `open_haystack`.
        seed : int

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
        most = context - _ROOM
        length = min(most, max(_LEAST_TOKENS, 2 * config.window_min)) if tokens is None else tokens
        if not 0 < length <= most:
            raise ConfigError(
                f"--verify-tokens is {length}, but the model's context of {context} tokens holds "
                f"documents of 1 to {most} with a question and its answer"
            )
        if config.policy.dropped(length - 1) == 0:
            raise ConfigError(
                f"--verify would test nothing: a local head's window of at least "
                f"{config.window_min} tokens holds a document of {length} whole; give a smaller "
                "--verify-window"
                + ("" if length == most else f" or more --verify-tokens, up to {most}")
            )
        Prompter.of_model(path, trust_remote_code=config.trust_remote_code)
        return cls(config, GridSettings(lengths=(length,), needles=1, haystack=haystack, seed=seed))

    def run(self, head_map: HeadMap, say: Say) -> Verification:
        """Ask for the grid's needles with full attention and with a head map."""
        model = GridModel(self.config)
        head_map.validate(model.shape, model.fingerprint)
        haystack = open_haystack(self.grid.haystack, model.prompter.encode)
        settings = local_settings(self.config, self.config.prefill)
        methods = [
            FULL_METHOD,
            Method(head_map.method, settings, head_map.retrieval, head_map.windows),
        ]
        results = Results(None, {})
        model.run(methods, self.grid.documents(haystack), results, say)
        full, own = (Score.of(name, results.cells) for name in (FULL, head_map.method))
        (tokens,) = self.grid.lengths
        return Verification(
            documents=own.total,
            tokens=tokens,
            haystack=haystack.name,
            haystack_fingerprint=haystack.fingerprint,
            seed=self.grid.seed,
            dtype=dtype_name(model.replay.dtype),
            settings=settings,
            found_full=full.right,
            found=own.right,
            lost=own.lost,
            gained=own.gained,
            kv_bytes_full=round(full.kv_bytes),
            kv_bytes=round(own.kv_bytes),
        )
