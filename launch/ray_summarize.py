"""``ray job submit -- python launch/ray_summarize.py``: the same as ``razor-dist summarize``.

Ray knows success and failure only. A job that is done succeeds, though some documents cannot be
read: its log names them, and its results have their errors.
"""

import sys

from razor_dist.cli import main
from razor_dist.commands.options import EXIT_SOME_FAILED

if __name__ == "__main__":
    code = main(["summarize", *sys.argv[1:]])
    sys.exit(0 if code == EXIT_SOME_FAILED else code)
