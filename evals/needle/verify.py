"""A short grid of needles with full attention and with a head map, to see what the map loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.needle.config import GridConfig
from razor_dist.evals.needle.documents import Prompter
from razor_dist.evals.needle.grid import PRESET, GridTask, streaming_settings
from razor_dist.evals.needle.replay import FULL_METHOD, Method, ReplayModel
from razor_dist.evals.needle.results import FULL, NeedleResults
from razor_dist.heads.head_map import HeadMap, Verification
from razor_dist.heads.policy import StreamingPolicy
from razor_dist.models.adapters import is_alibi
from razor_dist.models.loader import read_config
from razor_dist.models.registry import resolve_model
from razor_dist.models.shape import ModelShape

_LEAST_TOKENS = 2500
# Of the context, for the chat template, the question and the answer.
_ROOM = 100 + PRESET.answer_tokens


@dataclass(frozen=True)
class Check:
    """A verification of a head map, settled before the work of finding it."""

    config: EngineConfig  # model, and what a streaming head without a window of its own sees
    tokens: int | None  # of a document; None: twice the least window, at least 2500, at most `most`
    most: int  # what the model's context holds with a question and its answer
    haystack: str
    seed: int

    @classmethod
    def plan(cls, config: EngineConfig, tokens: int | None, haystack: str, seed: int) -> Check:
        """Refuse a verification that is known to be of no use; see `Check` for the parameters.

        A document must fit the model but not the window (an ALiBi model's are its map's, which
        `settle` looks at), so that something is tested, and the model must have a tokenizer.
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
                length, StreamingPolicy.of(config), "give a smaller --verify-window"
            )
        Prompter.of_model(path, trust_remote_code=config.trust_remote_code)
        return check

    def _length(self, window: int) -> int:
        """Return the tokens of a document, where the least window is ``window``."""
        if self.tokens is not None:
            return self.tokens
        return min(self.most, max(_LEAST_TOKENS, 2 * window))

    def _refuse_nothing(self, length: int, policy: StreamingPolicy, *remedies: str) -> None:
        """Refuse documents of which a streaming head that sees ``policy`` drops nothing."""
        if policy.dropped(length - 1):
            return
        if length < self.most:
            remedies += (f"give more --verify-tokens, up to {self.most}",)
        advice = "; " + ", or ".join(remedies) if remedies else ", the longest that fits"
        raise ConfigError(
            f"--verify would test nothing: a streaming head's window of at least "
            f"{policy.window_min} tokens holds a document of {length} whole{advice}"
        )

    def settle(self, head_map: HeadMap) -> tuple[int, dict[str, Any]]:
        """Return a document's tokens, and the settings that act on the map's streaming heads.

        Refuse a document that fits into the least of the map's own windows, or no streaming head.
        """
        settings = streaming_settings(self.config, self.config.prefill)
        if head_map.windows is None:
            return self._length(self.config.window_min), settings
        windows = [w for row in head_map.windows for w in row if w is not None]
        if not windows:
            raise ConfigError("--verify would test nothing: every head keeps the whole context")
        length = self._length(min(windows))
        self._refuse_nothing(length, StreamingPolicy.of(self.config).with_window(min(windows)))
        return length, {name: settings[name] for name in ("prefill", "block")}

    def run(self, head_map: HeadMap, say: Callable[[str], None]) -> Verification:
        """Ask for the needles with full attention and with a head map, saying each answer."""
        tokens, settings = self.settle(head_map)
        documents = {"lengths": (tokens,), "needles": 1}
        about = {"haystack": self.haystack, "seed": self.seed}
        grid = GridConfig(**self.config.model_dump() | documents | about)
        own = Method(head_map.method, settings, head_map.retrieval, head_map.windows)
        task = GridTask.plan(grid, [FULL_METHOD, own], [head_map])
        model, results = ReplayModel(task.config), []
        for item in task.items():
            results.append(task.run(model, item))
            [cell] = results[-1]["cells"]
            say(f"{item.id}: {'right' if cell['score'] else 'WRONG'}, {cell['answer']!r}")
        found = NeedleResults(results)
        of_full, of_map = found.summary(FULL), found.summary(own.name)
        right = [cell.method for cell in found.cells if cell.score == 1]
        name, text = task.haystack
        return Verification(
            documents=of_map.cells,
            tokens=tokens,
            haystack=name,
            haystack_fingerprint=text,
            seed=self.seed,
            dtype=model.dtype,
            settings=settings,
            found_full=right.count(FULL),
            found=right.count(own.name),
            lost=of_map.lost,
            gained=of_map.gained,
            kv_bytes_full=round(of_full.kv_bytes or 0),
            kv_bytes=round(of_map.kv_bytes or 0),
        )
