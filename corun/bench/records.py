"""Typed reading of run files ("corun-bench-run/1"): one file is one mode, workload and repeat."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from corun.bench.fields import Fields, RecordError, is_count, is_number, read_json
from corun.bench.workload import parse_arrivals

FORMAT = "corun-bench-run/1"
BESIDE = "engines_beside"
"""The setting that says how many other engines were up, and idle, on the same machine."""
SAME_SETTINGS = (
    "max_num_batched_tokens",
    "max_model_len",
    "dtype",
    "weights",
    "temperature",
    "seeded",
    "logprobs",
)
"""Settings that runs of different modes must share to be compared (where both state them)."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answered request. Times are seconds since the measured run began.

    n_in, n_out: tokens of the prompt and of the answer. digest: over the answer's token ids and the
    raw bits of its logprobs.
    """

    id: str
    n_in: int
    n_out: int
    arrival_s: float
    first_token_s: float
    finish_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class Steps:
    """Executed engine steps in order, as columns of equal length.

    end_s: seconds since the measured run began. prefill_tokens, decode_rows: scheduled tokens.
    rows_run: rows that were run, padding included; None where not known. running, waiting:
    requests. kv_used: share of the KV cache in use, 0 to 1.
    """

    end_s: tuple[float, ...]
    prefill_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    rows_run: tuple[int | None, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    kv_used: tuple[float, ...]

    def rows_used(self) -> list[int]:
        """Rows of each step that held a token."""
        return [p + d for p, d in zip(self.prefill_tokens, self.decode_rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run file. source: what the workload was made from.

    settings, hardware, versions, policy and report are as recorded.
    """

    path: Path
    mode: str
    workload: str
    source: str
    arrivals: str
    requests_digest: str
    order_seed: int
    repeat: int
    model: str
    command: str
    date: str
    settings: Mapping[str, Any]
    max_num_seqs: int
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    domain: str | None
    policy: Mapping[str, Any]
    start_s: float
    warmup_s: float
    wall_s: float
    requests: tuple[RequestRecord, ...]
    steps: Steps | None
    report: Mapping[str, Any] | None


def read_run(path: Path) -> Run:
    """Read a run file. RecordError where it is foreign, damaged, or contradicts itself."""
    return parse_run(read_json(path), path)


def parse_run(fields: Fields, path: Path) -> Run:
    """A run from the JSON of its file, see ``read_run``."""
    if fields.given.get("format") != FORMAT:
        found = fields.given.get("format")
        raise RecordError(f"{path} is no run file of this version: format {found!r}, not {FORMAT}")
    settings = fields.object("settings")
    run = Run(
        path=path,
        mode=fields.text("mode"),
        workload=fields.text("workload"),
        source=fields.text("source"),
        arrivals=_arrivals(fields),
        requests_digest=fields.text("requests_digest"),
        order_seed=fields.count("order_seed"),
        repeat=fields.count("repeat"),
        model=fields.text("model"),
        command=fields.text("command"),
        date=fields.text("date"),
        settings=settings,
        max_num_seqs=Fields(settings, f"{path}, settings,").count("max_num_seqs"),
        hardware=fields.object("hardware"),
        versions=fields.object("versions"),
        domain=fields.optional_text("domain"),
        policy=_optional_object(fields, "policy") or {},
        start_s=fields.number("start_s"),
        warmup_s=fields.number("warmup_s"),
        wall_s=fields.number("wall_s"),
        requests=fields.items("requests", _request),
        steps=_steps(fields),
        report=_optional_object(fields, "report"),
    )
    _check(run, fields.count("count"))
    return run


def require_same_machine(records: Sequence[Any]) -> None:
    """RecordError where `records` (with path, hardware, versions) come from different machines."""
    first = records[0] if records else None
    for other in records[1:]:
        for name in ("hardware", "versions"):
            _require_equal(first, other, name, getattr(first, name), getattr(other, name))


