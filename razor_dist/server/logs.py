"""How the server's processes log."""

from __future__ import annotations

import logging


def set_up_logging(level: str) -> None:
    """Log to standard error from ``level`` ("debug" to "error") on."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
