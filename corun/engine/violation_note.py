"""How a step outside the plan is told across processes: the worker leaves a note in a file.

vLLM brings no exception back from an engine in a process of its own; its front end learns only that
the engine is dead. ``expected`` names the file in the environment, which the engine's processes
inherit, and ``leave`` writes there. Ray's workers have another environment and leave no note.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_VARIABLE = "CORUN_VIOLATION_FILE"


def leave(message: str) -> None:
    """Write one line where somebody expects it."""
    if file := os.environ.get(FILE_VARIABLE):
        with open(file, "a", encoding="utf-8") as f:
            f.write(message + "\n")


@contextmanager
def expected() -> Iterator[Callable[[], str | None]]:
    """Gives a function that returns the first note left so far, or None."""
    before = os.environ.get(FILE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="corun-") as directory:
        file = Path(directory, "violation")
        os.environ[FILE_VARIABLE] = str(file)

        def read() -> str | None:
            notes = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            return notes[0] if notes else None

        try:
            yield read
        finally:
            if before is None:
                os.environ.pop(FILE_VARIABLE, None)
            else:
                os.environ[FILE_VARIABLE] = before
