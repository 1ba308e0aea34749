"""A server in a process of its own: started on a free port, and gone when the block ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
STOP_S = 60.0
_SHOWN = 3000


class ServerError(RuntimeError):
    """The server did not start, or did not stay up; the message ends with its log's last lines."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. start_s: seconds until it did."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    start_s: float

    def get(self, path: str) -> Any:
        """The JSON at `path` (such as /v1/models). ServerError where there is none."""
        try:
            with _open(self.url + path, 30.0) as answer:
                return json.load(answer)
        except (OSError, ValueError) as e:
            raise ServerError(f"{path}: {e}; {_tail(self.log)}") from e

    def check(self) -> None:
        """ServerError where the server is gone."""
        if (status := self.process.poll()) is not None:
            raise ServerError(f"the server ended with status {status}; {_tail(self.log)}")


def free_port() -> int:
    """A port of this host that nothing listens on now."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, start_limit_s: float
) -> Iterator[Server]:
    """Start `command` with ``--host`` and ``--port``, wait until it answers; stop it at the end.

    The server and all that it starts are one process group, which does not survive the block, nor
    a SIGTERM to this process. ServerError where it ends or does not answer in `start_limit_s`.
    log: receives what it prints.
    """
    port = free_port()
    with _interrupted_by_sigterm(), log.open("wb") as stream:
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            url = f"http://{HOST}:{port}"
            _wait(process, url, log, started + start_limit_s)
            yield Server(process, url, log, time.monotonic() - started)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, gently first, and then everything that is left of its group.

    By SIGTERM: a program that a shell started in the background ignores SIGINT, and so do its
    children.
    """
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        print("the server did not stop when asked to; it is killed", file=sys.stderr)
    finally:
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, until: float) -> None:
    while time.monotonic() < until:
        if (status := process.poll()) is not None:
            raise ServerError(f"the server ended with status {status}; {_tail(log)}")
        try:
            _open(url + "/health", 2.0).close()
            return
        except OSError:
            time.sleep(0.3)
    raise ServerError(f"the server did not answer in time; {_tail(log)}")


def _open(url: str, timeout_s: float) -> Any:
    # A proxy of the environment is none of a local server's business.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(url, timeout=timeout_s)


def _tail(log: Path) -> str:
    return f"the end of its log:\n{log.read_text(errors='replace')[-_SHOWN:]}"


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: through every ``finally``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
