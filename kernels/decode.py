"""Attention of a decode step in one layer: one token of each of several sequences at once.

Retrieval heads see this rank's pages of their sequences, streaming heads see slots of their cache.
A few tensors say which sequences these are, so that a CUDA graph of these operations serves every
batch of its size. Three modules implement them: `decode_torch`, the definition, in plain torch and
of fixed shapes; `decode_triton`, where a layer is a launch to store, one to attend and one or two
to merge; and `decode_cpu`, compiled C++. A Triton launch reads keys of one dtype.

``store(k, v, order, pages, windows, turned)`` puts the new tokens' keys and values, ``[K, n, D]``,
into the caches; pages may be codes (`razor_dist.kernels.quantized`), windows are not. With
`Turned`, which takes a module that ``ROTATES``, it rotates keys before it stores them, and the
queries of the same heads.

``attend(q, order, pages, windows, out, *, scale, slopes, pack, places)`` attends with ``q`` ``[K,
G, n, D]``, the new tokens included, and writes to ``out`` ``[n, H, D]``, a row for each query head.
``places``, int64 ``[K G]``, says which row a query head has, -1 for none; without it their order is
``q``'s. With ``pack`` it returns the retrieval heads' results instead, ``out`` and ``lse`` side by
side, float32 ``[R, G, n, D + 1]``. ``slopes``, float32 ``[K, G]``, are ALiBi's.

``merge_ranks(gathered, order, out, places)`` merges such results of all ranks, ``[P, R, G, n, D +
1]``, into ``out``.

``order``, int64, has the KV head of each row of the caches: first the rows of ``pages``, then those
of ``windows``. Either may be None. Rows that fill up the batch have ``stored`` and ``capacity`` 0:
their results are 0, and their keys and values go to a dummy slot.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from razor_dist.kernels.compiled import operations

log = logging.getLogger(__name__)


class Pages(NamedTuple):
    """One layer's retrieval heads, and the pages of n sequences."""

    k: Tensor  # [R, slots, D], or codes of D dimensions (`razor_dist.kernels.quantized`)
    v: Tensor
    page_size: int
    table: Tensor  # int32 [n, pages]: the pages of each sequence, in the order of its shard
    stored: Tensor  # int64 [n]: tokens of its shard, with the new one if this rank stores that
    at: Tensor  # int64 [n]: the slot of the new token's keys and values
    position: Tensor  # int64 [n], of the new token
    places: Tensor | None = None  # int64 [slots]: the tokens' positions, for ALiBi
    # float32 [R, slots]: the scales of keys and values that are codes.
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Windows(NamedTuple):
    """One layer's streaming heads of one window, and the slots of n sequences in their cache.

    A slot is as `razor_dist.cache.streaming` describes it: the compensation token, then the sinks,
    then the ring.
    """

    k: Tensor  # [S, places, D]
    v: Tensor
    sinks: int
    compensation: bool
    width: int  # places of a slot that are read at most
    position: Tensor  # int64 [n], of the new token
    start: Tensor  # int64 [n]: where its window begins
    offset: Tensor  # int64 [n]: the slot's first place
    capacity: Tensor  # int64 [n]: tokens that its ring holds


class Rotation(NamedTuple):
    """Cosines and sines still to be applied to queries and keys (`razor_dist.kernels.fused`)."""

    cos: Tensor  # [1, T, R]
    sin: Tensor
    interleaved: bool


class Turned(NamedTuple):
    """Queries that `store` rotates beside the keys of the same heads."""

    q: Tensor  # [K, G, n, D]
    out: Tensor  # of the same shape, for the result
    rotation: Rotation


def implementation(device: torch.device) -> ModuleType:
    """The module for a device: `decode_triton`, `decode_cpu`, or else `decode_torch`."""
    own = "decode_triton" if device.type == "cuda" else "decode_cpu"
    name = own if available(device) else "decode_torch"
    return importlib.import_module(f"razor_dist.kernels.{name}")


def available(device: torch.device) -> bool:
    """True if a device's own kernels, Triton's or the compiled ones, work here."""
    if device.type == "cpu":
        return operations() is not None
    return device.type == "cuda" and _triton()


@functools.cache
def _triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        log.warning("triton is not installed: decoding is slower without it")
        return False
    try:
        # Compiles Triton's launcher, which needs a C compiler and Python.h.
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:  # whatever a compiler or a driver raises
        log.warning("triton does not work here, decoding is slower without it: %s", error)
        return False
    return True
