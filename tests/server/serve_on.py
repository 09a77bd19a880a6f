"""``razor-dist serve`` on another worker: ``python -m tests.server.serve_on WORKER [FLAGS]``.

``MAX_FAILED_RESTARTS`` in the environment takes the place of the engine's own number.
"""

import os
import sys
from functools import partial
from unittest import mock

from razor_dist.cli import main
from razor_dist.frontend import managed_engine
from razor_dist.frontend.ranks import RankGroup
from razor_dist.server import main as server

if __name__ == "__main__":
    serve = partial(server.serve, start_ranks=partial(RankGroup.start, module=sys.argv[1]))
    if most := os.environ.get("MAX_FAILED_RESTARTS"):
        managed_engine._MAX_FAILED_RESTARTS = int(most)
    # What a worker pretends to serve, no model on this machine could.
    server.check_settings = mock.Mock()
    with mock.patch.object(server, "serve", serve):
        sys.exit(main(["serve", *sys.argv[2:]]))
