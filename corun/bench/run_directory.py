"""The directory of one ``corun bench run``: its plan, its request sets, a file for each run."""

import json
import shutil
from pathlib import Path
from typing import Any

from corun.bench.cells import Cell
from corun.bench.records import read_run
from corun.jobs.files import write_json

PLAN_FILE = "plan.json"


def run_file(mode: str, workload: str, arrivals: str, repeat: int) -> str:
    """The name of a run's file."""
    return f"run-{_plain('-'.join((workload, arrivals, mode, str(repeat))))}.json"


def requests_file(directory: Path, cell: Cell) -> Path:
    """Where a cell's request set is kept."""
    return directory / "requests" / f"{_plain(cell.workload.name)}-{cell.count}.json"


def claim(directory: Path, plan: dict[str, Any], *, fresh: bool) -> None:
    """Make `directory` this benchmark's. ValueError where it holds another's results."""
    file = directory / PLAN_FILE
    if fresh and file.exists():
        for path in directory.glob("run-*.json"):
            path.unlink()
        shutil.rmtree(directory / "requests", ignore_errors=True)
        file.unlink()
    elif file.exists():
        held = json.loads(file.read_text())
        asked = json.loads(json.dumps(plan))
        asked["requests"] = {**held.get("requests", {}), **asked["requests"]}
        changed = [
            name for name in {*held, *asked} - {"requests"} if held.get(name) != asked.get(name)
        ]
        changed += [c for c, d in held.get("requests", {}).items() if asked["requests"][c] != d]
        if changed:
            raise ValueError(
                f"{directory} holds results of another benchmark ({', '.join(sorted(changed))} "
                "differ); choose another --out, or --fresh to delete them"
            )
        plan = asked
    elif directory.exists() and any(directory.glob("run-*.json")):
        raise ValueError(f"{directory} holds runs without a {PLAN_FILE}; choose another --out")
    (directory / "requests").mkdir(parents=True, exist_ok=True)
    write_json(file, plan)


def is_kept(path: Path, digest: str) -> bool:
    """Whether a run's file is there, and of these requests. RecordError where it is damaged."""
    if not path.exists():
        return False
    return read_run(path).requests_digest == digest


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-.@+" else "_" for c in name)
