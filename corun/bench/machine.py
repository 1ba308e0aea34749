"""What a benchmark ran on: recorded in every file, and compared before two files are."""

import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """The devices and the host, as JSON values that do not change from run to run."""
    import torch

    from corun.engine.domain import device_name

    found: dict[str, Any] = {"device": device_name(), "cpu": _cpu_model(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        found["devices"] = torch.cuda.device_count()
        found["device_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found


def versions() -> dict[str, Any]:
    """Versions of what computes, and of Python."""
    from corun.engine.domain import software

    return {**software(), "python": platform.python_version()}


def stamp() -> dict[str, Any]:
    """What every recorded file says of its origin: machine, versions, command and date."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "command": command(),
        "date": today(),
    }


def command() -> str:
    """This process's command line, as one could type it."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "corun.cli"] if name.endswith(".py") else [name]
    return shlex.join(program + sys.argv[1:])


def today() -> str:
    """The date, as 2026-11-30."""
    return time.strftime("%Y-%m-%d")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
