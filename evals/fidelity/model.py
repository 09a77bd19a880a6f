"""A model that reads one text by several methods, and compares what it expects of every next token.

Full attention reads first, and leaves the hidden states from which its logits are made: a few
kilobytes a token, where the logits themselves take hundreds. Then each method reads the
same tokens, and both distributions exist for one chunk of tokens at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from razor_dist.config.errors import EngineError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.methods import FULL_METHOD, Method
from razor_dist.evals.one_rank import Observer, ReplayModel, messages
from razor_dist.protocol.messages import Token
from razor_dist.protocol.sampling_params import SamplingParams

# Positions whose distributions [V] are compared at once, beside the logits of a whole chunk.
_ROWS = 64


@dataclass(frozen=True)
class Scored:
    """A text's tokens, of which the first ``prompt`` and the last one are not compared."""

    ids: tuple[int, ...]
    prompt: int  # tokens before the first compared position

    def __post_init__(self) -> None:
        assert 0 < self.prompt < len(self.ids) - 1, (self.prompt, len(self.ids))

    @property
    def positions(self) -> range:
        """The compared positions: each has its next token in the text."""
        return range(self.prompt, len(self.ids) - 1)


class Figures:
    """Losses, KL and agreement at each position of a text; float32 and bool ``[positions]``."""

    def __init__(self, count: int) -> None:
        self.loss_full, self.loss, self.kl = (torch.full((count,), torch.nan) for _ in range(3))
        # same: both have one likeliest token. right: the likeliest token is the text's next one.
        self.same, self.right_full, self.right = torch.zeros(3, count, dtype=torch.bool)
        # Of blocks that retrieval heads choose from, the share that queries and their tiles read.
        self.blocks: tuple[Tensor, Tensor] | None = None

    def note(self, at: Tensor, full: Tensor, own: Tensor, following: Tensor) -> None:
        """Compare log-probabilities ``[n, V]`` at the indices ``at`` [n]."""
        chosen = following.unsqueeze(-1)
        self.loss_full[at] = -full.gather(-1, chosen).squeeze(-1).cpu()
        self.loss[at] = -own.gather(-1, chosen).squeeze(-1).cpu()
        found = kl_div(own, full, reduction="none", log_target=True).sum(-1)
        self.kl[at] = found.clamp(min=0).cpu()  # below 0 is rounding
        likeliest_full, likeliest = full.argmax(-1), own.argmax(-1)
        self.same[at] = (likeliest_full == likeliest).cpu()
        self.right_full[at] = (likeliest_full == following).cpu()
        self.right[at] = (likeliest == following).cpu()

    def summary(self, begin: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the means over a range of indices, and the standard error of the change in loss.

        ``loss`` and ``loss_full`` are nats per token, ``loss_change_error`` is the standard error
        of the mean of their difference, ``kl`` the mean KL divergence from full attention's
        distribution in nats, ``kl_99`` its 99th percentile over tokens, and ``same`` how often
        the likeliest token is the same. ``right`` is how often it is the text's, and
        ``blocks`` and ``tiles``, if blocks are chosen, the mean share of them that is read.
        """
        of = slice(begin, end)
        change = (self.loss[of] - self.loss_full[of]).double()
        count = len(change)
        error = change.std().item() / count**0.5 if count > 1 else 0.0
        read = {}
        if self.blocks is not None:
            names = zip(("blocks", "tiles"), self.blocks, strict=True)
            read = {name: found[of].mean().item() for name, found in names}
        return {
            "tokens": count,
            "loss_full": self.loss_full[of].double().mean().item(),
            "loss": self.loss[of].double().mean().item(),
            "loss_change_error": error,
            "kl": self.kl[of].double().mean().item(),
            "kl_99": torch.quantile(self.kl[of].double(), 0.99).item() if count else 0.0,
            "same": self.same[of].double().mean().item(),
            "right_full": self.right_full[of].double().mean().item(),
            "right": self.right[of].double().mean().item(),
            **read,
        }


class FidelityModel(ReplayModel):
    """Compares methods with full attention, which reads each text once for all of them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._head: Any = self.replay.model.get_output_embeddings()
        self._scale = 1.0  # factor on the output layer's logits (Command R, Granite), once known
        # The text that was read last, full attention's hidden states ``[positions, E]``, its bytes.
        self._full: tuple[Scored, Tensor, int] | None = None

    def measure(
        self, method: Method, text: Scored, *, one_by_one: bool = False
    ) -> tuple[Figures, dict[str, Any]]:
        """Compare a method with full attention.

        The first tokens are read as a prompt, by the method's prefill. Those that are compared
        continue it, in chunks, or ``one_by_one`` as an answer's are. Beside the figures it returns
        ``kv_bytes`` and ``kv_bytes_full``, of all tokens but the last, and the ``seconds`` of the
        method's own reading.
        """
        hidden, kv_bytes_full = self._reference(text)
        began = time.perf_counter()
        figures = Figures(len(text.positions))
        ids = torch.tensor(text.ids, device=hidden.device)

        def compare(positions: Tensor, logits: Tensor) -> Tensor:
            known = positions < text.positions.stop
            places = positions[known].to(hidden.device)
            for at, own in zip(places.split(_ROWS), logits[known].split(_ROWS), strict=True):
                index, device = at - text.prompt, own.device
                full = self._logits(hidden[index].to(device)).float().log_softmax(-1)
                following = ids[at + 1].to(device)
                figures.note(index.cpu(), full, own.float().log_softmax(-1), following)
            if not one_by_one or not len(places):
                return logits
            # The answer is the text's own, whatever the model says.
            forced = torch.zeros_like(logits)
            forced[0, ids[places[0] + 1]] = 1
            return forced

        kv_bytes = self._read_on(method, text, compare, one_by_one=one_by_one)
        if figures.kl.isnan().any():
            raise EngineError(f"{self.config.model} computes logits that are not finite")
        if self.replay.selected is not None:
            figures.blocks = self.replay.selected.blocks_read(text.positions)
        seconds = time.perf_counter() - began
        return figures, {"kv_bytes": kv_bytes, "kv_bytes_full": kv_bytes_full, "seconds": seconds}

    def _reference(self, text: Scored) -> tuple[Tensor, int]:
        """Return full attention's hidden states at the positions, on the CPU, and its KV bytes."""
        if self._full is not None and self._full[0] == text:
            return self._full[1:]
        self._full = self._read = None
        found: list[Tensor] = []
        first: list[Tensor] = []

        def look(positions: Tensor, logits: Tensor) -> Tensor:
            if not first:
                first.append(logits)
            return logits

        hook = self._head.register_forward_pre_hook(
            lambda _, args: found.append(args[0].flatten(0, -2).cpu())
        )
        try:
            kv_bytes = self._read_on(FULL_METHOD, text, look, on_begin=found.clear)
        finally:
            hook.remove()
        self._find_scale(found[0][-_ROWS:].to(first[0].device), first[0][-_ROWS:])
        hidden = torch.cat(found)[: len(text.positions)]
        self._full = text, hidden, kv_bytes
        return hidden, kv_bytes

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, V]`` of hidden states before the output layer, ``[n, E]``."""
        logits: Tensor = self._head(hidden)
        cap = getattr(self.replay.model.config, "final_logit_softcapping", None)
        return (logits if cap is None else torch.tanh(logits / cap) * cap) * self._scale

    @torch.inference_mode()
    def _find_scale(self, hidden: Tensor, logits: Tensor) -> None:
        """Find the factor that the model applies to its logits; `ModelError` if it does more."""
        self._scale = 1.0
        made, wanted = self._logits(hidden).double(), logits.double()
        close: Any = {"rtol": max(1e-3, torch.finfo(logits.dtype).eps), "atol": 1e-3}
        if torch.allclose(made, wanted, **close):
            return
        self._scale = float((made * wanted).sum() / (made * made).sum())
        if not torch.allclose(made * self._scale, wanted, **close):
            raise ModelError(
                f"full attention's logits are made of the hidden states before the output layer, "
                f"and {self.config.model} does more than scale them after it"
            )

    def _read_on(
        self,
        method: Method,
        text: Scored,
        observer: Observer,
        *,
        one_by_one: bool = False,
        on_begin: Callable[[], None] = lambda: None,
    ) -> int:
        """Read a text by a method; the observer sees the logits after the prompt. Returns KV bytes.

        With ``one_by_one``, the logits that the observer returns decide the next tokens.
        """
        engine = self.read(method, len(text.ids) + 1, list(text.ids[: text.prompt]))
        on_begin()
        core, runner, count = engine.core, engine.runner, len(text.positions)
        # Bytes of the prompt's streaming caches; its continuation works on copies of them.
        before = runner.sequences.kv_bytes - runner.caches.pages.used_bytes
        rest = list(text.ids[text.prompt : text.positions.stop])
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
        if one_by_one:
            rest, params = rest[:1], replace(params, max_tokens=count + 1, prompt_logprobs=None)
        core.add("rest", rest, params, prefix_id="document")
        self.replay.observer, kv_bytes = observer, 0
        try:
            with self.whole_or_forgotten():
                for message in messages(core):
                    if isinstance(message, Token) and message.finish is None:
                        kv_bytes = runner.sequences.kv_bytes - before
        finally:
            self.replay.observer = None
        return kv_bytes
