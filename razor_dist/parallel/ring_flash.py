"""The package ring-flash-attn behind our ring's interface: ``ring: ring_flash_attn``.

Its zigzag ring needs equal shards and knows no earlier keys, so it serves a prompt's first chunk if
its length is a multiple of 2P. Other chunks, and heads biased by distance, take our own ring. It is
made for CUDA; tests with a stand-in for flash-attn's forward check our ring against it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

from torch import Tensor

from razor_dist.config.errors import ConfigError
from razor_dist.config.extras import install_command
from razor_dist.kernels.query import Query
from razor_dist.parallel.comm import Communicator
from razor_dist.parallel.earlier import Earlier
from razor_dist.parallel.ring import ring_attention
from razor_dist.parallel.zigzag import Chunk

_NAME = "razor_dist._ring_flash_attn"


@functools.cache
def load_zigzag() -> ModuleType:
    """The package's zigzag module, without running the package's ``__init__``.

    That ``__init__`` imports an adapter that asks transformers for a name which it no longer has.
    `ConfigError` if ring-flash-attn or flash-attn is not installed.
    """
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None or importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            "ring is ring_flash_attn, which needs the packages ring-flash-attn and flash-attn: "
            f"{install_command('ring-flash-attn')}, or use ring: own"
        )
    # A package of that folder under another name: its modules import each other relatively.
    package = ModuleType(_NAME)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[_NAME] = package
    return importlib.import_module(f"{_NAME}.zigzag_ring_flash_attn")


def serves(comm: Communicator, chunk: Chunk, earlier: Earlier, dim: int) -> bool:
    """True if the package can compute this chunk, for heads of ``dim`` dimensions.

    It calls flash-attn's kernels without the padding that flash-attn's own functions add.
    """
    equal = (chunk.end - chunk.begin) % (2 * comm.size) == 0
    return comm.size > 1 and equal and earlier.total == 0 and dim % 8 == 0 and dim <= 256


def ring_flash_attention(
    comm: Communicator, chunk: Chunk, query: Query, k: Tensor, v: Tensor, earlier: Earlier
) -> Tensor:
    """`razor_dist.parallel.ring.ring_attention`, by the package if it `serves` the chunk."""
    q = query.q
    if query.by_distance or not serves(comm, chunk, earlier, q.shape[-1]):
        return ring_attention(comm, chunk, query, k, v, earlier)
    heads, group, tokens, dim = q.shape
    # [batch, tokens, heads, dim], contiguous for the package's sends.
    out, _ = load_zigzag().zigzag_ring_flash_attn_forward(
        comm.group,
        q.reshape(1, heads * group, tokens, dim).transpose(1, 2).contiguous(),
        k.unsqueeze(0).transpose(1, 2).contiguous(),
        v.unsqueeze(0).transpose(1, 2).contiguous(),
        softmax_scale=query.scale,
    )
    comm.note("ring", (comm.size - 1) * (k.nbytes + v.nbytes))
    return out.transpose(1, 2).reshape(heads, group, tokens, dim).float()
