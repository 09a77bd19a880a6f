"""``razor-dist prefill``: read documents ahead of time, for servers that start later."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from razor_dist.commands.options import (
    EXIT_SOME_FAILED,
    Encoding,
    documents,
    log_from,
    with_config_flags,
)
from razor_dist.config.errors import ConfigError, DocumentError, EngineError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.config.sources import load_config

_LOST = "; not kept: it did not fit in prefix_store_gb, or could not be written"
_Template = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='As requests will have them, such as \'{"date_string": "26 Jul 2024"}\' where the '
        "model's template writes today's date.",
    ),
]


@with_config_flags(EngineConfig, leave_out=frozenset({"prefix_store"}))
def prefill(
    config_file: str | None,
    flags: dict[str, Any],
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Documents, as razor-dist summarize takes them."),
    ],
    store: Annotated[Path, typer.Option(help="Directory for --prefix-store of a server.")],
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="As a message that begins with the text; else as the page sends it."
        ),
    ] = False,
    encoding: Encoding = None,
    chat_template_kwargs: _Template = None,
) -> None:
    """Read documents into a store, so that a server answers questions about them at once.

    What is there already is not read again. Documents that cannot be read, are longer than the
    context, or are being read when a rank dies, are skipped and named; the exit code is 3 then, and
    if one could not be written or had no room. One that is too short to be kept, since reading it
    again is as fast, is named with the reason.
    """
    flags |= {"prefix_store": str(store)}
    config = load_config(EngineConfig, flags, os.environ, config_file)
    from razor_dist.engine.checks import check_store
    from razor_dist.llm.llm import LLM

    store = Path(config.prefix_store or store)
    check_store(config.prefix_store)
    template = _template_arguments(chat_template_kwargs or "{}")
    sources = documents(inputs, encoding)
    _check_writable(store)
    log_from("warning")
    done, lost = 0, False
    with LLM(**{name: getattr(config, name) for name in config.model_fields_set}) as llm:
        if template and not getattr(llm.get_tokenizer(), "chat_template", None):
            raise ConfigError("--chat-template-kwargs: the model has no chat template")
        for source in sources:
            began, before = time.perf_counter(), _nodes(store)
            try:
                text = source.read().text.strip()
                given = text if plain else page_text(source.path, text)
                total, cached = _read(llm, given, template)
            except (DocumentError, EngineError, RequestError) as error:
                typer.echo(f"skipped {source.id}: {error}", err=True)
                _ = llm.info  # if a rank has died, waits until all are started again
                continue
            done += 1
            seconds = f"{time.perf_counter() - began:.1f} s"
            why = "" if _entitle(store, before, source.id) else _unkept(config, total, cached)
            lost |= why == _LOST
            typer.echo(f"{source.id}: {total} tokens, {cached} of them were there; {seconds}{why}")
        disk = llm.stats()["prefix_cache"]["disk"]
    typer.echo(f"{done} of {len(sources)} documents read; {store} holds {_held(disk)}")
    if disk["evictions"]:
        typer.echo(f"{disk['evictions']} were evicted: prefix_store_gb is too small", err=True)
    lost |= any(disk[name] for name in ("evictions", "failures", "no_room"))
    raise typer.Exit(0 if done == len(sources) and not lost else EXIT_SOME_FAILED)


def _held(disk: dict[str, int]) -> str:
    return f"{disk['entries']} prefixes, {disk['bytes'] / 2**20:.1f} MiB"


def _template_arguments(text: str) -> dict[str, Any]:
    """Read arguments of the chat template as a request's are read; `ConfigError` if wrong."""
    from pydantic import TypeAdapter, ValidationError

    from razor_dist.api.field_types import TemplateArguments

    try:
        found: dict[str, Any] = TypeAdapter(TemplateArguments).validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        reserved = problem["type"] == "value_error"
        said = problem["ctx"]["error"] if reserved else f"must be a JSON object, got {text}"
        raise ConfigError(f"--chat-template-kwargs {said}") from None
    return found


def _check_writable(store: Path) -> None:
    """Make the store's folder; `ConfigError` if that fails, or another process writes there."""
    from razor_dist.prefix.store import WriterLock

    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--store: cannot make the folder {store}: {error.strerror}") from None
    lock = WriterLock(store)
    lock.require()
    lock.release()


def _nodes(store: Path) -> set[Path]:
    from razor_dist.prefix.store import folders, node_folders

    return {path for folder in folders(store) for path in node_folders(folder)}


def _entitle(store: Path, before: set[Path], title: str) -> bool:
    """Name the store's new prefixes after a document; False if there are none."""
    from razor_dist.prefix.store import write_title

    new = _nodes(store) - before
    for path in new:
        try:
            write_title(path, title)
        except OSError as error:
            typer.echo(f"{title}: its name could not be written: {error.strerror}", err=True)
    return bool(new)


def _unkept(config: EngineConfig, total: int, cached: int) -> str:
    """Say why a document made no prefix: too short, already stored, or no room."""
    from razor_dist.prefix.tiers import least_new

    new, least = total - cached, least_new(total, config.page_size)
    if new >= least:
        return _LOST
    if total < least:
        return f"; not kept: prefixes are kept from {least} tokens on, shorter ones are read anew"
    if new <= 1:
        return ""
    return f"; not kept by itself: only {new} of its tokens are not there, fewer than {least}"


def page_text(path: str, text: str) -> str:
    """Return the beginning of the message in which the page sends a document."""
    return f"Document {json.dumps(Path(path).name, ensure_ascii=False)}:\n\n{text}\n\n"


def _read(llm: Any, text: str, template: dict[str, Any]) -> tuple[int, int]:
    """Prefill a text as the first message and save it; return its tokens and the cached ones."""
    from razor_dist.protocol.sampling_params import SamplingParams

    tokenizer, params = llm.get_tokenizer(), SamplingParams(max_tokens=1, temperature=0)
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        [output] = llm.chat(messages, params, use_tqdm=True, chat_template_kwargs=template)
    else:
        [output] = llm.generate(text, params, use_tqdm=True)
    while _is_saving(llm):
        time.sleep(0.05)
    return len(output.prompt_token_ids), output.num_cached_tokens


def _is_saving(llm: Any) -> bool:
    from razor_dist.frontend.client import EngineBusyError

    try:
        return bool(llm.stats()["prefix_cache"]["saving"])
    except EngineBusyError:  # it answers between two steps; if it has died, with another error
        return True
