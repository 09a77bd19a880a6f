"""Exceptions to OpenAI's error shape and HTTP status."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi.responses import JSONResponse

from razor_dist.config.errors import EngineError, ProcessKilledError, RequestError
from razor_dist.frontend.client import EngineBusyError, Status

_STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "host_not_allowed": 403,
    "origin_not_allowed": 403,
    "model_not_found": 404,
    "context_not_found": 404,
    "timeout": 408,
    "body_timeout": 408,
    "body_too_large": 413,
    "answer_too_large": 413,
    "too_many_tokens": 413,
    "unsupported_media_type": 415,
    "unreadable_document": 422,
    "queue_full": 429,
    "bodies_full": 429,
    "pinned_prefixes_hold_cache": 429,
    "rate_limit_exceeded": 429,
}
# Characters of an error's message and of its param, both of which may quote the request.
_LONGEST_MESSAGE, _LONGEST_PARAM = 1000, 100
_TYPE_OF_STATUS = {
    401: "authentication_error",  # as in llama-server; LiteLLM takes OpenAI's for a bad request
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# The route of Anthropic's API; routes below it answer in Anthropic's shape, too.
MESSAGES = "/v1/messages"
_ANTHROPIC_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class NotReadyError(EngineError):
    def __init__(self, status: Status) -> None:
        super().__init__(f"the engine is not ready ({status.state}): {status.reason}")
        self.state = status.state


class Failure(NamedTuple):
    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, RequestError):
            status = _STATUS_OF_CODE.get(error.code or "", 400)
            return cls(status, str(error), error.param, error.code)
        if isinstance(error, NotReadyError):
            return cls(503, str(error), code=f"engine_{error.state}")
        if isinstance(error, EngineBusyError):
            return cls(503, str(error), code="engine_busy")
        if isinstance(error, ProcessKilledError):
            return cls(503, str(error), code="process_killed")
        if isinstance(error, EngineError):
            return cls(500, str(error), code="engine_error")
        # Without the error's text, which may hold secrets. The log has it.
        return cls(500, "internal error; see the server's log", code="internal_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the failure in the shape of the API that a path belongs to."""
        anthropic = path.startswith(MESSAGES)
        types = _ANTHROPIC_TYPE_OF_STATUS if anthropic else _TYPE_OF_STATUS
        error = {
            "message": shortened(self.message, _LONGEST_MESSAGE),
            "type": types.get(self.status, "invalid_request_error"),
            "param": self.param and shortened(self.param, _LONGEST_PARAM),
            "code": self.code,
        }
        return {"type": "error", "error": error} if anthropic else {"error": error}

    def response(self, retry_after: int = 1, path: str = "") -> JSONResponse:
        """Return the failure as a response; clients may try again after ``retry_after`` seconds."""
        headers = {}
        if self.status in (429, 503) and self.code != "engine_failed":
            headers["Retry-After"] = str(retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 408:
            # Else OpenAI's clients would ask twice more and wait as long each time.
            headers["x-should-retry"] = "false"
        return JSONResponse(self.body(path), self.status, headers)


def shortened(text: str, longest: int) -> str:
    """Return a text, cut to ``longest`` characters, the last of which is an ellipsis then."""
    return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
