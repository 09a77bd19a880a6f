"""A job as a program: ``python tests/jobs/driver.py FOLDER MODEL [SETTING=VALUE ...]``."""

from __future__ import annotations

import sys

import yaml

import razor_dist
from razor_dist.config.errors import RazorError
from razor_dist.config.logs import set_up_logging
from razor_dist.config.schema import EngineConfig, JobConfig
from razor_dist.jobs.job import run_job
from tests.jobs.tasks import Completions

TASK = ("count", "slow", "harm", "max_tokens")


def main(folder: str, model: str, *settings: str) -> int:
    set_up_logging("info")
    print("library:", razor_dist.__file__, flush=True)
    given = {name: yaml.safe_load(value) for name, value in (s.split("=", 1) for s in settings)}
    engine = EngineConfig(model=model, attention="full", world_size=2, max_model_len=256)
    task = Completions({"full": engine}, **{n: given.pop(n) for n in TASK if n in given})
    job = {"cpus_per_rank": 0.5, "cluster_timeout": 120.0} | given
    try:
        summary = run_job(task, JobConfig(**job), folder)
    except RazorError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(summary)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
