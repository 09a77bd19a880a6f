"""Logging of the server's and the jobs' processes."""

from __future__ import annotations

import logging


def set_up_logging(level: str) -> None:
    """Log to standard error from ``level`` ("debug" to "error") on."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Ours tell of starting and ending already.
    logging.getLogger("uvicorn.error").setLevel("WARNING")
