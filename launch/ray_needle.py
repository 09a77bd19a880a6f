"""``ray job submit ... -- python launch/ray_needle.py``: the same as ``razor-dist eval needle``."""

import sys

from razor_dist.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "needle", *sys.argv[1:]]))
