"""A job's results on disk: JSONL files that survive whatever ends the job.

A folder holds

- ``job.json``: the settings that decide the results, with their hash, written once;
- ``results.jsonl``: one line for each finished item, as soon as it is finished. A line is written
  at once and synced before the next; a last line that was torn by a crash is dropped when the file
  is opened again, and its item is missing like any other;
- ``parts.jsonl``: as long as there are items in work, what is done of them, in lines of ``id`` (the
  item's), ``part``, ``result`` and ``settings``, written like those;
- ``lock``: held by the one process that may write.

A line of the results is a JSON object with

==============  =====================================================================
``id``          the item's
``status``      ``done`` or ``failed``
``result``      the task's; null if it failed
``error``       ``{"type", "message"}`` if it failed; null otherwise
``settings``    the hash in ``job.json``
``run``         how it went this time, which no other run need repeat: ``seconds``,
                ``attempts``, ``engine`` (a number), ``finished`` (UTC, ISO 8601)
==============  =====================================================================
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from filelock import FileLock, Timeout

from razor_dist.config.errors import ConfigError
from razor_dist.files import replacing, sync_folder
from razor_dist.jobs.task import settings_hash

HEADER, RESULTS, PARTS, LOCK = "job.json", "results.jsonl", "parts.jsonl", "lock"
_FORMAT = 1

Record = dict[str, Any]


class Job(NamedTuple):
    """A job's settings and records."""

    settings: dict[str, Any]
    records: list[Record]


def read_job(folder: str | Path) -> Job:
    """A job's settings and the results so far; another process may be writing more.

    Raises
    ------
    ConfigError
        If the folder holds no job, or its files are damaged.
    """
    folder = Path(folder)
    header = _read_header(folder)
    if header is None:
        raise ConfigError(f"{folder} holds no results of a job: there is no {HEADER} in it")
    records, _ = _read_records(folder / RESULTS, header["hash"])
    return Job(header["settings"], records)


