"""The README's table of what ``corun bench run`` recorded: one for each directory of results."""

from collections.abc import Iterable
from pathlib import Path

from corun.bench import mode_names, summary
from corun.bench.results import Comparison, read_directory
from corun.bench.run_directory import PLAN_FILE

NOT_RUN = "not run"
NOTE_FILE = "note.txt"
"""What to know of a directory's runs, in sentences."""
_ARRIVALS = {"all": "all at once", "closed": "{} in flight", "poisson": "{} a second"}


def bench_tables(results: Path, link: str) -> str:
    """Markdown tables of the benchmarks in directories under `results`, in their order.

    link: what `results` is called in links.
    """
    lines: list[str] = []
    for plan in sorted(results.glob(f"*/{PLAN_FILE}")):
        lines += [*_table(plan.parent, f"{link}/{plan.parent.name}"), ""]
    lines.append(
        "Output tokens/s (share of plain vLLM), the faster run where a cell ran twice. Equal: of "
        "the requests that ran again in another order, how many kept every token and the bits of "
        "every logprob."
    )
    return "\n".join(lines)


def _table(directory: Path, link: str) -> list[str]:
    found = read_directory(directory)
    modes = sorted({m for g in found.groups for m in g.modes}, key=mode_names.order)
    first = found.runs[0]
    slots = {run.max_num_seqs for run in found.runs}
    title = (
        f"{first.model} shape, {first.settings['weights']} weights, vLLM {first.versions['vllm']} "
        f"on one {first.hardware['device']}; `max_num_seqs` {_words(sorted(slots))} "
        f"([records]({link})):"
    )
    lines = [title, "", _row(("in/out", "requests", "arrivals", *map(mode_names.label, modes)))]
    lines.append("|---" * (3 + len(modes)) + "|")
    for group in found.groups:
        for comparison in group.comparisons:
            rates = [_rate(comparison, mode) for mode in modes]
            count = len(next(iter(comparison.modes.values()))[0].requests)
            arrivals = _arrivals(group.load.arrivals)
            lines.append(_row((comparison.workload, f"{count}", arrivals, *rates)))
    verdicts = [
        summary.verdict(
            summary.joined(d for g in found.groups if (d := summary.determinism(g, mode)))
        )
        for mode in modes
    ]
    lines.append(_row(("", "", "equal", *verdicts)))
    if (note := directory / NOTE_FILE).exists():
        lines += ["", note.read_text().strip()]
    return lines


def _rate(comparison: Comparison, mode: str) -> str:
    if mode not in comparison.modes:
        return NOT_RUN
    rate = summary.mode_numbers(comparison.modes[mode]).highest
    plain = mode_names.plain_of(mode, comparison.modes)
    if plain is None:
        return f"{rate:,.0f}"
    return f"{rate:,.0f} ({rate / summary.mode_numbers(comparison.modes[plain]).highest:.2f})"


def _arrivals(name: str) -> str:
    kind, _, value = name.partition(":")
    return _ARRIVALS[kind].format(value)


def _words(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
