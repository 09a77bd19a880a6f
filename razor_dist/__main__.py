"""``python -m razor_dist``: the command line ``razor-dist``."""

import sys

from razor_dist.cli import main

if __name__ == "__main__":
    sys.exit(main())
