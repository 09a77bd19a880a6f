"""KVzip's head scores: the largest attention that a head gives to a text while it is repeated.

A model that repeats a text must read all of it again, so its attention then marks the keys that any
question about the text may need (KVzip, arXiv 2505.23416, section 3). A sample is a text of
``tokens`` tokens, the request to repeat it, and the text once more. **The score** of a KV head is
the largest attention weight that any query from the request on, of any query head of the group,
gives to any token of the text; over all samples, the maximum. KVzip's ``--save_head_score`` stores
the same for a text of one chunk (2,000 tokens); here more text is more samples.

**Limits.** The request follows the text at once, so a head that only looks at the last few tokens
gets a weight of up to 1 on the text's end. ``recent`` leaves the text's last tokens out of the
maximum, since a streaming head's window has them anyway. In the definition it is 0.

The score files of KVzip's repository (``utils/head_score/*.pt``) are tensors ``[layers, KV heads]``
of torch.save; of several files for one model the maximum is taken (`read_scores`).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from razor_dist.config.errors import ConfigError, HeadMapError
from razor_dist.heads.decision import Scores, rounded
from razor_dist.identify.criterion import Criterion, Sample, head_map
from razor_dist.identify.prose import Prose
from razor_dist.identify.settings import KVzipSettings
from razor_dist.models.shape import ModelShape

if TYPE_CHECKING:
    from razor_dist.heads.head_map import HeadMap
    from razor_dist.kernels.query import Query

METHOD: Final = "kvzip"
KIND: Final = "reconstruction"  # of score, in `HeadMap.kv_scores`
_REQUEST: Final = "\n\nRepeat the previous context exactly."
_QUERIES: Final = 256  # whose weights are in memory at once


class Reconstruction(Criterion):
    """Measures the largest weight on a text; a sample's mask has the tokens after the text."""

    def __init__(self, model: PreTrainedModel, settings: KVzipSettings) -> None:
        shape = ModelShape.from_config(model.config)
        self._settings = settings
        self._largest = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.float64)

    def attend(self, layer: int, query: Query, k: Tensor, v: Tensor) -> Tensor:
        out, lse_KGT = query.attend(k, v, causal=True)
        first = int(self.sample.mask.nonzero()[0])
        text = slice(first - self._settings.tokens, first - self._settings.recent)
        keys_K1DS = k[:, None, text].float().transpose(-1, -2)
        for start in range(first, len(self.sample.ids), _QUERIES):
            here = slice(start, start + _QUERIES)
            products = query.q[:, :, here].float() * query.scale @ keys_K1DS
            weights = torch.exp(products - lse_KGT[:, :, here, None])
            largest = weights.amax((1, 2, 3)).double().cpu()
            self._largest[layer] = torch.maximum(self._largest[layer], largest)
        return out.to(query.q.dtype).flatten(0, 1).transpose(0, 1)

    def scores(self) -> Tensor:
        return self._largest


def repetitions(
    prose: Prose,
    settings: KVzipSettings,
    shape: ModelShape,
    turn: tuple[Sequence[int], Sequence[int]],
) -> Iterator[Sample]:
    """Make the samples; ``turn`` are the tokens before and after a message (`prose.user_turn`).

    Raise `ConfigError` if the model's context does not hold a text twice.
    """
    before, after = turn
    request = [*prose.encode(_REQUEST), *after]
    room = (shape.max_positions - len(before) - len(request)) // 2
    if settings.tokens > room:
        raise ConfigError(
            f"tokens is {settings.tokens}, but the context of {shape.max_positions} positions "
            f"holds texts of up to {room} tokens twice"
        )

    def sample(index: int) -> Sample:
        draw = random.Random(f"{settings.seed}:{index}")
        text = [token for part in prose.take(settings.tokens, draw) for token in part]
        ids = torch.tensor([*before, *text, *request, *text])
        return Sample(ids, torch.arange(len(ids)) >= len(before) + len(text))

    return map(sample, range(settings.samples))


def read_scores(files: Sequence[Path]) -> Scores:
    """Read KVzip's score files of one model; raise `HeadMapError` with the file at fault."""
    tables = [_read(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.shape != tables[0].shape:
            raise HeadMapError(
                f"{file} has scores of shape {list(table.shape)} and {files[0]} of "
                f"{list(tables[0].shape)}: give files of one model"
            )
    return rounded(torch.stack(tables).amax(0).tolist())


def _read(file: Path) -> Tensor:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise HeadMapError(f"cannot read {file}: {error.strerror}") from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        # Not torch's message, which advises to run the file's code.
        raise HeadMapError(
            f"{file} is no file of KVzip's head scores: torch.save wrote no tensor there"
        ) from error
    if isinstance(found, Tensor) and found.ndim == 3:  # one dimension is a batch of one
        found = found.squeeze(1) if found.shape[1] == 1 else found.squeeze(0)
    if not isinstance(found, Tensor) or found.ndim != 2:
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise HeadMapError(f"{file} must hold a tensor [layers, KV heads], got {what}")
    table = found.double()
    if not bool(((table >= 0) & (table <= 1)).all()):
        raise HeadMapError(f"{file}: scores are attention weights and must be from 0 to 1")
    return table


def imported_map(
    files: Sequence[Path],
    name: str,
    config: PretrainedConfig,
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
) -> HeadMap:
    """Build a model's head map from KVzip's score files; raise `HeadMapError` for other sizes."""
    scores, shape = read_scores(files), ModelShape.from_config(config)
    if (len(scores), len(scores[0])) != (shape.layers, shape.kv_heads):
        raise HeadMapError(
            f"{files[0]} has scores of {len(scores)} layers and {len(scores[0])} KV heads, but "
            f"{name!r} has {shape.layers} and {shape.kv_heads}"
        )
    if sparsity is None and threshold is None:
        sparsity = KVzipSettings.sparsity
    settings = {"files": [file.name for file in files]}
    return head_map(
        name, config, METHOD, {KIND: scores}, settings, sparsity=sparsity, threshold=threshold
    )
