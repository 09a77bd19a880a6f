"""Settings of ``razor-dist bench serve``; the names are those of ``vllm bench serve``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench.settings import FileBenchSettings

# Text that fields may have.
_PATTERNS = {
    "base_url": r"https?://[^/]+.*",
    "percentile_metrics": r"(ttft|tpot|itl|e2el)(,(ttft|tpot|itl|e2el))*",
    "metric_percentiles": r"\d\d?(\.\d+)?(,\d\d?(\.\d+)?)*",
}


@dataclass(frozen=True, kw_only=True)
class ServeBenchSettings(FileBenchSettings):
    base_url: Annotated[str, Option(help="Of the server.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Option(help="Default: the first that the server lists.")] = None
    endpoint: Annotated[
        Literal["/v1/completions", "/v1/chat/completions"], Option(help="Where requests go.")
    ] = "/v1/completions"
    num_prompts: Annotated[
        int | None, Option(min=0, help="Short requests. Default: 20, or all of the dataset.")
    ] = None
    dataset: Annotated[
        Path | None, Option(metavar="FILE", help="Short requests as JSON lines, not random words.")
    ] = None
    random_input_len: Annotated[int, Option(min=1, help="Words, about a token each.")] = 50
    random_output_len: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 32
    long_prompts: Annotated[int, Option(min=0, help="Long requests, sent at time 0.")] = 0
    long_input_len: Annotated[int, Option(min=1, help="Their words.")] = 7000
    long_output_len: Annotated[int | None, Option(min=1, help="Default: as short ones.")] = None
    request_rate: Annotated[float, Option(help="Short ones a second; inf: all at once.")] = math.inf
    arrival_window: Annotated[
        float | None, Option(help="Instead of a rate: seconds in which they arrive.")
    ] = None
    burstiness: Annotated[float, Option(help="1: Poisson; above, to inf: more even.")] = 1.0
    max_concurrency: Annotated[int | None, Option(min=1, help="Most requests in flight.")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Answers of full length.")] = False
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0
    seed: Annotated[int, Option(min=0, help="Of the words and of the arrivals.")] = 0
    percentile_metrics: Annotated[str, Option(help="Metrics to report.")] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, Option(help="Percentiles to report.")] = "95,99"
    plot: Annotated[Path | None, Option(metavar="FILE", help="Picture of TTFT by arrival.")] = None
    answers: Annotated[Path | None, Option(metavar="FILE", help="Answers' texts to write.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, pattern in _PATTERNS.items():
            if not re.fullmatch(pattern, text := getattr(self, name)):
                example = getattr(type(self), name)
                raise ConfigError(f"{name} is {text!r}; give something like {example}")
        for name in ("request_rate", "arrival_window", "burstiness"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}")
        if self.arrival_window and self.request_rate != math.inf:
            raise ConfigError("give --request-rate or --arrival-window, not both")
        if self.num_prompts == self.long_prompts == 0:
            raise ConfigError("nothing to send; give --num-prompts or --long-prompts")
