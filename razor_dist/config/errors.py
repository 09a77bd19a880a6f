"""Errors that a user of the library or of the server can cause and can mend."""

from __future__ import annotations


class RazorError(Exception):
    """Base class of the errors that razor_dist raises on purpose."""


class ConfigError(RazorError, ValueError):
    """A setting is wrong; the message names it and says what would be right."""


class ModelError(RazorError, ValueError):
    """A model cannot be found, or its attention cannot be honoured."""


class HeadMapError(RazorError, ValueError):
    """A head map is malformed or belongs to another model."""


class RequestError(RazorError, ValueError):
    """A request cannot be served as asked.

    ``param`` is the field at fault, ``code`` OpenAI's, e.g. ``context_length_exceeded``: then
    ``tokens`` may be set, those of the prompt, of the answer, and of the context.
    """

    tokens: tuple[int, int, int] | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class EngineError(RazorError, RuntimeError):
    """The engine failed while it held the request (a rank died, a time-out)."""


class RefusedError(EngineError):
    """The engine did not start, since its ranks refuse the settings or the model."""


class ProcessKilledError(EngineError):
    """A process that worked on the request was killed; the request may be sent again."""


class ClusterError(RazorError, RuntimeError):
    """The cluster cannot hold what is asked for, or cannot be reached."""


class DocumentError(RazorError, ValueError):
    """A document cannot be read; the message says why, without its name.

    ``retryable``: the document is not at fault (its reader is missing, say), and a later run may
    read it.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ReaderKilledError(DocumentError):
    """A document was not read since its reader was killed, which says nothing of the document."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)
