"""Typed reading of operator files ("corun-bench-operators/1") and step files ("…-steps/1")."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.bench import mode_names
from corun.bench.fields import Fields, is_number, read_json
from corun.bench.records import BESIDE

OPERATORS_FORMAT = "corun-bench-operators/1"
STEPS_FORMAT = "corun-bench-steps/1"
MATMUL = "matmul"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator at one shape: `rows` rows of n values (matmul: rows x k times k x n).

    k: None for operators that are not a matmul. Times in microseconds; batch_invariant_us is None
    where those kernels cannot run.
    """

    operator: str
    k: int | None
    n: int
    rows: int
    standard_us: float
    batch_invariant_us: float | None

    @property
    def ratio(self) -> float | None:
        """How many times as long the batch-invariant operator takes."""
        return self.batch_invariant_us / self.standard_us if self.batch_invariant_us else None


@dataclass(frozen=True, slots=True)
class OperatorFile:
    """Measured operators, where they were measured, and what was left out (notes)."""

    path: Path
    command: str
    date: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    operators: tuple[Operator, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One decode step of `rows` requests that hold `context` tokens each (or as the text says).

    by_type: microseconds of each operator type. total_us: the whole step, gaps included.
    """

    mode: str
    rows: int
    context: str
    total_us: float
    by_type: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepTimeFile:
    """Measured decode steps of one model, where they were measured, and what failed (notes)."""

    path: Path
    model: str
    command: str
    date: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    steps: tuple[StepTime, ...]
    notes: tuple[str, ...]


def read_operators(path: Path) -> OperatorFile:
    """Read an operator file; RecordError where it is foreign or damaged."""
    return parse_operators(read_json(path), path)


def parse_operators(fields: Fields, path: Path) -> OperatorFile:
    """An operator file from its JSON."""
    fields.require_format(OPERATORS_FORMAT)
    return OperatorFile(
        path,
        fields.text("command"),
        fields.text("date"),
        fields.object("hardware"),
        fields.object("versions"),
        fields.items("operators", _operator),
        _left_out(fields),
    )


def read_step_times(path: Path) -> StepTimeFile:
    """Read a step file; RecordError where it is foreign or damaged."""
    return parse_step_times(read_json(path), path)


def parse_step_times(fields: Fields, path: Path) -> StepTimeFile:
    """A step file from its JSON."""
    fields.require_format(STEPS_FORMAT)
    return StepTimeFile(
        path,
        fields.text("model"),
        fields.text("command"),
        fields.text("date"),
        fields.object("hardware"),
        fields.object("versions"),
        fields.items("steps", _step_time),
        tuple(_step_notes(fields)),
    )


def _step_notes(fields: Fields) -> Iterator[str]:
    for mode, why in (fields.object("failed") if "failed" in fields.given else {}).items():
        yield f"{mode_names.label(mode)} could not run: {why}"
    beside = max((step.get(BESIDE, 0) for step in fields.given["steps"]), default=0)
    if beside:
        yield f"{beside + 1} engines were up together; they were measured one after the other"


def _left_out(fields: Fields) -> tuple[str, ...]:
    notes: list[str] = []
    if "notes" in fields.given:
        notes += fields.column("notes", lambda v: isinstance(v, str))
    if skipped := len(fields.given.get("skipped", ())):
        notes.append(f"{skipped} shapes were not measured: the time was up")
    return tuple(notes)


def _positive(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if not value:
        raise fields.bad(name, "more than 0")
    return value


def _operator(fields: Fields) -> Operator:
    name = fields.text("operator")
    return Operator(
        name,
        fields.count("k") if name == MATMUL else None,
        fields.count("n"),
        fields.count("rows"),
        _positive(fields, "standard_us"),
        None
        if fields.given.get("batch_invariant_us") is None
        else _positive(fields, "batch_invariant_us"),
    )


def _step_time(fields: Fields) -> StepTime:
    by_type = fields.object("by_type")
    if not by_type or not all(is_number(value) for value in by_type.values()):
        raise fields.bad("by_type", "microseconds by operator type")
    context = fields.given.get("context")
    if isinstance(context, bool) or not isinstance(context, int | str):
        raise fields.bad("context", "tokens, or a text")
    return StepTime(
        fields.text("mode"),
        fields.count("rows"),
        str(context),
        _positive(fields, "total_us"),
        {name: float(value) for name, value in by_type.items()},
    )
