"""Runs a module in a process of its own, as one mode needs it, with its engine in that process."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from corun.bench.mode_process import environment
from corun.commands.quiet import TORCH
from corun.jobs.files import write_json

QUIET = {**TORCH, "VLLM_LOGGING_LEVEL": "ERROR"}
"""Set where the user did not choose otherwise: a benchmark tells its numbers."""


def run_child(
    module: str, mode: str, spec: dict[str, Any], timeout_s: float, *arguments: str
) -> None:
    """Run `module` with the path of a file that holds `spec`, then `arguments`.

    RuntimeError where it ends badly or not within `timeout_s`.
    """
    env = {**QUIET, **environment(mode), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "spec.json")
        write_json(file, spec)
        command = [sys.executable, "-m", module, str(file), *arguments]
        try:
            subprocess.run(command, env=env, timeout=timeout_s, check=True)
        except subprocess.CalledProcessError as e:
            raise RuntimeError(f"its process ended with status {e.returncode}, see above") from e
        except subprocess.TimeoutExpired as e:
            raise RuntimeError(f"it did not end within {timeout_s:.0f} s") from e
