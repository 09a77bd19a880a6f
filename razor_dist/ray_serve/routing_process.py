"""`route_of` in a process of its own, for long bodies.

Parsing megabytes of JSON holds the interpreter's lock, in which time no answer is passed on.
``python -m razor_dist.ray_serve.routing_process`` reads frames (`razor_dist.protocol.messages`) on
its standard input, each followed by a body, and answers with frames on its standard output.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable

from razor_dist.config.errors import EngineError
from razor_dist.frontend.child_process import ChildProcess, Pipes
from razor_dist.protocol.messages import encode
from razor_dist.ray_serve.routing import Route, route_of, tag_of

log = logging.getLogger(__name__)

# Seconds that one body may take.
_PATIENCE = 60.0
# The context that a body names. Found in another field it costs one more engine's answer.
_CONTEXT = re.compile(rb'"context"\s*:\s*"(ctx_[0-9a-f]+)"')


class RoutingProcess(ChildProcess):
    """The ingress's handle of the process, which is started by the first long body."""

    def __init__(self) -> None:
        super().__init__(__name__)

    async def route_of(self, body: bytes | bytearray, owner: str, key: Hashable) -> Route:
        """Return as `route_of`, in turns of ``key``.

        If the process fails, the route has the context's engine alone: any other one would answer
        that there is no such context.
        """
        head = encode({"bytes": len(body), "owner": owner})
        try:
            answer = await self.in_turn(lambda: self.ask(_PATIENCE, head, body), key)
        except (OSError, EngineError) as error:  # time-outs and broken pipes are OSErrors
            log.warning("a long request is not routed: %s", error or type(error).__name__)
            found = _CONTEXT.search(body)
            return Route(holder=tag_of(found[1].decode()) if found else "")
        return Route(answer["length"], tuple(answer["blocks"]), answer["holder"])


def main() -> None:
    pipes = Pipes()
    while (message := pipes.read()) is not None:
        route = route_of(pipes.read_bytes(message["bytes"]), message["owner"])
        fields = {"length": route.length, "blocks": route.blocks, "holder": route.holder}
        pipes.write(encode(fields))


if __name__ == "__main__":
    main()
