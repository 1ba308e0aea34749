"""Files that are either whole or absent, also after a crash."""

import json
import os
from pathlib import Path
from typing import Any


def sync_directory(directory: Path) -> None:
    """Make a rename or a new file in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, temporary: Path) -> None:
    """Move the finished, synced `temporary` file over `path` in one step, durably."""
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 2) -> None:
    """Write `value` to `path` as JSON, all of it or nothing. indent: None for one line."""
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    text = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    replace_file(target, temporary)
