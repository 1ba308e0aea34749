"""The line before a command that loads an engine goes silent."""

import sys


def say_starting(command: str, *, shown: bool = True) -> None:
    """Say on stderr that `command` starts an engine now. shown: whether it shows progress."""
    if shown:
        text = "starting the engine (this takes about a minute) ..."
        print(f"corun {command}: {text}", file=sys.stderr, flush=True)
