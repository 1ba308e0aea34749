"""Cells of a benchmark: a workload, how its requests arrive, how many there are. Pure Python."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from corun.bench.workload import Workload, parse_arrivals, parse_workload

DEFAULT_WORKLOAD = "1024/128"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell; every mode runs it.

    arrivals: in its canonical form. count: requests. repeats: runs of it, each in another order.
    """

    workload: Workload
    arrivals: str
    count: int
    repeats: int

    @property
    def name(self) -> str:
        """Workload and arrivals: what tells it from the others of a benchmark."""
        return f"{self.workload.name} {self.arrivals}"


def cells(
    workloads: str | None, arrivals: str, count: int, repeats: int, singles: Sequence[str]
) -> tuple[Cell, ...]:
    """Every workload under every arrivals with `count` requests, and `singles` with their own.

    workloads, arrivals: with commas. singles: each "WORKLOAD ARRIVALS COUNT", or with
    "COUNTxREPEATS"; where there are some, `workloads` has no default. ValueError where one is there
    twice, or is not understood.
    """
    found = []
    if workloads or not singles:
        names = (workloads or DEFAULT_WORKLOAD).split(",")
        for workload, arrival in product(names, arrivals.split(",")):
            found.append(_cell(workload, arrival, f"{count}x{repeats}", repeats))
    for text in singles:
        parts = text.rsplit(maxsplit=2)
        if len(parts) != 3:
            raise ValueError(
                f"--cell {text!r} is not 'WORKLOAD ARRIVALS COUNT', as in '1024/128 closed:32 64'"
            )
        found.append(_cell(parts[0], parts[1], parts[2], repeats))
    names = [cell.name for cell in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{twice[0]!r} is asked for twice; give each workload and arrivals once")
    return tuple(found)


def _cell(workload: str, arrivals: str, numbers: str, repeats: int) -> Cell:
    count, cut, own = numbers.partition("x")
    for name, text in (("requests", count), *((("repeats", own),) if cut else ())):
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
            raise ValueError(f"a number of {name} must be 1 or more, not {text[:20]!r}")
    arrivals = parse_arrivals(arrivals).name
    return Cell(parse_workload(workload), arrivals, int(count), int(own) if cut else repeats)
