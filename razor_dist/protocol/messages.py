"""Messages between the frontend and rank 0: one `msgspec.Struct` each, as msgpack in frames.

The frontend listens on a Unix-domain socket, rank 0 connects. A frame is a 4-byte big-endian length
followed by one message, whose key ``t`` names its type.
"""

from __future__ import annotations

import struct
from asyncio import StreamReader
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from razor_dist.config.errors import EngineError, RazorError, RequestError
from razor_dist.protocol.counters import Counters
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import GrammarText

# Token ids are four bytes each, also between processes: a million of them as a Python list take
# about 36 MB, and as many objects to walk through with the interpreter's lock held.
Tokens = npt.NDArray[np.int32]

# The exit code of a rank that the user's settings or model made end: another start would not help.
EXIT_USER_ERROR = 3

_WIRE = np.dtype("<i4")
_HEADER = struct.Struct(">I")
HEADER_SIZE = _HEADER.size


class Message(msgspec.Struct, tag_field="t", omit_defaults=True):
    """Fields with a default are not sent while they have it."""


class CacheScope(NamedTuple):
    """The requests that may share a request's caches."""

    salt: str | None = None  # requests with another salt may not
    shared: bool = True  # False: no other may, and the caches end with the request


ANY_REQUEST = CacheScope()


class Asked(Message, tag="add"):
    """The part of an `Add` by which rank 0 can refuse it, whatever the rest is."""

    id: str
    params: dict[str, Any]  # fields of `SamplingParams`, which msgspec would not check

    def refused(self, error: RazorError) -> list[Failed]:
        """Return the messages that refuse each of the answers."""
        n = self.params.get("n")  # which may be what is wrong
        ids = answer_ids(self.id, n if isinstance(n, int) else 1)
        return [Failed.of(id_, error) for id_ in ids]


class Add(Asked, tag="add", forbid_unknown_fields=True):
    """Queue a request; messages about its n answers carry the ids of `answer_ids`.

    Unknown fields, such as those of another version's frontend, are refused, in ``params`` too.
    """

    prompt: Tokens
    # Prefill only, and pin the caches until `Abort`; done when `Progress.processed` is the total.
    pin: bool = False
    prefix: str | None = None  # id of a pinned request that this prompt continues
    # Of a pinned prefix: its owner, and the most bytes of all of the owner's pinned prefixes.
    quota: tuple[str, int] | None = None
    scope: CacheScope = ANY_REQUEST
    grammar: str | None = None  # text of the `GrammarText`, which ``params`` lack

    def checked_params(self) -> SamplingParams:
        """Return the parameters; `RequestError` with the name of a wrong or unknown field."""
        given = {} if self.grammar is None else {"structured_outputs": GrammarText(self.grammar)}
        return SamplingParams(**self.params | given)


class Abort(Message, tag="abort"):
    """End a request. Nothing answers it."""

    id: str


class StatsQuery(Message, tag="stats"):
    """Ask for `Stats` with this tag."""

    tag: int


class Shutdown(Message, tag="shutdown"):
    """End the ranks."""


class EngineInfo(msgspec.Struct):
    """The engine, as rank 0 describes it."""

    max_model_len: int  # tokens of a prompt and its answer
    vocab_size: int
    world_size: int = 1
    model: str = ""
    eos_token_ids: tuple[int, ...] = ()
    attention: str = "razor"
    prefill: str = "local"
    decode: str = "replicated"  # or "tensor": tensor-parallel decode
    decode_reason: str = ""
    kv_dtype: str = "float32"  # "float32", "bfloat16", "int8" or "int4"
    retrieval_fraction: float = 0.0  # of KV heads
    source_heads: int = 0  # retrieval heads that are asked where answers come from
    kv_reserved_bytes_per_rank: int = 0
    saves_from_tokens: int | None = None  # the head split saves memory for this many and more
    prefix_folder: str | None = None  # in the prefix store, for this engine's fingerprint
    page_size: int = 0  # tokens
    num_pages: int = 0  # of all ranks


class Alive(Message, tag="alive"):
    """Sent every second or so, whatever rank 0 is doing."""

    pid: int
    seconds_left: dict[str, float]  # estimated, by request, until it ends


class Ready(Message, tag="ready"):
    info: EngineInfo


class Progress(Message, tag="progress"):
    """Sent when a request is admitted, with `processed` = `cached`, then after each chunk."""

    id: str
    processed: int  # prompt tokens in the caches
    total: int  # prompt tokens, those of the prefix included
    prefix: int  # tokens of the pinned prefix
    cached: int  # tokens that were in the caches, of the prefix or not
    seconds: float  # since its first chunk began
    nbytes: int = 0  # of a pinned prefix, on all ranks, without the prefix that it continues


