"""``torchrun launch/serve.py``: the same as ``razor-dist serve``, with the same flags."""

import sys

from razor_dist.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
