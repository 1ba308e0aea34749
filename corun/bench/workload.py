"""The names of workloads and arrivals, as users write them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corun.bench.arrivals import Arrivals

WORKLOADS = "IN/OUT (such as 1024/128), burstgpt, burstgpt:FILE.csv, codeedit, sharegpt:FILE.json"
PAPER_GRIDS = ("1024/128", "4096/128", "1024/2048", "4096/2048")
"""The paper's synthetic workloads."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    name: as given, but a file by its last part, so that results name no machine's folders. n_in,
    n_out: tokens, of "grid". path: the file of "burstgpt-trace" and "sharegpt". model: the trace's
    rows of this model only.
    """

    name: str
    kind: Literal["grid", "burstgpt", "burstgpt-trace", "codeedit", "sharegpt"]
    n_in: int = 0
    n_out: int = 0
    path: Path | None = None
    model: str | None = None


def parse_workload(name: str) -> Workload:
    """The workload called `name`; a ValueError lists what there is.

    ``1024/128``: tokens in and out. ``burstgpt``: drawn from a fit. ``burstgpt:FILE.csv``: rows of
    the trace; ``burstgpt:FILE.csv@GPT-4``: of one model, which is what ``vllm bench`` reads.
    ``codeedit``: long in, long out, after Blazedit. ``sharegpt:FILE.json``: conversations.
    """
    name = name.strip()
    if name == "burstgpt":
        return Workload(name, "burstgpt")
    if name == "codeedit":
        return Workload(name, "codeedit")
    if re.fullmatch(r"[0-9]+/[0-9]+", name):
        n_in, n_out = map(int, name.split("/"))
        if min(n_in, n_out) < 1:
            raise ValueError(f"workload {name!r}: give at least 1 token in and 1 token out")
        return Workload(f"{n_in}/{n_out}", "grid", n_in, n_out)
    kind, _, file = name.partition(":")
    if kind == "burstgpt" and file:
        stem, cut, model = file.partition(".csv@")
        path = Path(stem + ".csv") if cut else Path(file)
        suffix = f"@{model}" if model else ""
        return Workload(
            f"burstgpt:{path.name}{suffix}", "burstgpt-trace", path=path, model=model or None
        )
    if kind == "sharegpt" and file:
        return Workload(f"sharegpt:{Path(file).name}", "sharegpt", path=Path(file))
    raise ValueError(f"unknown workload {name!r}; choose one of {WORKLOADS}")


def parse_arrivals(name: str) -> Arrivals:
    """The arrival process called `name`: ``all``, ``closed:32`` or ``poisson:4.0``."""
    kind, cut, text = name.strip().partition(":")
    if kind not in ("all", "closed", "poisson"):
        raise ValueError(f"unknown arrivals {name!r}; choose all, closed:N or poisson:RATE")
    try:
        value = float(text) if cut else None
    except ValueError:
        value = float("nan")
    return Arrivals(kind, value)  # type: ignore[arg-type]
