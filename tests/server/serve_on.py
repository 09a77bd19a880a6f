"""``razor-dist serve`` on another worker: ``python -m tests.server.serve_on WORKER [FLAGS]``."""

import sys
from unittest import mock

from razor_dist.cli import main
from razor_dist.server import main as server

if __name__ == "__main__":
    real, worker = server.serve, sys.argv[1]
    with mock.patch.object(server, "serve", lambda config: real(config, worker=worker)):
        sys.exit(main(["serve", *sys.argv[2:]]))
