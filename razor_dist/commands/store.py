"""``razor-dist store``: list, verify and prune a directory of prefixes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from razor_dist.config.errors import ConfigError

if TYPE_CHECKING:
    from razor_dist.prefix.manifest import Manifest

store = typer.Typer(
    help="List, verify and prune stored prefixes.", no_args_is_help=True, rich_markup_mode=None
)

# Characters of a table, and of a document's name, which is cut off at its beginning.
_WIDTH, _TITLE = 120, 40

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A server's --prefix-store.")]


@store.command("list")
def list_(directory: Directory) -> None:
    """List the prefixes, the last used first.

    Prefixes that prefill has read have the document's name.
    """
    from rich.console import Console
    from rich.table import Table

    from razor_dist.prefix.parts import BadPartError
    from razor_dist.prefix.store import node_folders, read_about, read_node, read_title

    for folder in _folders(directory):
        about = read_about(folder)
        model, dtype = about.get("model", {}), about.get("kv_dtype")
        name = f"{model.get('model_type')}, {model.get('num_hidden_layers')} layers, {dtype}"
        table = Table("document", "prefix", "tokens", "its own", "ranks", "MiB", "used")
        for path in sorted(node_folders(folder), key=_used, reverse=True):
            try:
                found, _ = read_node(path)
            except BadPartError as error:
                if path.exists():  # else a server has removed it
                    table.add_row(read_title(path), path.name, f"damaged: {error}")
                continue
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(_used(path)))
            own = f"{found.begin}-{found.end}"
            size = f"{found.nbytes / 2**20:.1f}"
            ranks, title = str(found.world_size), read_title(path) or "(a request)"
            if len(title) > _TITLE:
                title = f"...{title[3 - _TITLE :]}"
            table.add_row(title, path.name[:12], str(found.end), own, ranks, size, used)
        if table.row_count:
            typer.echo(f"{folder.name}: {name}")
            Console(width=_WIDTH, markup=False, emoji=False).print(table)
        else:
            typer.echo(f"{folder.name}: {name}: no prefixes")


@store.command()
def verify(directory: Directory) -> None:
    """Read everything and name what is damaged; the exit code is 1 then.

    A server may use the directory meanwhile.
    """
    from razor_dist.prefix.parts import BadPartError
    from razor_dist.prefix.store import check_node, node_folders

    whole, bad = 0, set[Path]()
    for folder in _folders(directory):
        found: dict[str, Manifest] = {}
        # Twice: the first list may have a node's children and lack the node, written meanwhile.
        for _ in range(2):
            for path in node_folders(folder):
                if path.name in found or path in bad:
                    continue
                try:
                    found[path.name] = check_node(path)
                except BadPartError as error:
                    if path.exists():  # else a server has removed it
                        bad.add(path)
                        typer.echo(f"{path}: {error}", err=True)
        while lost := [name for name, m in found.items() if m.parent and m.parent not in found]:
            for name in lost:
                # A server removes a node after its children.
                if (folder / name).exists():
                    bad.add(folder / name)
                    typer.echo(f"{folder / name}: its parent is missing", err=True)
                del found[name]
        whole += len(found)
    typer.echo(f"{whole} prefixes are whole, {len(bad)} are not")
    raise typer.Exit(1 if bad else 0)


@store.command()
def prune(
    directory: Directory,
    max_gb: Annotated[
        float | None,
        typer.Option(min=0, help="GiB to keep; the least used are removed."),
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Remove what was not used since.")
    ] = None,
) -> None:
    """Remove damaged prefixes, their children and expired contexts; old or too many if wanted."""
    from razor_dist.prefix.parts import BadPartError
    from razor_dist.prefix.store import (
        WriterLock,
        check_node,
        node_folders,
        remove_leftovers,
        remove_node,
    )
    from razor_dist.server.context_files import sweep

    folders = _folders(directory)
    lock = WriterLock(directory)
    lock.require()
    removed = remove_leftovers(directory)
    found: dict[Path, Manifest] = {}
    for folder in folders:
        for path in node_folders(folder):
            try:
                found[path] = check_node(path)
            except BadPartError:
                remove_node(path)
                removed += 1

    def leaves() -> list[Path]:
        parents = {path.parent / str(found[path].parent) for path in found}
        return sorted((path for path in found if path not in parents), key=_used)

    def drop(path: Path) -> None:
        nonlocal removed
        remove_node(path)
        del found[path]
        removed += 1

    while lost := [p for p, m in found.items() if m.parent and p.parent / m.parent not in found]:
        for path in lost:
            drop(path)
    oldest = 0.0 if older_than is None else time.time() - 86400 * older_than
    removed += sweep(directory, oldest)
    while old := [path for path in leaves() if _used(path) < oldest]:
        for path in old:
            drop(path)
    while max_gb is not None and sum(m.nbytes for m in found.values()) > max_gb * 2**30:
        drop(leaves()[0])
    lock.release()
    size = sum(manifest.nbytes for manifest in found.values()) / 2**20
    typer.echo(f"removed {removed}; {len(found)} prefixes are left, {size:.1f} MiB")


def _folders(directory: Path) -> list[Path]:
    from razor_dist.prefix.store import folders

    found = folders(directory)
    if not found:
        try:  # `folders` ignores errors, such as of another user's store
            for name in os.listdir(directory):
                if re.fullmatch("[0-9a-f]+", name) and (inside := directory / name).is_dir():
                    os.listdir(inside)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
        raise ConfigError(f"{directory} holds no stored prefixes")
    return found


def _used(path: Path) -> float:
    try:
        return (path / "manifest.json").stat().st_mtime
    except OSError:
        return 0.0
