"""The tables of a report, as texts: see ``corun.bench.report``."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corun.bench import mode_names, summary
from corun.bench.metrics import Determinism, Stats
from corun.bench.records import Run
from corun.bench.results import Comparison, Group
from corun.bench.server_records import NUMBERS, ServerFile
from corun.bench.summary import ModeNumbers, mode_numbers

MISSING = "no run"
UNKNOWN = "not recorded"
_CLIENT_STATS = ("mean", "p50", "p99")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. kind: "" for a number, "name", "good", "bad", or "none" for what is missing."""

    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: what it shows, the heads of its columns, and its rows."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def throughput(group: Group) -> Table:
    """Output tokens/s by mode and workload, the time-weighted total, and its multiple of plain."""
    several = len(group.comparisons) > 1
    heads = ["mode", *(c.workload for c in group.comparisons)]
    heads += ["total", "of plain vLLM"] if several else ["of plain vLLM"]
    rows = []
    for mode in group.modes:
        cells = [_name(mode), *(_rate(c, mode) for c in group.comparisons)]
        total = summary.total(group, mode)
        if several:
            cells.append(Cell(f"{total:,.0f}") if total is not None else Cell(MISSING, "none"))
        multiple = summary.ratio(total, summary.plain_total(group, mode))
        cells.append(Cell(f"{multiple:.2f}×") if multiple is not None else Cell("–", "none"))
        rows.append(cells)
    return Table("Output tokens/s (slowest to fastest repeat)", heads, rows)


def determinism(group: Group) -> Table:
    """Requests that kept every bit when they ran in another order, by mode and workload."""
    heads = ["mode", *(c.workload for c in group.comparisons), "all"]
    rows = []
    for mode in group.modes:
        found = [
            mode_numbers(c.modes[mode]).determinism if mode in c.modes else None
            for c in group.comparisons
        ]
        missing = [mode not in c.modes for c in group.comparisons]
        cells = [
            Cell(MISSING, "none") if absent else _verdict(d)
            for d, absent in zip(found, missing, strict=True)
        ]
        rows.append([_name(mode), *cells, _verdict(summary.determinism(group, mode))])
    return Table("Requests whose tokens and logprobs were equal in every repeat", heads, rows)


def latency(comparison: Comparison) -> Table:
    """Time to first token and time per output token of one workload."""
    heads = ["mode", *(f"TTFT {p} (s)" for p in ("mean", "p50", "p90", "p99"))]
    heads += [f"TPOT {p} (ms)" for p in ("mean", "p50", "p90", "p99")]
    rows = []
    for mode, runs in comparison.modes.items():
        numbers = mode_numbers(runs)
        rows.append([_name(mode), *_stats(numbers.ttft, 1.0), *_stats(numbers.tpot, 1000.0)])
    return Table(f"Latency, {comparison.workload}", heads, rows)


def rows_and_memory(comparison: Comparison) -> Table:
    """What the engine did in one workload: time, tokens, padding, KV cache."""
    heads = ["mode", "repeats", "requests", "output tokens", "seconds", "padding, all rows"]
    heads += ["padding, decode steps", "KV mean", "KV peak", "start (s)", "outside the plan"]
    rows = [_row_use(mode_numbers(runs), runs) for runs in comparison.modes.values()]
    return Table(f"Rows and memory, {comparison.workload}", heads, rows)


def over_http(file: ServerFile) -> Table:
    """What vLLM's own client measured."""
    heads = ["mode", "workload", "arrivals", "output tokens/s", "requests/s"]
    heads += [f"{what} {which} (ms)" for what in ("TTFT", "TPOT") for which in _CLIENT_STATS]
    heads += ["texts as in the first run"]
    rows = []
    for run in file.runs:
        cells = [_name(run.mode), Cell(run.workload), Cell(run.arrivals)]
        cells += [Cell(f"{run.numbers[name]:,.2f}") for name in NUMBERS]
        rows.append([*cells, _texts(run.equal)])
    return Table(f"As vllm bench serve measured it: {file.model}", heads, rows)


def _texts(equal: tuple[int, int] | None) -> Cell:
    if equal is None:
        return Cell("–", "none")
    return Cell(f"{equal[0]:,} of {equal[1]:,}", "good" if equal[0] == equal[1] else "bad")


def facts(given: Mapping[str, object]) -> list[tuple[str, str]]:
    """Names and values of a JSON object as texts, in its order."""
    return [(name, text(value)) for name, value in given.items()]


def text(value: object) -> str:
    """A JSON value as people read it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(v)}" for name, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text(v) for v in value)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _name(mode: str) -> Cell:
    return Cell(mode_names.label(mode), "name")


def _rate(comparison: Comparison, mode: str) -> Cell:
    if mode not in comparison.modes:
        return Cell(MISSING, "none")
    numbers = mode_numbers(comparison.modes[mode])
    shown = f"{numbers.throughput:,.0f}"
    if numbers.repeats > 1:
        shown += f" ({numbers.lowest:,.0f} to {numbers.highest:,.0f})"
    return Cell(shown)


def _verdict(found: Determinism | None) -> Cell:
    if found is None:
        return Cell(summary.verdict(found), "none")
    proven = found.holds and found.orders > 1
    return Cell(summary.verdict(found), "good" if proven else "" if found.holds else "bad")


def _stats(found: Stats | None, scale: float) -> Iterable[Cell]:
    if found is None:
        return [Cell("–", "none")] * 4
    values = (found.mean, found.p50, found.p90, found.p99)
    return [Cell(f"{value * scale:,.2f}") for value in values]


def _share(value: float | None) -> Cell:
    return Cell(UNKNOWN, "none") if value is None else Cell(f"{value:.1%}")


def _row_use(numbers: ModeNumbers, runs: Sequence[Run]) -> list[Cell]:
    return [
        _name(numbers.mode),
        Cell(f"{numbers.repeats}"),
        Cell(f"{numbers.requests:,}"),
        Cell(f"{numbers.output_tokens:,}"),
        Cell(f"{numbers.seconds:,.1f}"),
        _share(numbers.padded),
        _share(numbers.padded_decode),
        _share(numbers.kv.mean if numbers.kv else None),
        _share(numbers.kv.peak if numbers.kv else None),
        Cell(f"{runs[0].start_s:,.0f}"),
        _violations(runs[0]),
    ]


def _violations(run: Run) -> Cell:
    count = None if run.report is None else run.report.get("violation_count")
    if count is None:
        return Cell("–", "none")
    return Cell(f"{count:,} steps", "bad" if count else "good")
