"""The process that a pressed model lives in; `razor_dist.evals.baselines.client` starts it.

``python -m razor_dist.evals.baselines.worker DESCRIPTOR``, a socket's, over which come a
`BaselineConfig` and then calls: a method's name and its arguments. Each is answered, the
configuration too, with ``("done", result)`` or ``("failed", error)``. The process ends when the
other end is closed. Both ends are ours and of one release, so objects travel by pickle.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from razor_dist.config.errors import RazorError
from razor_dist.evals.baselines.model import PressedModel

log = logging.getLogger(__name__)


def serve(connection: Connection) -> None:
    """Answer until the other end is closed."""
    config = connection.recv()
    torch.set_num_threads(config.threads_per_rank(1))
    made: list[PressedModel] = []
    if not _answer(connection, lambda: made.append(PressedModel(config))):
        return
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        _answer(connection, getattr(made[0], name), *arguments)


def _answer(connection: Connection, call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        result = call(*arguments)
    except RazorError as error:
        connection.send(("failed", error))
    except Exception as error:
        log.exception("%s failed", getattr(call, "__name__", "loading"))
        # As text: an exception of another library may not survive the way.
        connection.send(("failed", RuntimeError(f"{type(error).__name__}: {error}")))
    else:
        connection.send(("done", result))
        return True
    return False


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    serve(Connection(int(sys.argv[1])))
