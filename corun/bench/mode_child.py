"""Runs modules in processes of their own, each as its mode needs it, with its engine inside it.

Several at once start at the same time and then take turns (``corun.bench.turns``).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corun.bench.mode_process import environment
from corun.bench.turns import POLL_S, Seat, done_file, first_undone, go_file, ready_file
from corun.commands.quiet import TORCH
from corun.jobs.files import write_json

QUIET = {**TORCH, "VLLM_LOGGING_LEVEL": "ERROR"}
"""Set where the user did not choose otherwise: a benchmark tells its numbers."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process: ``python -m module SPEC_FILE *arguments SEAT_FILE``.

    turns: the numbers of its turns, in order; those of all children that run together are 0, 1,
    and so on, each once.
    """

    module: str
    mode: str
    spec: dict[str, Any]
    turns: tuple[int, ...]
    arguments: tuple[str, ...] = ()


def run_children(children: Sequence[Child], timeout_s: float) -> list[str | None]:
    """Start all `children` at once and wait for their ends: why each failed, or None.

    timeout_s: what each may take, without the time in which it waits for others. None is left
    running, also where this is interrupted.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill, processes)
        for k in range(len(children)):
            processes.append(_start(children, k, directory))
        return _Watch(children, processes, directory, timeout_s).to_the_end()


def _start(children: Sequence[Child], k: int, directory: str) -> subprocess.Popen[bytes]:
    child = children[k]
    total = sum(len(c.turns) for c in children)
    spec_file, seat_file = (str(Path(directory, f"{name}-{k}.json")) for name in ("spec", "seat"))
    write_json(spec_file, child.spec)
    write_json(seat_file, asdict(Seat(directory, k, list(child.turns), total, os.getpid())))
    env = {**QUIET, **environment(child.mode), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", child.module, spec_file, *child.arguments, seat_file]
    return subprocess.Popen(command, env=env)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()  # nothing happens to one that has ended
    for process in processes:
        process.wait()


class _Watch:
    """The parent's side of the turns."""

    def __init__(
        self,
        children: Sequence[Child],
        processes: Sequence[subprocess.Popen[bytes]],
        directory: str,
        timeout_s: float,
    ) -> None:
        self._children, self._processes = children, processes
        self._directory, self._timeout_s = directory, timeout_s
        self._owner = {turn: k for k, child in enumerate(children) for turn in child.turns}
        assert sorted(self._owner) == list(range(sum(len(child.turns) for child in children)))
        self._running = list(range(len(children)))
        self._spent = [0.0] * len(children)
        self._failed: list[str | None] = [None] * len(children)
        self._turn = 0
        self._go = False

    def to_the_end(self) -> list[str | None]:
        """Why each child failed, or None, once all have ended."""
        before = time.monotonic()
        while self._running:
            time.sleep(POLL_S)
            now = time.monotonic()
            self._turn = first_undone(self._directory, self._turn, len(self._owner))
            for k in list(self._running):
                if not self._waits(k):
                    self._spent[k] += now - before
                if self._has_ended(k):
                    self._dismiss(k)
            if not self._go and all(self._is_ready(k) for k in self._running):
                go_file(self._directory).touch()
                self._go = True
            before = now
        return self._failed

    def _is_ready(self, k: int) -> bool:
        return ready_file(self._directory, k).exists()

    def _waits(self, k: int) -> bool:
        """Whether a child waits for other ones: to start, or to end their turns."""
        mine = self._owner.get(self._turn, k) == k  # all are theirs at the end, to close
        return self._is_ready(k) and not (self._go and mine)

    def _has_ended(self, k: int) -> bool:
        process = self._processes[k]
        status = process.poll()
        if status is None and self._spent[k] > self._timeout_s:
            process.kill()
            process.wait()
            self._failed[k] = f"it did not end within {self._timeout_s:.0f} s"
            return True
        if status:
            self._failed[k] = f"its process ended with status {status}, see above"
        return status is not None

    def _dismiss(self, k: int) -> None:
        """Nobody waits for a child that is gone."""
        self._running.remove(k)
        ready_file(self._directory, k).unlink(missing_ok=True)
        for turn in self._children[k].turns:
            done_file(self._directory, turn).touch()
