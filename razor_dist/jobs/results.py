"""A job's results on disk: JSONL files that survive whatever ends the job.

A folder holds

- ``job.json``: the settings that decide the results, with their hash, written once, or again if a
  job extends them (``extends`` of `ResultStore.open`); the earlier settings' hashes are
  ``earlier``;
- ``results.jsonl``: one line for each finished item, synced before the next is written. A last
  line that was torn by a crash is dropped when the file is opened again, so that its item is
  computed again;
- ``parts.jsonl``: finished parts of unfinished items, in lines of ``id`` (the item's), ``part``,
  ``result`` and ``settings``, written likewise, and dropped once their item is done;
- ``lock``: held by the one process that may write.

A line of the results is a JSON object with

==============  =====================================================================
``id``          the item's
``status``      ``done`` or ``failed``
``result``      the task's; null if it failed. With ``"retryable": true`` the next run computes it
                again
``error``       ``{"type", "message"}`` if it failed, and ``"retryable": true`` if the next run
                tries it again; null otherwise
``settings``    a hash in ``job.json``
``run``         this run's ``seconds``, ``attempts``, ``engine`` (a number) and
                ``finished`` (UTC, ISO 8601), which no other run need repeat
==============  =====================================================================
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from filelock import FileLock, Timeout

from razor_dist.config.errors import ConfigError
from razor_dist.files import replacing, sync_folder
from razor_dist.jobs.task import settings_hash

HEADER, RESULTS, PARTS, LOCK = "job.json", "results.jsonl", "parts.jsonl", "lock"
_FORMAT = 1
# Forgotten records of a file, of some hundred bytes each, until it is written anew without them.
_MOST_FORGOTTEN = 10_000

Record = dict[str, Any]
# Settings of a folder and a job's: whether the job has all of the folder's results, and more.
Extends: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


class Job(NamedTuple):
    settings: dict[str, Any]
    records: list[Record]


def read_job(folder: str | Path) -> Job:
    """Return settings and results so far; `ConfigError` without a job or with damaged files."""
    folder = Path(folder)
    header = _read_header(folder)
    if header is None:
        raise ConfigError(f"{folder} holds no results of a job: {HEADER} is missing")
    records, _ = _read_records(folder / RESULTS, _hashes(header))
    return Job(header["settings"], list(records.values()))


class _RecordFile:
    """A file of records, the last of which is whole whenever the process or the machine ends."""

    def __init__(self, path: Path, hashes: Sequence[str]) -> None:
        self.path, self._hash, self._forgotten = path, hashes[-1], 0
        self.records, length = _read_records(path, hashes)
        if path.exists():
            os.truncate(path, length)  # a torn last line

    def append(self, record: Record) -> None:
        record = {**record, "settings": self._hash}
        line, is_new = json_line(record), not self.path.exists()
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        length = os.fstat(file).st_size
        try:
            while line:
                line = line[os.write(file, line) :]
            os.fsync(file)
            if is_new:
                sync_folder(self.path.parent)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file, length)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"cannot write to {self.path}: {error.strerror}; what is done is kept: run it "
                    "again to continue"
                ) from None
            raise
        finally:
            os.close(file)
        self.records[_key(record)] = record

    def rewrite(self, records: Iterable[Record]) -> None:
        replaced = {_key(record): record for record in records}
        if self._forgotten or list(replaced.items()) != list(self.records.items()):
            with replacing(self.path) as draft:
                draft.write_bytes(b"".join(map(json_line, replaced.values())))
            self.records, self._forgotten = replaced, 0

    def forget(self, id: str) -> None:
        """Drop an item's records, from the file once that has many such ones."""
        kept = {key: record for key, record in self.records.items() if record["id"] != id}
        self._forgotten += len(self.records) - len(kept)
        self.records = kept
        if self._forgotten > max(_MOST_FORGOTTEN, len(kept)):
            self.rewrite(kept.values())


