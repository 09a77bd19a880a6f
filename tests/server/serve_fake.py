"""``razor-dist serve`` on the ranks of `tests.fake_engine`, as a process for tests."""

import sys
from unittest import mock

from razor_dist.cli import main
from razor_dist.server import main as server

if __name__ == "__main__":
    real = server.serve
    with mock.patch.object(
        server, "serve", lambda config: real(config, worker="tests.fake_engine")
    ):
        sys.exit(main(["serve", *sys.argv[1:]]))