class _Lines:
    """A file of records, the last of which is whole whenever the process or the machine ends."""

    def __init__(self, path: Path, settings_hash: str) -> None:
        self.path, self._hash = path, settings_hash
        self.records, self._length = _read_records(path, settings_hash)
        self._file: int | None = None

    def open(self) -> int:
        """Open the file for writing, without a torn last line; make it if it is missing."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, self._length)
            sync_folder(self.path.parent)
        return self._file

    def append(self, record: Record) -> Record:
        """Add a record; it is on the disk when this returns.

        Raises
        ------
        OSError
            If it cannot be written; then nothing of it is in the file.
        """
        record = {**record, "settings": self._hash}
        line, file = json_line(record), self.open()
        length = os.fstat(file).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(file, line[written:])
            os.fsync(file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(file, length)
            raise
        self.records.append(record)
        return record

    def rewrite(self, records: Sequence[Record]) -> None:
        """Replace the records."""
        if records == self.records:
            return
        with replacing(self.path) as draft:
            draft.write_bytes(b"".join(map(json_line, records)))
        self.close()
        self.records, self._length = list(records), self.path.stat().st_size

    def close(self) -> None:
        """Close the file; `open` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ResultStore:
    """The results of one job, open for writing; a context manager.

    Build it with `open`.
    """

    def __init__(self, folder: Path, settings_hash: str, lock: FileLock) -> None:
        self.folder, self.settings_hash = folder, settings_hash
        self._lock = lock
        self._results = _Lines(folder / RESULTS, settings_hash)
        self._parts = _Lines(folder / PARTS, settings_hash)
        self._results.open()
        self._records: dict[str, Record] = {r["id"]: r for r in self._results.records}

    @classmethod
    def open(
        cls, folder: str | Path, settings: Mapping[str, Any], *, new_folder: bool = False
    ) -> Self:
        """Open a folder to continue the job in it, or to begin one.

        Parameters
        ----------
        folder : str or Path
            Made if missing.
        settings : mapping
            What decides the results: `razor_dist.jobs.task.job_settings`.
        new_folder : bool
            If the folder holds results of other settings, take ``FOLDER-2``, or the first of
            ``FOLDER-3``, ... that does not.

        Raises
        ------
        ConfigError
            If the folder holds results of other settings, or damaged ones; if another process
            writes to it; if it cannot be written.
        """
        folder = Path(folder)
        candidate = folder
        for number in itertools.count(2):
            differences = _differences(candidate, settings)
            if not differences or not new_folder:
                break
            candidate = folder.with_name(f"{folder.name}-{number}")
        if differences:
            raise ConfigError(
                f"{folder} holds results of other settings ({'; '.join(differences)}); "
                "name another folder, or ask for a new one (--new-folder)"
            )
        return cls._take(candidate, settings)

    @classmethod
    def _take(cls, folder: Path, settings: Mapping[str, Any]) -> Self:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"another process is writing results to {folder}") from None
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
        try:
            # Again, now that nobody else may write.
            name = settings_hash(settings)
            header = _read_header(folder)
            if header is None:
                header = {"format": _FORMAT, "hash": name, "settings": settings}
                text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
                with replacing(folder / HEADER) as draft:
                    draft.write_text(text, encoding="utf-8")
            elif header["hash"] != name:
                raise ConfigError(f"another process has begun another job in {folder}")
            return cls(folder, name, lock)
        except OSError as error:
            lock.release()
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
        except BaseException:
            lock.release()
            raise

    @property
    def records(self) -> Mapping[str, Record]:
        """The records by their items' ids, in the file's order."""
        return self._records

    def append(self, record: Record) -> None:
        """Add a record; it is on the disk when this returns, or none of it after an `OSError`."""
        assert record["id"] not in self._records, f"{record['id']} is there already"
        self._records[record["id"]] = self._results.append(record)

    def parts(self) -> dict[str, dict[str, Any]]:
        """The stored results of parts, by their items' ids and their keys."""
        found: dict[str, dict[str, Any]] = {}
        for part in self._parts.records:
            found.setdefault(part["id"], {})[part["part"]] = part["result"]
        return found

    def append_part(self, id: str, key: str, result: Mapping[str, Any]) -> None:
        """Add the result of a part of an item, like `append`."""
        self._parts.append({"id": id, "part": key, "result": dict(result)})

    def drop_failed(self) -> int:
        """Forget the failures, so that their items are missing; returns how many there were."""
        kept = [record for record in self._records.values() if record["status"] != "failed"]
        dropped = len(self._records) - len(kept)
        self._rewrite(kept)
        return dropped

    def finish(self, ids: Sequence[str]) -> None:
        """Order the results by ``ids``, those of other items last; drop parts nobody waits for."""
        order = {id: place for place, id in enumerate(ids)}
        self._rewrite(sorted(self._results.records, key=lambda r: order.get(r["id"], len(order))))
        done = {record["id"] for record in self._results.records if record["status"] == "done"}
        unfinished = order.keys() - done
        self._parts.rewrite([part for part in self._parts.records if part["id"] in unfinished])
        if not self._parts.records:
            self._parts.path.unlink(missing_ok=True)

    def _rewrite(self, records: Sequence[Record]) -> None:
        self._results.rewrite(records)
        self._records = {record["id"]: record for record in records}

    def close(self) -> None:
        """Let others write."""
        self._results.close()
        self._parts.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a file.

    Raises
    ------
    TypeError, ValueError
        If it is not JSON data, such as NaN or infinity.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        text = json.dumps(record, allow_nan=False).encode()
    return text + b"\n"


def _read_header(folder: Path) -> dict[str, Any] | None:
    """The content of ``job.json``; ``None`` for a folder that no job has been begun in."""
    path = folder / HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        if header["format"] != _FORMAT:
            raise ConfigError(
                f"{path} has format {header['format']!r}; this version knows {_FORMAT}"
            )
        if not isinstance(header["settings"], dict):
            raise TypeError
        if header["hash"] != settings_hash(header["settings"]):
            raise ConfigError(f"{path} was changed by hand: its hash is of other settings")
    except FileNotFoundError:
        if (folder / RESULTS).exists():
            raise ConfigError(
                f"{folder} has a {RESULTS}, but no {HEADER} that says of which settings"
            ) from None
        return None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is not a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a job's header") from None
    return dict(header)


def _read_records(path: Path, settings_hash: str) -> tuple[list[Record], int]:
    """The records, and the length of the file without a torn last line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    length = data.rfind(b"\n") + 1
    records: list[Record] = []
    seen: set[tuple[str, str | None]] = set()
    for number, line in enumerate(data[:length].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            name, settings = (record["id"], record.get("part")), record["settings"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"line {number} of {path} is not a record of a result") from None
        if settings != settings_hash:
            raise ConfigError(f"line {number} of {path} is of other settings than {HEADER}")
        if name in seen:
            raise ConfigError(f"line {number} of {path} is a second result of {name[0]!r}")
        seen.add(name)
        records.append(record)
    return records, length


def _differences(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """The differences from the settings of the job in a folder, in words; none if it is new."""
    header = _read_header(folder)
    if header is None:
        return []
    there, here = dict(_flat(header["settings"])), dict(_flat(settings))
    return [
        f"{name} is {_shown(there.get(name))} there and {_shown(here.get(name))} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as pairs of a dotted name and a value's JSON, which is what is hashed."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, ensure_ascii=False, sort_keys=True)


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= 60 else f"{value[:57]}..."
