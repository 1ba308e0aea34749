"""Which groups of runs are points of a sweep, and the sweeps that they make."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from corun.bench import mode_names, records
from corun.bench.records import Run
from corun.bench.results import Comparison, Group

Points = dict[str, dict[int, tuple[Run, ...]]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One workload at several values of one quantity.

    slots: how many requests the engine had room for, in words. points: mode -> value -> repeats,
    in order.
    """

    model: str
    workload: str
    slots: str
    points: Mapping[str, Mapping[int, tuple[Run, ...]]]


def main_groups(groups: Iterable[Group]) -> list[Group]:
    """The groups without what is only a point of a sweep.

    That is a closed loop where the same model ran the same workload with more requests in flight,
    and one of a single request that also ran with other numbers of slots.
    """
    every = list(groups)
    closed = _closed(every)
    found = []
    for g in every:
        kept = tuple(c for c in g.comparisons if not any(_covers(other, c) for other in closed))
        if kept:
            found.append(Group(g.load, kept))
    return found


def _covers(other: Comparison, one: Comparison) -> bool:
    mine, its = one.load, other.load
    if (one.workload, mine.model, mine.kind) != (other.workload, its.model, "closed"):
        return False
    if its.concurrency == mine.concurrency == 1:
        return its.max_num_seqs != mine.max_num_seqs
    return its.concurrency > mine.concurrency


def concurrency_sweeps(groups: Iterable[Group]) -> list[Sweep]:
    """Closed loops of one workload, the modes that ran it at two or more concurrencies (Fig. 11).

    Runs where max_num_seqs is the concurrency, and runs where it stays, are separate sweeps: a
    padded decode costs as many rows as there are slots.
    """
    found: dict[tuple[str, str, str], Points] = {}
    for c in _closed(groups):
        n, slots = c.load.concurrency, c.load.max_num_seqs
        names = [f"max_num_seqs = {slots}"]
        if n == slots:
            names.append("max_num_seqs = concurrency")
        for name in names:
            _add(found.setdefault((c.load.model, c.workload, name), {}), n, c)
    sweeps = []
    for key, points in found.items():
        lines = {mode: values for mode, values in points.items() if len(values) > 1}
        if lines:
            sweeps.append(Sweep(*key, _ordered(lines)))
    return sweeps


def padding_sweeps(groups: Iterable[Group]) -> list[Sweep]:
    """One active request while max_num_seqs, and with it the padding, varies (Fig. 12)."""
    found: dict[tuple[str, str, str], Points] = {}
    for c in _closed(groups):
        if c.load.concurrency == 1:
            # Only runs of one request set can share the axis.
            digest = next(iter(c.modes.values()))[0].requests_digest
            key = (c.load.model, c.workload, digest)
            _add(found.setdefault(key, {}), c.load.max_num_seqs, c)
    sweeps = []
    for (model, workload, _), points in found.items():
        if _longest(points) > 1:
            by_size = [runs for sizes in points.values() for runs in sizes.values()]
            records.require_comparable([run for runs in by_size for run in runs])
            sweeps.append(Sweep(model, workload, "one active request", _ordered(points)))
    return sweeps


def _closed(groups: Iterable[Group]) -> list[Comparison]:
    return [c for g in groups if g.load.kind == "closed" for c in g.comparisons]


def _add(points: Points, value: int, comparison: Comparison) -> None:
    for mode, runs in comparison.modes.items():
        points.setdefault(mode, {})[value] = runs


def _longest(points: Points) -> int:
    return max(len(values) for values in points.values())


def _ordered(points: Points) -> Points:
    return {m: dict(sorted(points[m].items())) for m in sorted(points, key=mode_names.order)}
