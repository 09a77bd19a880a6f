"""Engines on a store of prefixes, what they leave there, and what damages it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from razor_dist.parallel.comm import Communicator
from razor_dist.prefix.store import folders, node_folders, read_node
from tests.prefix.engines import Answers, Ask, Told, ids, serve

# Of 8 bits a number between two steps, 1/127 of its row's largest, becomes either, by what ranks
# and machines round otherwise: two engines' logprobs then differ by up to 1.1e-2, and theirs from
# float32's by up to 2.5e-2 (docs/LOG.md). That what is stored is read bit for bit has a test of its
# own; keys of another prefix change them by 0.7.
TO_8_BITS = 2e-2
# The steps of 4 bits are 127/7 as large.
TO_4_BITS = 0.36


def lives(
    comm: Communicator, path: str, changed: dict[str, Any], *each: tuple[Ask, ...]
) -> list[tuple[Answers, Told, dict[str, Any]]]:
    """Engines one after another, each with requests; their answers, cached tokens and counters."""
    found = [serve(comm, path, changed, asks) for asks in each]
    return [(answers, cached, stats.get("prefix_cache", {})) for answers, cached, stats in found]


def ranges(store: Path) -> list[tuple[int, int]]:
    """First and last tokens of the nodes in a store of one fingerprint."""
    [folder] = folders(store)
    manifests = [read_node(path)[0] for path in node_folders(folder)]
    return sorted((manifest.begin, manifest.end) for manifest in manifests)


def q(number: int, tokens: int = 12) -> Ask:
    return Ask(f"q{number}", ids((1, 150), (10 + number, tokens)))


def edit(node: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a node's manifest, and its checksum with it."""
    file = node / "manifest.json"
    fields = json.loads(file.read_bytes())
    del fields["sha256"]
    change(fields)
    fields["sha256"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(fields))


def spoil(store: Path, how: str, seed: int) -> None:
    """Damage one file of a store, as a disk, a user or another program may."""
    draw = random.Random(seed)
    nodes = [node for folder in folders(store) for node in node_folders(folder)]
    if not nodes:
        return
    node = draw.choice(nodes)
    file = draw.choice(sorted(node.iterdir()))
    data = bytearray(file.read_bytes())
    if how == "flip" and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif how == "lose":
        file.unlink()
    elif how == "foreign":
        other = draw.choice([p for n in nodes for p in n.iterdir() if p.suffix == file.suffix])
        shutil.copyfile(other, file) if other != file else file.unlink()
    elif how == "edit":

        def change(fields: dict[str, Any]) -> None:
            name = draw.choice([name for name, value in fields.items() if value not in (None, [])])
            value, by = fields[name], draw.choice([-1, 1, 7])
            if isinstance(value, list) and isinstance(value[0], list):
                value[draw.randrange(len(value))][draw.randrange(4)] += by
            elif isinstance(value, list):
                value[draw.randrange(len(value))] += by
            else:
                fields[name] = value + by if isinstance(value, int) else value[::-1]

        with contextlib.suppress(OSError, ValueError):  # lost or damaged before
            edit(node, change)
    elif how == "lose all":
        shutil.rmtree(node)
    elif how == "leave":
        shutil.copytree(node, node.with_name(f"{node.name}.00000000.new"), dirs_exist_ok=True)


DAMAGE = ["flip", "cut", "lose", "foreign", "edit", "lose all", "leave"]
