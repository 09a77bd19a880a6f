"""Logging of the server's, the ranks' and the jobs' processes."""

from __future__ import annotations

import json
import logging
import os
import traceback
from datetime import UTC, datetime
from typing import Any

# For the processes that this one starts; names of settings, which have the same meaning there.
LOG_ENV = _LEVEL, _FORMAT = "RAZOR_LOG_LEVEL", "RAZOR_LOG_FORMAT"


class TextFormatter(logging.Formatter):
    """A line of text; with ``discreet`` without exceptions' messages, which may quote a client."""

    def __init__(self, *, discreet: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._discreet = discreet

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's text
        return super().format(record)

    def formatException(self, ei: Any) -> str:
        if not self._discreet:
            return super().formatException(ei)
        kind, _, trace = ei
        return "".join(traceback.format_tb(trace)) + kind.__name__


class JsonFormatter(TextFormatter):
    """A JSON object on a line: time, level, logger, message, and the record's ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logging(level: str, style: str = "text", *, discreet: bool = False) -> None:
    """Log to standard error from ``level`` ("debug" to "error") on, as "text" or "json".

    Processes that this one starts may call `inherit_logging`. ``discreet``: as in `TextFormatter`.
    """
    os.environ |= {_LEVEL: level, _FORMAT: style}
    handler = logging.StreamHandler()
    formatter = JsonFormatter if style == "json" else TextFormatter
    handler.setFormatter(formatter(discreet=discreet))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Our own lines report start, end and requests.
    logging.getLogger("uvicorn.error").setLevel("WARNING")


def inherit_logging(*, discreet: bool = False) -> None:
    """Log as the process that started this one."""
    level, style = os.environ.get(_LEVEL, "info"), os.environ.get(_FORMAT, "text")
    set_up_logging(level, style, discreet=discreet)
