"""``razor-dist serve`` on another worker: ``python -m tests.server.serve_on WORKER [FLAGS]``."""

import sys
from functools import partial
from unittest import mock

from razor_dist.cli import main
from razor_dist.frontend.ranks import RankGroup
from razor_dist.server import main as server

if __name__ == "__main__":
    serve = partial(server.serve, start_ranks=partial(RankGroup.start, module=sys.argv[1]))
    with mock.patch.object(server, "serve", serve):
        sys.exit(main(["serve", *sys.argv[2:]]))
