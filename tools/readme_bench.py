"""Tables of what ``corun bench`` recorded: each directory of results in full, and all in short."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from table_lines import head, notes, row

from corun.bench import mode_names, summary
from corun.bench.operator_records import OperatorFile, StepTimeFile
from corun.bench.records import BESIDE, Run
from corun.bench.results import Comparison, Group, Results, read_directory
from corun.bench.server_records import ServerFile, ServerRun

NOT_RUN = "not run"
NOTE_FILE = "note.txt"
"""What to know of a directory's runs, in sentences."""
_ARRIVALS = {"all": "all at once", "closed": "{} in flight", "poisson": "{} a second"}
_IN_FULL_ONLY = ("nosplit", "nosplit+prefill")
"""The ablation's modes, which nobody would run a server with."""


def bench_tables(results: Path, link: str) -> str:
    """The benchmarks in directories under `results`, each under a heading of its name.

    A sweep's directory (``--sweep-rows``) is one benchmark. link: what `results` is called in
    links. RecordError where a directory holds none, or files that do not belong together.
    """
    lines: list[str] = []
    for directory in _directories(results):
        found = read_directory(directory)
        lines += [f"### {directory.name}", ""]
        if found.runs:
            lines += [*_runs(found, f"{link}/{directory.name}"), ""]
        if (note := directory / NOTE_FILE).exists():
            lines += [note.read_text().strip(), ""]
        for file in found.operators:
            lines += [*_operators(file, f"{link}/{file.path.relative_to(results)}"), ""]
        for steps in found.step_times:
            lines += [*_steps(steps, f"{link}/{steps.path.relative_to(results)}"), ""]
        for served in found.servers:
            lines += [*_served(served, f"{link}/{served.path.relative_to(results)}"), ""]
    return "\n".join(lines).rstrip()


def bench_summary(results: Path, page: str) -> str:
    """A line for each of them: of each mode the range of its share of plain vLLM, and its bits.

    page: the document that holds their ``bench_tables``.
    """
    every = {d.name: read_directory(d) for d in _directories(results)}
    # A share needs plain vLLM beside the others; a sweep of padding rows has none.
    measured = {n: f for n, f in every.items() if mode_names.PLAIN in _modes(f.groups)}
    modes = _modes(g for found in measured.values() for g in found.groups)
    modes = [m for m in modes if mode_names.split(m)[0] not in _IN_FULL_ONLY]
    heads = ("model shape", "`max_num_seqs`", "cells", *map(mode_names.label, modes))
    lines = head(*heads)
    for name, found in measured.items():
        beside = max(run.settings.get(BESIDE, 0) for run in found.runs)
        together = f", {beside + 1} engines up" if beside else ""
        slots = [run.max_num_seqs for run in found.runs]
        cells = (
            f"[{found.runs[0].model}]({page}#{name}){together}",
            _range([f"{min(slots)}", f"{max(slots)}"]),
            f"{sum(len(g.comparisons) for g in found.groups)}",
            *(_in_short(found, mode) for mode in modes),
        )
        lines.append(row(cells))
    where = dict.fromkeys(_where(run) for found in measured.values() for run in found.runs)
    lines += ["", f"Measured with {'; '.join(where)}."]
    if any(run.settings.get(BESIDE) for found in measured.values() for run in found.runs):
        lines.append("Engines up: all of them were started, and measured one at a time.")
    return "\n".join(lines)


def _directories(results: Path) -> list[Path]:
    return sorted(path for path in results.iterdir() if path.is_dir())


def _modes(groups: Iterable[Group]) -> list[str]:
    return sorted({m for g in groups for m in g.modes}, key=mode_names.order)


def _where(run: Run) -> str:
    weights, vllm = run.settings["weights"], run.versions["vllm"]
    return f"{weights} weights, vLLM {vllm} on one {run.hardware['device']}"


def _runs(found: Results, link: str) -> list[str]:
    """Every cell of a benchmark, its repeated requests, and where it ran."""
    modes = _modes(found.groups)
    slots = sorted({run.max_num_seqs for run in found.runs})
    first = found.runs[0]
    title = f"{first.model} shape, {_where(first)}"
    if len(slots) == 1:
        title += f"; `max_num_seqs` {slots[0]}"
    swept = ["`max_num_seqs`"] if len(slots) > 1 else []
    lines = [f"{title} ([records]({link})):", ""]
    lines += head("in/out", "requests", "arrivals", *swept, *map(mode_names.label, modes))
    for group in found.groups:
        for comparison in group.comparisons:
            rates = [_rate(comparison, mode) for mode in modes]
            count = len(next(iter(comparison.modes.values()))[0].requests)
            load = [f"{group.load.max_num_seqs}"] if swept else []
            arrivals = _arrivals(group.load.arrivals)
            lines.append(row((comparison.workload, f"{count}", arrivals, *load, *rates)))
    verdicts = [summary.verdict(_determinism(found, mode)) for mode in modes]
    lines.append(row(("", "", *("" for _ in swept), "equal", *verdicts)))
    return lines


