"""The partial output of a job: what survives a kill, and what a resumed run goes on from.

``OUT.partial`` holds a header line, then one line per finished input line, in the order in which
they finished. Each is appended and synced before the next, so a kill loses at most the line being
written, which the next run cuts off. When every line is there they are written to ``OUT`` in input
order, in one step, and the partial file goes.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from corun.jobs.files import replace_file, sync_directory
from corun.jobs.records import encode

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Header:
    """What a partial output belongs to.

    job: what must be equal for a run to go on from it, by name (input, model, policy, ...).
    base_seed: the seed that the seeds of unseeded lines derive from, drawn once for the job.
    domain: the domain's fingerprint; None without CoRun.
    """

    job: dict[str, Any]
    base_seed: int
    domain: str | None
    format: int = FORMAT


def partial_path(output: Path) -> Path:
    """Where the partial file of `output` is."""
    return output.with_name(output.name + ".partial")


class Partial:
    """The partial output at `path`, held by this process alone until ``close``.

    header is None where there is nothing to go on from. done: the input lines that are finished.
    ValueError: another process holds it, or its content is not what this module writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header | None = None
        self._places: dict[int, tuple[int, int]] = {}
        self._file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another corun generate is writing {path}") from None
        try:
            self._read()
        except ValueError:
            self._file.close()
            raise

    @property
    def done(self) -> set[int]:
        """Indices (from 0) of the finished input lines."""
        return set(self._places)

    def _read(self) -> None:
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # torn by a kill
            try:
                value = json.loads(line)
                if number == 1:
                    if value["format"] != FORMAT:
                        raise ValueError("another version of CoRun wrote it")
                    self.header = Header(**value)
                else:
                    self._places[int(value["index"])] = (end, len(line))
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(
                    f"{self.path}, line {number}, is damaged ({type(e).__name__}: {e}); "
                    "start again with --overwrite"
                ) from None
            end += len(line)
        self._file.truncate(end)
        self._file.seek(end)

    def clear(self) -> None:
        """Forget everything in it."""
        self._file.seek(0)
        self._file.truncate()
        self.header = None
        self._places = {}

    def begin(self, header: Header) -> None:
        """Start an empty partial output."""
        assert self.header is None
        self.clear()
        self._write(encode(asdict(header)))
        sync_directory(self.path.parent)
        self.header = header

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Save finished records. On return they survive a kill and a power cut."""
        place = self._file.tell()
        lines = [encode(record) for record in records]
        self._write(b"".join(lines))
        for record, line in zip(records, lines, strict=True):
            self._places[record["index"]] = (place, len(line))
            place += len(line)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def records(self) -> Iterator[dict[str, Any]]:
        """Every finished record, in input order."""
        for _, line in self._lines():
            yield json.loads(line)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        end = self._file.tell()
        try:
            for index in sorted(self._places):
                start, length = self._places[index]
                self._file.seek(start)
                yield index, self._file.read(length)
        finally:
            self._file.seek(end)

    def finish(self, output: Path) -> None:
        """Write `output`, whole and in input order, then remove the partial file."""
        assert self._places.keys() == set(range(len(self._places)))
        temporary = output.with_name(output.name + ".tmp")
        with temporary.open("wb") as f:
            for _, line in self._lines():
                f.write(line)
            f.flush()
            os.fsync(f.fileno())
        replace_file(output, temporary)
        self.path.unlink()
        sync_directory(self.path.parent)

    def is_in(self, output: Path) -> bool:
        """Whether `output` is what ``finish`` makes of this, so that nothing is lost with it."""
        if self.header is None or self._places.keys() != set(range(len(self._places))):
            return False
        with output.open("rb") as f:
            return all(f.read(len(line)) == line for _, line in self._lines()) and not f.read(1)

    def discard_if_empty(self) -> None:
        """Remove the file where nothing was saved in it."""
        if self.header is None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


def check_absent(output: Path) -> None:
    """ValueError where there is an output already."""
    if output.exists():
        raise ValueError(f"{output} exists; --overwrite replaces it, another -o keeps it")


def remove_leftover(output: Path) -> None:
    """Remove the partial file that a run left behind which was killed when `output` was written.

    What another process holds, or holds anything else, stays.
    """
    path = partial_path(output)
    if not path.exists():
        return
    try:
        partial = Partial(path)
    except ValueError:
        return
    try:
        if partial.is_in(output):
            path.unlink()
    finally:
        partial.close()


def difference(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """What of `wanted` differs from the `saved` job, in words; None if nothing.

    Where both hold settings by name, the settings that differ are named, with their values.
    """
    parts = []
    for name in sorted(k for k in {*saved, *wanted} if saved.get(k) != wanted.get(k)):
        before, now = saved.get(name), wanted.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            inner = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
            told = (f"{k} is {now.get(k)!r}, was {before.get(k)!r}" for k in inner)
            parts.append(f"{name}: {'; '.join(told)}")
        else:
            parts.append(name)
    return ", ".join(parts) or None
