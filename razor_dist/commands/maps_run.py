"""``razor-dist eval maps`` from criteria to a table: maps are found once, then compared."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import typer

from razor_dist.commands.identify import METHODS
from razor_dist.commands.identify_options import (
    BudgetOptions,
    CommonOptions,
    PasskeyOptions,
    WindowOptions,
)
from razor_dist.commands.identify_run import ModelSource, measured_masses, reading_of
from razor_dist.commands.identify_run import run as identify
from razor_dist.config.errors import ConfigError
from razor_dist.documents.corpus import haystack_paragraphs
from razor_dist.evals.maps import (
    DEFAULT,
    STREAMING,
    UPPER_BOUND,
    Study,
    budget_of,
    check_lengths,
    upper_bound,
)
from razor_dist.evals.methods import shape_of
from razor_dist.evals.needle.config import MapsConfig
from razor_dist.evals.report import write_json, write_page
from razor_dist.files import make_folder
from razor_dist.heads.head_map import HeadMap, choose
from razor_dist.identify.budget import Masses
from razor_dist.jobs.results import differences
from razor_dist.models.loader import dtype_name

_FOUND_HERE = ("razor", "onthefly", "kvzip", "reach")  # by a few passes, without training
# Tokens of onthefly's longest sample: then it takes about as long as the other criteria.
_PASSKEYS_TOKENS = 4000


def run(config: MapsConfig, criteria: Sequence[str] | None, out: Path) -> str:
    """Find the maps that the folder lacks, measure windows, compare all; return the page."""
    names = list(dict.fromkeys(criteria or (*_FOUND_HERE, UPPER_BOUND)))
    for name in names:
        if name not in (*_FOUND_HERE, UPPER_BOUND) and not name.endswith(".json"):
            raise ConfigError(
                f"unknown criterion {name!r}; give {', '.join(_FOUND_HERE)}, {UPPER_BOUND}, or "
                "paths of head maps that end in .json"
            )
    torch.set_num_threads(config.threads_per_rank(1))  # as the methods are compared
    make_folder(out / "maps")
    common = _common(config, out)
    model = ModelSource(common)
    # Refused before the work.
    given = _given(config, [name for name in names if name.endswith(".json")])
    for percent in sorted(config.budgets):
        budget = budget_of(config, model.shape, percent, config.middle_share)
    if budget.short != config.window_min:
        why = f"window_ratio {config.window_ratio:g}" if config.window_ratio else "window_max"
        said = f"short windows have {budget.short} tokens by {why}, not the {config.window_min}"
        typer.echo(f"warning: {said} of window_min", err=True)
    if haystack_paragraphs(config.haystack)[0] == "reference":
        typer.echo("warning: the maps are found on this haystack too; better --haystack", err=True)
    check_lengths(config, budget)
    reading = reading_of(model, budget, config.tokens)
    finding, measuring = _deciding(config, model)
    cached = out / "maps" / "masses.json"
    read = _kept(cached, measuring)  # refused before the work, too
    maps, seconds = {}, {}
    for name in names:
        if name == UPPER_BOUND:
            maps[name], seconds[name] = upper_bound(config, out / "alone")
        elif name in _FOUND_HERE:
            maps[name], seconds[name] = _found(name, _common(config, out, name), finding)
        else:
            own, found = given[name]
            maps[own] = found
    if read is not None:
        seen: Masses = {int(window): tuple(map(tuple, rows)) for window, rows in read.items()}
    else:
        seen = measured_masses(model, budget, reading)
        _free_gpu()
        write_json(cached, {"settings": measuring, "found": seen})
    study = Study(config, maps, seen)
    rows = study.run_in(out)
    about: dict[str, Any] = {"seconds": seconds, "budgets": config.budgets, "rows": rows}
    write_json(out / "maps.json", about)
    return write_page(out / "report.md", study.page(rows, seconds))


def _given(config: MapsConfig, paths: Sequence[str]) -> dict[str, tuple[str, HeadMap]]:
    """Load head maps by path, each with its name; refuse those that cannot be compared."""
    maps: dict[str, tuple[str, HeadMap]] = {}
    for path in paths:
        found = HeadMap.load(path)
        shape = shape_of(config, found)
        choose(found, shape.layers * shape.kv_heads)
        taken = (*_FOUND_HERE, UPPER_BOUND, STREAMING, DEFAULT)
        name = Path(path).stem if found.method in taken else found.method
        if name in (*(own for own, _ in maps.values()), *taken):
            raise ConfigError(f"{path}: another head map is named {name} here; give one of them")
        maps[path] = name, found
    return maps


def _common(config: MapsConfig, out: Path, name: str = "none") -> CommonOptions:
    scaling = config.rope_scaling
    return CommonOptions(
        model=config.model,
        out=out / "maps" / f"{name}.json",
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        rope_scaling=None if scaling is None else json.dumps(scaling.parameters),
    )


def _deciding(config: MapsConfig, model: ModelSource) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that determine the maps, and those that determine the masses."""
    shared = config.model_dump(mode="json", include={"seed", "rope_scaling"})
    shared |= {"model": model.name, "dtype": dtype_name(model.dtype)}
    own = {"tokens", "window_min", "window_max", "window_ratio", "block", "sink_tokens"}
    return shared, shared | config.model_dump(mode="json", include=own)


def _kept(path: Path, settings: Mapping[str, Any]) -> Any:
    """Return a file's JSON, None without a file; `ConfigError` if its settings differ."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not text:  # a kill can leave an empty file
        return None
    read = json.loads(text)
    # Older files do not say their settings.
    there = read.get("settings", {}) if isinstance(read, dict) else {}
    if found := differences(there, settings):
        raise ConfigError(
            f"{path} was made with other settings ({'; '.join(found)}); name another --out"
        )
    return read["found"]


def _found(name: str, options: CommonOptions, settings: Mapping[str, Any]) -> tuple[HeadMap, float]:
    """Return a criterion's map and the seconds that finding it took, loading included."""
    clock = options.out.with_suffix(".seconds")
    took = _kept(clock, settings)
    if took is None:
        began = time.monotonic()
        classes = (WindowOptions, BudgetOptions)
        own: dict[type, Any] = {cls: cls() for cls in classes}
        own[PasskeyOptions] = PasskeyOptions(max_tokens=_PASSKEYS_TOKENS)
        settings_class, *_ = METHODS[name][1]
        seeded = "seed" in {field.name for field in fields(settings_class)}
        identify(name, options, settings_class(**({"seed": options.seed} if seeded else {})), own)
        _free_gpu()
        took = round(time.monotonic() - began, 1)
        write_json(clock, {"settings": settings, "found": took})
    typer.echo(f"{name}: {options.out}", err=True)
    return HeadMap.load(options.out), took


def _free_gpu() -> None:
    """Free this process's GPU memory for the process that compares the maps."""
    gc.collect()
    torch.cuda.empty_cache()
