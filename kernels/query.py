"""Queries and how they score keys, as one object for the code above the kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from razor_dist.kernels import attend, attend_windows, compensate, empty_partial, takes_windows
from razor_dist.kernels.alibi import (
    Distance,
    Places,
    attend_at_distance,
    attend_at_places,
    distance_bias,
)
from razor_dist.kernels.decode import Rotation
from razor_dist.kernels.dual_chunk import DualChunk, attend_in_chunks
from razor_dist.kernels.partial import Partial
from razor_dist.kernels.quantized import KeysOrValues, unpacked


class Query(NamedTuple):
    """Queries, and how they score keys: ``scale * q . k``, with ALiBi less ``slope * distance``.

    Dual chunk attention rotates queries differently for keys of different chunks.
    """

    q: Tensor  # [K, G, T, D]
    scale: float
    # ALiBi's, float32 [K, G]; None if positions are in queries and keys already.
    slopes: Tensor | None = None
    # Rotary embeddings that attention still has to apply to these queries and their keys.
    rotation: Rotation | None = None
    # The model's dual chunk attention, for a text longer than one chunk.
    dual: DualChunk | None = None

    @classmethod
    def grouped(cls, q: Tensor, scale: float, slopes: Tensor | None, kv_heads: int) -> Query:
        """Group a model's ``q`` ``[Hq, T, D]`` and slopes ``[Hq]`` by KV head."""
        if slopes is not None:
            slopes = slopes.unflatten(0, (kv_heads, -1))
        group = len(q) // max(1, kv_heads)  # a rank may have no heads of a layer
        return cls(q.unflatten(0, (kv_heads, group)), scale, slopes)

    @property
    def by_distance(self) -> bool:
        """True if scores depend on where tokens stand, beyond what queries and keys hold."""
        return self.slopes is not None or self.dual is not None

    def heads(self, index: slice | Tensor) -> Query:
        slopes = None if self.slopes is None else self.slopes[index]
        return Query(self.q[index], self.scale, slopes, dual=self.dual)

    def tokens(self, span: slice) -> Query:
        return self._replace(q=self.q[:, :, span])

    def seen_by(self, chunk: int, at: range) -> Query:
        """Rotate queries at positions ``at`` for keys of one chunk of dual chunk attention."""
        if self.dual is None:
            return self
        return self._replace(q=self.dual.turned(self.q, at, chunk), dual=None)

    def attend(
        self,
        k: KeysOrValues,
        v: KeysOrValues,
        *,
        causal: bool = False,
        where: Places | Distance | None = None,
    ) -> Partial:
        """Attention to one segment of keys ``[K, S, D]``: see `razor_dist.kernels.attend`.

        Keys and values may be packed (`razor_dist.kernels.quantized`). ``where`` is needed if
        `by_distance`: positions of queries and keys, or, with ALiBi, the keys' distances from
        queries that share one position.
        """
        k, v = unpacked(k), unpacked(v)
        if self.dual is not None:
            assert isinstance(where, Places)
            return attend_in_chunks(self.q, k, v, self.dual, where, scale=self.scale, causal=causal)
        if self.slopes is None:
            return attend(self.q, k, v, scale=self.scale, causal=causal)
        assert where is not None
        if not self.q.shape[2] or not k.shape[1]:
            return empty_partial(self.q)
        both = self.q, k, v, self.slopes
        if isinstance(where, Distance):
            return attend_at_distance(*both, where, scale=self.scale, causal=causal)
        return attend_at_places(*both, where, scale=self.scale, causal=causal)

    def takes_windows(self, k: KeysOrValues) -> bool:
        return not self.by_distance and takes_windows(self.q, k)

    def attend_windows(self, k: KeysOrValues, v: KeysOrValues, first: Tensor) -> Partial:
        """See `razor_dist.kernels.attend_windows`."""
        return attend_windows(self.q, k, v, first, scale=self.scale)

    def compensate(
        self, k_mean: Tensor, v_mean: Tensor, count: Tensor, away: Tensor | None = None
    ) -> Partial:
        """Attention to a compensation token: see `razor_dist.kernels.compensate`.

        ``away``, float32 ``[T]``, is needed with ALiBi: the token's distance from each query.
        """
        assert self.dual is None, "it stands in one chunk: `seen_by`"
        found = compensate(self.q, k_mean, v_mean, count, scale=self.scale)
        if self.slopes is None:
            return found
        assert away is not None
        return Partial(found.out, found.lse + distance_bias(self.slopes, away))