# Log-probability, rank among all tokens (1 is the likeliest), and the likeliest tokens with their
# log-probabilities.
PromptLogprob = tuple[float, int, list[tuple[int, float]]]


class PromptLogprobs(Message, tag="prompt"):
    """Log-probabilities of one chunk's tokens; the prompt's first token has none."""

    id: str
    logprobs: list[PromptLogprob | None]

    @classmethod
    def of(cls, request_id: str, first: bool, rows: Sequence[Sequence[float]]) -> PromptLogprobs:
        """Make it of the ranks' table: log-probability, rank, k values, k token ids."""
        entries: list[PromptLogprob | None] = [None] if first else []
        for logprob, rank, *top in rows:
            half = len(top) // 2
            pairs = zip(map(int, top[half:]), top[:half], strict=True)
            entries.append((logprob, int(rank), list(pairs)))
        return cls(request_id, entries)


class Token(Message, tag="token"):
    """The next token of an answer."""

    id: str
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    finish: str | None = None  # "stop", "repetition" or "length" with the last token
    # With ``return_sources``: positions and the strongest heads' mean attention to them while the
    # token was computed, largest first; None for the first token.
    sources: list[tuple[int, float]] | None = None
    accepted: bool = False  # it was in a draft
    rejected: int = 0  # tokens of a draft that did not come true, with the last token of its step


class Failed(Message, tag="error"):
    """A request was refused or, with the code "engine_error", failed by no fault of its own.

    With the id "" it is about no request: the ranks cannot start. At the first start that is final.
    """

    id: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, request_id: str, error: RazorError) -> Failed:
        if isinstance(error, RequestError):
            return cls(request_id, str(error), error.param, error.code)
        return cls(request_id, str(error), None, "engine_error")

    @property
    def exception(self) -> RequestError | EngineError:
        if self.code == "engine_error":
            return EngineError(self.message)
        return RequestError(self.message, param=self.param, code=self.code)


class Stats(Message, tag="stats"):
    """The answer to the `StatsQuery` of this tag."""

    tag: int
    counters: Counters


ToEngine = Add | Abort | StatsQuery | Shutdown
AboutRequest = Progress | PromptLogprobs | Token | Failed
ToFrontend = Alive | Ready | Stats | AboutRequest


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, np.generic):  # from a user of `LLM`
        return value.item()
    raise NotImplementedError(f"{type(value)} is not part of a message")


def decoder(of: Any) -> Callable[[bytes], Any]:
    """Return the function that decodes messages of a type, such as a union of `Message` types."""
    return msgspec.msgpack.Decoder(of, dec_hook=lambda _, data: unpack(data)).decode


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
decode_to_engine: Callable[[bytes], ToEngine] = decoder(ToEngine)
decode_to_frontend: Callable[[bytes], ToFrontend] = decoder(ToFrontend)
_decode_asked: Callable[[bytes], Asked] = decoder(Asked)


def read_for_engine(body: bytes) -> Sequence[ToEngine | Failed]:
    """Return a frame's message to rank 0, or the refusal of each answer of a malformed `Add`.

    Raises `EngineError` for any other malformed frame, whose sender no answer would reach.
    """
    try:
        return [decode_to_engine(body)]
    except ValueError as error:  # msgspec's, or of a text that is not UTF-8
        problem = EngineError(
            f"rank 0 cannot read a message of the frontend, perhaps of another version: {error}"
        )
    try:
        return _decode_asked(body).refused(problem)
    except ValueError:
        raise problem from None


class FrontendUnreachableError(EngineError):
    """Rank 0 has no connection to the frontend, so the frontend cannot tell the user why."""


def encode(message: object) -> bytes:
    """The frame of a message to rank 0, to the frontend, or to or from a child process."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    return int(_HEADER.unpack(header)[0])


async def read_frame(reader: StreamReader) -> bytes:
    """Return the body of the next frame of a stream."""
    return await reader.readexactly(body_length(await reader.readexactly(HEADER_SIZE)))


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


def check_text(text: str, param: str) -> None:
    """Raise `RequestError` for half a character, which neither messages nor tokenizers can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = f"{param} holds a lone surrogate (\\ud800 to \\udfff)"
        raise RequestError(problem, param) from None


def pack(ids: Sequence[int] | Tokens) -> bytes:
    """Ids of tokens as bytes, for a message between processes."""
    return np.asarray(ids, _WIRE).tobytes()


def unpack(data: bytes) -> Tokens:
    """Inverse of `pack`; a view of ``data``, not to be written to."""
    return np.frombuffer(data, _WIRE).astype(np.int32, copy=False)
