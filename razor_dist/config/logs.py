"""Logging of the server's, the ranks' and the jobs' processes."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

# For the processes that this one starts; names of settings, which have the same meaning there.
_LEVEL, _FORMAT = "RAZOR_LOG_LEVEL", "RAZOR_LOG_FORMAT"


class JsonFormatter(logging.Formatter):
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


def set_up_logging(level: str, style: str = "text") -> None:
    """Log to standard error from ``level`` ("debug" to "error") on, as "text" or "json".

    Processes that this one starts may call `inherit_logging`.
    """
    os.environ |= {_LEVEL: level, _FORMAT: style}
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Ours tell of starting, ending and requests already.
    logging.getLogger("uvicorn.error").setLevel("WARNING")


def inherit_logging() -> None:
    """Log as the process that started this one."""
    set_up_logging(os.environ.get(_LEVEL, "info"), os.environ.get(_FORMAT, "text"))
