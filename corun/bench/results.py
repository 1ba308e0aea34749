"""A directory of recorded files, and which of its runs belong beside each other.

Runs are compared within a *comparison*: one workload under one load (model, arrivals and
max_num_seqs), answered by several modes. Comparisons of one load make a *group*.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corun.bench import mode_names, operator_records, records, server_records
from corun.bench.fields import RecordError, read_json
from corun.bench.operator_records import OperatorFile, StepTimeFile
from corun.bench.records import Run
from corun.bench.server_records import ServerFile
from corun.bench.workload import parse_arrivals

OTHER_FORMATS = ("corun-bench-plan/1", "corun-bench-requests/1", "corun-bench-summary/1")
"""Of files that may lie beside the results: what was asked, and what was made of the answers."""


@dataclass(frozen=True, slots=True)
class Load:
    """How a model was loaded: the arrivals, and the most requests that run at once."""

    model: str
    arrivals: str
    max_num_seqs: int

    @property
    def kind(self) -> str:
        """Of the arrivals: "all", "closed" or "poisson"."""
        return parse_arrivals(self.arrivals).kind

    @property
    def concurrency(self) -> int:
        """Requests that a closed loop keeps in flight; 0 for other arrivals."""
        return parse_arrivals(self.arrivals).concurrency if self.kind == "closed" else 0

    @property
    def strength(self) -> tuple[str, str, int, int]:
        """A sort key: within a model and a kind of arrivals, the heavier load comes later."""
        return self.model, self.kind, self.concurrency, self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload under one load: each mode's repeats, modes and repeats in order."""

    load: Load
    workload: str
    modes: Mapping[str, tuple[Run, ...]]


@dataclass(frozen=True, slots=True)
class Group:
    """All workloads that ran under one load, in order."""

    load: Load
    comparisons: tuple[Comparison, ...]

    @property
    def modes(self) -> list[str]:
        """Every mode that any of the comparisons has, in order."""
        return sorted({m for c in self.comparisons for m in c.modes}, key=mode_names.order)

    def runs(self, mode: str) -> list[Run]:
        """All runs of a mode."""
        return [run for c in self.comparisons for run in c.modes.get(mode, ())]

    def complete(self, mode: str) -> bool:
        """Whether the mode ran every workload, so that its total may stand beside others'."""
        return all(mode in c.modes for c in self.comparisons)


@dataclass(frozen=True, slots=True)
class Results:
    """Everything in a directory."""

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    operators: tuple[OperatorFile, ...]
    step_times: tuple[StepTimeFile, ...]
    servers: tuple[ServerFile, ...]


def read_directory(directory: Path) -> Results:
    """Read every ``*.json`` under `directory`.

    RecordError where a file is damaged or foreign, where runs are recorded twice, or where runs
    that would be compared come from different machines, versions, settings or request sets.
    """
    runs: list[Run] = []
    operators: list[OperatorFile] = []
    step_times: list[StepTimeFile] = []
    servers: list[ServerFile] = []
    for path in sorted(directory.rglob("*.json")):
        fields = read_json(path)
        match fields.given.get("format"):
            case records.FORMAT:
                runs.append(records.parse_run(fields, path))
            case operator_records.OPERATORS_FORMAT:
                operators.append(operator_records.parse_operators(fields, path))
            case operator_records.STEPS_FORMAT:
                step_times.append(operator_records.parse_step_times(fields, path))
            case server_records.FORMAT:
                servers.append(server_records.parse_server(fields, path))
            case format_ if format_ not in OTHER_FORMATS:
                raise RecordError(
                    f"{path} is no file of this version of 'corun bench' (format {format_!r}); "
                    "move it out of the directory"
                )
    if not (runs or operators or step_times or servers):
        raise RecordError(f"{directory} holds no results; make some with 'corun bench run'")
    return Results(tuple(runs), group(runs), tuple(operators), tuple(step_times), tuple(servers))


def group(runs: Sequence[Run]) -> tuple[Group, ...]:
    """The runs by load, workload, mode and repeat. RecordError as for ``read_directory``."""
    records.require_same_machine(runs)
    found: dict[Load, dict[str, dict[str, list[Run]]]] = {}
    for run in sorted(runs, key=lambda r: (mode_names.order(r.mode), r.repeat)):
        load = Load(run.model, run.arrivals, run.max_num_seqs)
        modes = found.setdefault(load, {}).setdefault(run.workload, defaultdict(list))
        if any(other.repeat == run.repeat for other in modes[run.mode]):
            first = modes[run.mode][-1].path
            raise RecordError(f"{run.path} and {first} record the same run; keep one of them")
        modes[run.mode].append(run)
    return tuple(
        Group(
            load,
            tuple(
                _comparison(load, workload, workloads[workload])
                for workload in sorted(workloads, key=mode_names.workload_order)
            ),
        )
        for load, workloads in sorted(found.items(), key=lambda item: item[0].strength)
    )


def _comparison(load: Load, workload: str, modes: Mapping[str, Sequence[Run]]) -> Comparison:
    records.require_comparable([run for repeats in modes.values() for run in repeats])
    return Comparison(load, workload, {mode: tuple(repeats) for mode, repeats in modes.items()})
