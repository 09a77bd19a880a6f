"""Token ids as the engine holds them: four bytes each, also between processes.

A million of them as a Python list take about 36 MB, and as many objects to walk through at each
step that looks at them, all the while with the interpreter's lock held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from razor_dist.config.errors import RequestError

Tokens = npt.NDArray[np.int32]

_WIRE = np.dtype("<i4")


def as_tokens(
    ids: Sequence[int] | npt.NDArray[np.integer], vocab_size: int, param: str = "prompt"
) -> Tokens:
    """Token ids as an array, none of them outside the vocabulary.

    Parameters
    ----------
    ids : sequence of int, or integer array, ``[n]``
        Of any size, such as a user's JSON may hold.
    vocab_size : int
        Ids are in ``[0, vocab_size)``.
    param : str
        The request's field that they came from.

    Returns
    -------
    Tokens
        ``[n]``, int32.

    Raises
    ------
    RequestError
        Naming the first id that is no token's.
    """
    found = np.asarray(ids)
    if found.dtype.kind not in "iu":
        # Some integer is too large for int64. Python's own compare as they should; numpy would make
        # floats of some.
        found = np.asarray(ids, object)
    if not found.size:
        return np.empty(0, np.int32)
    wrong = found[(found < 0) | (found >= vocab_size)]
    if wrong.size:
        raise RequestError(f"token id {wrong[0]} in {param} is not in [0, {vocab_size})", param)
    return found.astype(np.int32, copy=False)


def pack(ids: Sequence[int] | Tokens) -> bytes:
    """Ids of tokens as bytes, for a message between processes."""
    return np.asarray(ids, _WIRE).tobytes()


def unpack(data: bytes) -> Tokens:
    """Inverse of `pack`; a view of ``data``, not to be written to."""
    return np.frombuffer(data, _WIRE).astype(np.int32, copy=False)
