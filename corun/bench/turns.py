"""Turns of processes that hold an engine each, of which only one may measure at a time.

The parent (``corun.bench.mode_child``) and its children speak through empty files in a directory of
theirs. ``ready-K``: child K's engine is up; the parent removes it when the child is gone. ``go``:
every child is ready or gone, so no engine starts any more. ``done-N``: turn N is over. Turns are
numbered through all children, and turn N begins when all turns before it are over. A child that
ends early leaves its turns undone; the parent then marks them, so that the others go on.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

POLL_S = 0.1
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Seat:
    """A child's place. child: which it is. turns: the numbers of its own, in order.

    total: turns of all children. parent: the parent's process id.
    """

    directory: str
    child: int
    turns: list[int]
    total: int
    parent: int


def rotated(items: Sequence[Item], by: int) -> tuple[Item, ...]:
    """`items` from another one on, so that none is always the first. by: any number of places."""
    start = by % len(items)
    return (*items[start:], *items[:start])


def ready_file(directory: str, child: int) -> Path:
    """There while a child's engine is up."""
    return Path(directory, f"ready-{child}")


def go_file(directory: str) -> Path:
    """There when no engine starts any more."""
    return Path(directory, "go")


def done_file(directory: str, turn: int) -> Path:
    """There when a turn is over."""
    return Path(directory, f"done-{turn}")


def first_undone(directory: str, start: int, total: int) -> int:
    """The first of the turns `start` to `total` - 1 that is not over; `total` if all are."""
    while start < total and done_file(directory, start).exists():
        start += 1
    return start


class Turns:
    """A child's view. Every wait ends the process where the parent is gone."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._undone = 0

    @classmethod
    def read(cls, seat_file: str) -> "Turns":
        """From the JSON of a Seat."""
        return cls(Seat(**json.loads(Path(seat_file).read_text())))

    def ready(self) -> None:
        """Tell that this process's engine is up, and wait until no other starts any more."""
        ready_file(self._seat.directory, self._seat.child).touch()
        while not go_file(self._seat.directory).exists():
            self._sleep()

    @contextmanager
    def take(self, index: int) -> Iterator[int]:
        """This process's turn number `index` (from 0): waits for it, and ends it after the block.

        Gives how many other engines are up, and idle. A block that raises leaves the turn to the
        parent, which ends it once this process is gone.
        """
        turn = self._seat.turns[index]
        self._wait_for(turn)
        yield len(list(Path(self._seat.directory).glob("ready-*"))) - 1
        done_file(self._seat.directory, turn).touch()

    def leave(self) -> None:
        """Wait until every turn is over: an engine that closes would disturb the others' runs."""
        self._wait_for(self._seat.total)

    def _wait_for(self, turn: int) -> None:
        while True:
            self._undone = first_undone(self._seat.directory, self._undone, turn)
            if self._undone == turn:
                return
            self._sleep()

    def _sleep(self) -> None:
        if os.getppid() != self._seat.parent:
            sys.exit("the benchmark that started this process is gone; it ends, too")
        time.sleep(POLL_S)
