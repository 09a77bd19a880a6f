"""Messages between the frontend and rank 0: msgpack maps in length-prefixed frames.

The frontend listens on a Unix-domain socket, rank 0 connects. A frame is a 4-byte big-endian length
followed by one msgpack map whose key ``t`` names the message.

Frontend to engine
    ``add``       ``id`` str, ``prompt`` (token ids as bytes: `pack`),
                  ``params`` (`SamplingParams` as a dict); optional: ``pin`` (prefill only and keep
                  the caches until ``abort``; done when ``progress`` has processed all) and
                  ``prefix`` (id of a pinned request that this prompt continues). The ``n``
                  answers that the parameters ask for have the ids of `answer_ids`
    ``abort``     ``id``; answered by nothing: the request just ends
    ``stats``     ``tag`` int; answered by ``stats``
    ``shutdown``  the ranks end

Engine to frontend
    ``alive``     ``pid`` of rank 0, ``seconds_left`` ({id: seconds}, estimated, until each request
                  ends); every second or so, whatever rank 0 is doing
    ``ready``     ``info``: world_size, model, max_model_len, vocab_size, eos_token_ids, attention,
                  prefill, decode ("replicated" or "tensor"), kv_dtype ("float32", "bfloat16" or
                  "int8"), retrieval_fraction (of KV heads),
                  source_heads (those that tell where answers come from),
                  kv_reserved_bytes_per_rank
    ``progress``  ``id``, ``processed``, ``total`` (prompt tokens, those of a ``prefix`` included),
                  ``prefix`` (those of a ``prefix``), ``cached`` (those that were in the caches,
                  of a ``prefix`` or not), ``seconds`` since its first chunk began. The
                  first, with ``processed`` = ``cached``, comes when the request is admitted; then
                  one comes after each chunk
    ``prompt``    ``id``, ``logprobs``: one entry per prompt token after those of a ``prefix``, the
                  first None, each other ``[logprob, rank, [[token, logprob], ...]]``
    ``token``     ``id``, ``token``, ``logprob`` (None unless asked for), ``top``
                  (``[[token, logprob], ...]``), ``finish`` (None, "stop" or "length"); with
                  ``return_sources`` also ``sources``: ``[[position, weight], ...]``, the mean
                  attention of the strongest heads to positions of the sequence, largest first,
                  while the token was computed; not for the first token
    ``error``     ``id``, ``message``, ``param``, ``code``: the request was refused, or, with the
                  code "engine_error", failed by no fault of its own. With the ``id`` "" it is
                  about no request: the ranks cannot start. At the first start that is for good
    ``stats``     ``tag``, ``bytes_sent`` {purpose: bytes} over all ranks, ``bytes_sent_per_rank``
                  (list), ``kv_bytes_per_rank`` (list: bytes of KV in use now), ``rss_per_rank``,
                  ``prefix_cache`` (``queries`` of prompts, ``hits``, their ``query_tokens`` and
                  ``hit_tokens``, ``evictions``, ``entries``, ``bytes_per_rank``),
                  ``decode`` (as in ``info``), ``running``, ``waiting``,
                  ``peak_kv_bytes_per_rank`` and ``peak_rss_per_rank`` (highest since start),
                  ``cpu_us_per_rank`` (microseconds of CPU since start),
                  ``prompt_tokens`` (prefilled since start), ``generated_tokens`` (likewise),
                  ``retrieval_kv_bytes_per_rank`` (of ``kv_bytes_per_rank`` those of retrieval
                  heads), ``step_seconds`` {"prefill" and "decode": `StepSeconds.fields`}
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from razor_dist.config.errors import EngineError, RazorError, RequestError

Message = dict[str, Any]
# Token ids are four bytes each, also between processes: a million of them as a Python list take
# about 36 MB, and as many objects to walk through with the interpreter's lock held.
Tokens = npt.NDArray[np.int32]

# The exit code of a rank that the user's settings or model made end: another start would not help.
EXIT_USER_ERROR = 3

_WIRE = np.dtype("<i4")
_HEADER = struct.Struct(">I")
HEADER_SIZE = _HEADER.size


class FrontendUnreachableError(EngineError):
    """Rank 0 has no connection to the frontend, which so cannot tell the user of it."""


def encode(message: Message) -> bytes:
    body = msgpack.packb(message, use_bin_type=True)
    return _HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    return int(_HEADER.unpack(header)[0])


def decode(body: bytes) -> Message:
    # Keys may be token ids.
    message: Message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    return message


def error_message(request_id: str, error: RazorError) -> Message:
    """The ``error`` message that tells of an exception; ``request_id`` "" says that it is fatal."""
    param: str | None = None
    code: str | None = "engine_error"
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    fields = {"message": str(error), "param": param, "code": code}
    return {"t": "error", "id": request_id, **fields}


def prompt_message(request_id: str, first: bool, rows: Sequence[Sequence[float]]) -> Message:
    """The ``prompt`` message of one chunk; the first chunk's begins with None for token 0."""
    entries: list[Any] = [None] if first else []
    for logprob, rank, *top in rows:
        half = len(top) // 2
        pairs = zip(top[half:], top[:half], strict=True)
        entries.append([logprob, int(rank), [[int(token), value] for token, value in pairs]])
    return {"t": "prompt", "id": request_id, "logprobs": entries}


def token_message(
    request_id: str,
    token: int,
    logprob: float | None,
    top: Sequence[Any],
    finish: str | None,
    sources: Sequence[tuple[int, float]] | None,
) -> Message:
    """The ``token`` message of one token; ``sources``: None if not asked for, or for the first."""
    found = {"token": token, "logprob": logprob, "top": top, "finish": finish}
    optional = {} if sources is None else {"sources": sources}
    return {"t": "token", "id": request_id, **found, **optional}


def exception_of(message: Message) -> RequestError | EngineError:
    if message["code"] == "engine_error":
        return EngineError(message["message"])
    return RequestError(message["message"], param=message["param"], code=message["code"])


def answer_ids(request_id: str, n: int) -> list[str]:
    """Return the ids of a request's answers, by which each may be aborted.

    Messages about its prompt carry the first.
    """
    return [request_id, *(f"{request_id}/{index}" for index in range(1, n))]


def as_tokens(
    ids: Sequence[int] | npt.NDArray[np.integer], vocab_size: int, param: str = "prompt"
) -> Tokens:
    """Token ids as an int32 array ``[n]``; `RequestError` for one outside ``[0, vocab_size)``.

    Integers of any size are taken, such as a user's JSON may hold.
    """
    found = np.asarray(ids)
    if found.dtype.kind not in "iu":
        # Some integer is too large for int64: numpy would make floats of some.
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


@dataclass
class EngineInfo:
    """Rank 0's description of the engine; `fields` is its whole message."""

    max_model_len: int
    vocab_size: int
    fields: Message = field(default_factory=dict)