class ResultStore(contextlib.ExitStack):
    """The results of one job, open for writing; a context manager. Build it with `open`."""

    def __init__(self, folder: Path, hashes: Sequence[str], lock: FileLock) -> None:
        super().__init__()
        self.callback(lock.release)
        self.folder, self.settings_hash = folder, hashes[-1]
        self._results = _RecordFile(folder / RESULTS, hashes)
        self._parts = _RecordFile(folder / PARTS, hashes)
        self._results.path.touch()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        settings: Mapping[str, Any],
        *,
        new_folder: bool = False,
        extends: Extends = lambda there, here: False,
    ) -> Self:
        """Open a folder to continue the job of such settings in it, or to begin one.

        A folder of other settings is continued if ``extends`` says that the job with the settings
        has all of that job's results and more; the folder is then of these settings.
        If it holds results of other settings and a ``new_folder`` is asked for, take ``FOLDER-2``,
        or the first of ``FOLDER-3``, ... that does not.

        Raises `ConfigError` if the folder holds results of other settings, or damaged ones, if
        another process writes to it, or if it cannot be written.
        """
        folder = candidate = Path(folder)
        for number in itertools.count(2):
            header = _read_header(candidate)
            there = settings if header is None else header["settings"]
            if not (found := differences(there, settings)) or extends(there, settings):
                return cls._take(candidate, settings, there)
            if not new_folder:
                break
            place = Path(os.path.abspath(folder))  # "." has no name
            candidate = place.with_name(f"{place.name}-{number}")
        raise ConfigError(
            f"{folder} holds results of other settings ({'; '.join(found)}); "
            "name another folder, or ask for a new one (--new-folder)"
        )

    @classmethod
    def _take(cls, folder: Path, settings: Mapping[str, Any], there: Mapping[str, Any]) -> Self:
        lock = FileLock(folder / LOCK)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            # Looked at again, now that this process alone may write.
            name, header = settings_hash(settings), _read_header(folder)
            if header is not None and header["hash"] not in (name, settings_hash(there)):
                raise ConfigError(f"another process has begun another job in {folder}")
            if header is None or header["hash"] != name:
                earlier = [] if header is None else _hashes(header)
                header = {"format": _FORMAT, "hash": name, "settings": settings}
                header |= {"earlier": earlier} if earlier else {}
                text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
                with replacing(folder / HEADER) as draft:
                    draft.write_text(text, encoding="utf-8")
            return cls(folder, _hashes(header), lock)
        except BaseException as error:
            lock.release()
            if isinstance(error, Timeout):
                raise ConfigError(f"another process is writing results to {folder}") from None
            if isinstance(error, OSError):
                raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
            raise

    @property
    def records(self) -> Mapping[str, Record]:
        return self._results.records

    def append(self, record: Record) -> None:
        """Add a record and sync it; after an error no part of it is in the file."""
        assert record["id"] not in self.records, f"{record['id']} is there already"
        self._results.append(record)
        if record["status"] == "done":  # else a job of millions of items would take gigabytes
            self._parts.forget(record["id"])

    def parts(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for part in self._parts.records.values():
            found.setdefault(part["id"], {})[part["part"]] = part["result"]
        return found

    def append_part(self, id: str, key: str, result: Mapping[str, Any]) -> None:
        self._parts.append({"id": id, "part": key, "result": dict(result)})

    def drop_failed(self, *, retryable: bool = False) -> int:
        """Drop all failures, or with ``retryable`` only those that the next run retries by itself.

        Returns the number of records dropped; the next run computes their items.
        """
        before = len(self.records)
        self._results.rewrite(
            r
            for r in self.records.values()
            if not is_retryable(r) and (retryable or not has_failed(r))
        )
        return before - len(self.records)

    def finish(self, ids: Sequence[str]) -> None:
        """Order the results by ``ids``, other items' last; drop parts of finished items.

        Ids are ``name#digest``. Parts of a changed file, whose name is among ``ids`` with another
        digest, are dropped too. Other items' parts stay, for a later run to continue.
        """
        order = {id: place for place, id in enumerate(ids)}
        records = list(self.records.values())
        self._results.rewrite(sorted(records, key=lambda r: order.get(r["id"], len(order))))
        done = {r["id"] for r in records if r["status"] == "done"}
        names = set(map(_name, ids))
        self._parts.rewrite(
            part
            for part in self._parts.records.values()
            if part["id"] not in done and (part["id"] in order or _name(part["id"]) not in names)
        )
        if not self._parts.records:
            self._parts.path.unlink(missing_ok=True)


def _name(id: str) -> str:
    """Return an item's id without its digest."""
    return id.rpartition("#")[0] or id


def has_failed(record: Record) -> bool:
    return bool(record["status"] == "failed")


def is_retryable(record: Record) -> bool:
    """Return whether the next run tries a record's item again by itself."""
    return bool((record["error"] or record["result"] or {}).get("retryable"))


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line; `TypeError` or `ValueError` if it is not JSON data (NaN, ...)."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        text = json.dumps(record, allow_nan=False).encode()
    return text + b"\n"


def _key(record: Record) -> Any:
    return (record["id"], record["part"]) if "part" in record else record["id"]


def _read_header(folder: Path) -> dict[str, Any] | None:
    path = folder / HEADER
    try:
        header: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        format, name, expected = header["format"], header["hash"], settings_hash(header["settings"])
    except FileNotFoundError:
        for name in (RESULTS, PARTS):
            if (folder / name).exists():
                raise ConfigError(
                    f"{folder} has a {name}, but no {HEADER} that says of which settings"
                ) from None
        return None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is not a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a job's header") from None
    if format != _FORMAT:
        raise ConfigError(f"{path} has format {format!r}; this version knows {_FORMAT}")
    if name != expected:
        raise ConfigError(f"{path} was changed by hand: its hash is of other settings")
    return header


def _hashes(header: Mapping[str, Any]) -> list[str]:
    """Return the hashes that a folder's records may have, the settings' own last."""
    return [*header.get("earlier", ()), header["hash"]]


def _read_records(path: Path, hashes: Sequence[str]) -> tuple[dict[Any, Record], int]:
    """Return the records by `_key`, and the length of the file without a torn last line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    length = data.rfind(b"\n") + 1
    records: dict[Any, Record] = {}
    for number, line in enumerate(data[:length].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            key, settings = _key(record), record["settings"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"line {number} of {path} is not a record of a result") from None
        if settings not in hashes:
            raise ConfigError(f"line {number} of {path} is of other settings than {HEADER}")
        if key in records:
            raise ConfigError(f"line {number} of {path} is a second result of {record['id']!r}")
        records[key] = record
    return records, length


def differences(of_folder: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs from the folder's."""
    there, here = dict(_flat(of_folder)), dict(_flat(settings))
    return [
        f"{name} is {_shown(there.get(name))} there and {_shown(here.get(name))} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names, and values as JSON, which the hash covers."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, ensure_ascii=False, sort_keys=True)


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= 60 else f"{value[:57]}..."