def _determinism(found: Results, mode: str) -> summary.Determinism | None:
    return summary.joined(d for g in found.groups if (d := summary.determinism(g, mode)))


def _share(comparison: Comparison, mode: str) -> float | None:
    """A mode's output tokens/s as a share of plain vLLM's; None where one of them did not run."""
    plain = mode_names.plain_of(mode, comparison.modes)
    if mode not in comparison.modes or plain is None:
        return None
    rates = [summary.mode_numbers(comparison.modes[m]).highest for m in (mode, plain)]
    return rates[0] / rates[1]


def _rate(comparison: Comparison, mode: str) -> str:
    if mode not in comparison.modes:
        return NOT_RUN
    rate = f"{summary.mode_numbers(comparison.modes[mode]).highest:,.0f}"
    share = _share(comparison, mode)
    return rate if share is None else f"{rate} ({share:.2f})"


def _in_short(found: Results, mode: str) -> str:
    """The range of a mode's share, in how many cells where it did not run all, and its bits."""
    cells = [c for g in found.groups for c in g.comparisons]
    ran = [c for c in cells if mode in c.modes]
    if not ran:
        return NOT_RUN
    shares = [s for c in ran if (s := _share(c, mode)) is not None]
    parts = [_range([f"{min(shares):.2f}", f"{max(shares):.2f}"]) if shares else "no share"]
    if len(ran) < len(cells):
        parts.append(f"({len(ran)} of {len(cells)} cells)")
    return f"{' '.join(parts)}, {summary.verdict(_determinism(found, mode))}"


def _range(ends: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def _arrivals(name: str) -> str:
    kind, _, value = name.partition(":")
    return _ARRIVALS[kind].format(value)


def _operators(file: OperatorFile, link: str) -> Iterator[str]:
    """How many times as long the batch-invariant operators take: the range over all shapes."""
    yield f"Batch-invariant operators on one {file.hardware['device']} ([record]({link})):"
    yield ""
    yield from head("operator", "shapes", "times as long as the standard one", "longest at")
    for name in dict.fromkeys(o.operator for o in file.operators):
        known = [(o.ratio, o) for o in file.operators if o.operator == name and o.ratio]
        if not known:
            continue
        ratios = [ratio for ratio, _ in known]
        _, worst = max(known, key=lambda item: item[0])
        shape = f"{worst.rows} rows, " + (f"K {worst.k}, " if worst.k else "") + f"N {worst.n}"
        ends = _range([f"{min(ratios):.1f}", f"{max(ratios):.1f}"])
        yield row((name, f"{len(known)}", ends, shape))
    yield from notes(file.notes)


def _steps(file: StepTimeFile, link: str) -> Iterator[str]:
    """Milliseconds of whole decode steps; by operator type they are in the figures."""
    modes = sorted({step.mode for step in file.steps}, key=mode_names.order)
    yield f"Milliseconds of a decode step, {file.model} shape ([record]({link})):"
    yield ""
    yield from head("requests", "context", *map(mode_names.label, modes))
    for rows, context in dict.fromkeys((s.rows, s.context) for s in file.steps):
        took = {s.mode: s.total_us for s in file.steps if (s.rows, s.context) == (rows, context)}
        yield row((f"{rows}", context, *(_step(took, mode) for mode in modes)))
    yield from notes(file.notes)


def _step(took: dict[str, float], mode: str) -> str:
    if mode not in took:
        return NOT_RUN
    time = f"{took[mode] / 1000:.2f}"
    plain = mode_names.plain_of(mode, took)
    return time if plain is None else f"{time} ({took[mode] / took[plain]:.2f})"


def _served(file: ServerFile, link: str) -> Iterator[str]:
    """What vLLM's own client measured over HTTP."""
    yield (
        f"Over HTTP, {file.model} shape on one {file.hardware['device']}, as `vllm bench serve` "
        f"reports it ([record]({link})):"
    )
    yield ""
    times = ("mean TTFT, ms", "mean TPOT, ms")
    yield from head("in/out", "arrivals", "mode", "output tokens/s", *times, "same texts as before")
    plain = {
        (run.workload, run.arrivals): run.numbers["output_throughput"]
        for run in file.runs
        if run.mode == mode_names.PLAIN
    }
    for run in sorted(file.runs, key=lambda run: (run.workload, run.arrivals)):
        rate = run.numbers["output_throughput"]
        beside = plain.get((run.workload, run.arrivals))
        share = "" if beside is None else f" ({rate / beside:.2f})"
        numbers = (run.numbers[name] for name in ("mean_ttft_ms", "mean_tpot_ms"))
        yield row(
            (
                run.workload,
                _arrivals(run.arrivals),
                mode_names.label(run.mode),
                f"{rate:,.0f}{share}",
                *(f"{number:,.1f}" for number in numbers),
                _same_texts(run),
            )
        )
    yield from notes(file.notes)


def _same_texts(run: ServerRun) -> str:
    return "first run" if run.equal is None else f"{run.equal[0]} of {run.equal[1]}"