def require_comparable(runs: Sequence[Run]) -> None:
    """RecordError where `runs` did not answer the same requests, on one machine, alike."""
    require_same_machine(runs)
    for other in runs[1:]:
        first = runs[0]
        if other.requests_digest != first.requests_digest:
            raise RecordError(
                f"{other.path} and {first.path} cannot be compared: their request sets differ; "
                "run both modes again with the same workload, count and seed"
            )
        shared = [n for n in SAME_SETTINGS if n in first.settings and n in other.settings]
        a, b = ({name: run.settings[name] for name in shared} for run in (first, other))
        _require_equal(first, other, "settings", a, b)


def _require_equal(
    first: Any, other: Any, name: str, a: Mapping[str, Any], b: Mapping[str, Any]
) -> None:
    differing = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    if differing:
        details = "; ".join(f"{key} {a.get(key)!r} and {b.get(key)!r}" for key in differing)
        raise RecordError(
            f"{first.path} and {other.path} cannot be compared: {name} differ ({details}); "
            "keep them in separate directories"
        )


def _arrivals(fields: Fields) -> str:
    text = fields.text("arrivals")
    try:
        parse_arrivals(text)
    except ValueError as e:
        raise fields.bad("arrivals", "all, closed:N or poisson:RATE") from e
    return text


def _optional_object(fields: Fields, name: str) -> Mapping[str, Any] | None:
    return None if fields.given.get(name) is None else fields.object(name)


def _request(fields: Fields) -> RequestRecord:
    request = RequestRecord(
        id=fields.text("id"),
        n_in=fields.count("n_in"),
        n_out=fields.count("n_out"),
        arrival_s=fields.number("arrival_s"),
        first_token_s=fields.number("first_token_s"),
        finish_s=fields.number("finish_s"),
        digest=fields.text("digest"),
    )
    if request.n_out == 0:
        raise fields.bad("n_out", "1 or more")
    if not request.arrival_s <= request.first_token_s <= request.finish_s:
        raise fields.bad("first_token_s", "between arrival_s and finish_s")
    return request


def _steps(fields: Fields) -> Steps | None:
    if fields.given.get("steps") is None:
        return None
    inner = Fields(fields.object("steps"), f"{fields.where}, steps,")
    checks: dict[str, Callable[[Any], bool]] = {
        "end_s": is_number,
        "prefill_tokens": is_count,
        "decode_rows": is_count,
        "running": is_count,
        "waiting": is_count,
        "kv_used": lambda v: is_number(v) and v <= 1,
    }
    columns = {name: inner.column(name, fits) for name, fits in checks.items()}
    length = len(columns["end_s"])
    if inner.given.get("rows_run") is None:
        columns["rows_run"] = (None,) * length
    else:
        columns["rows_run"] = inner.column("rows_run", lambda v: v is None or is_count(v))
    for name, column in columns.items():
        if len(column) != length:
            raise inner.bad(name, f"a list of {length} values like end_s")
    return Steps(**columns)


def _check(run: Run, count: int) -> None:
    """What no run can be: its parts contradict each other."""

    def damaged(what: str) -> RecordError:
        return RecordError(f"{run.path} is damaged: {what}; delete it and run again")

    if len(run.requests) != count:
        raise damaged(f"it holds {len(run.requests)} requests and states {count}")
    if len({request.id for request in run.requests}) != count:
        raise damaged("a request is there twice")
    if not run.wall_s or run.wall_s < max(request.finish_s for request in run.requests):
        raise damaged("it ended before its last request")
    if run.steps is None:
        return
    if any(later < earlier for earlier, later in pairwise(run.steps.end_s)):
        raise damaged("its steps are not in the order of time")
    for rows, used in zip(run.steps.rows_run, run.steps.rows_used(), strict=True):
        if rows is not None and rows < used:
            raise damaged("a step ran fewer rows than were scheduled")
