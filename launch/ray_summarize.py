"""``ray job submit -- python launch/ray_summarize.py``: the same as ``razor-dist summarize``."""

import sys

from razor_dist.cli import main

if __name__ == "__main__":
    sys.exit(main(["summarize", *sys.argv[1:]]))
