"""Every figure that a directory of results can give: serving, sweeps, then operators."""

import re
from collections.abc import Iterator
from dataclasses import replace

from corun.bench.figures import (
    latency,
    operators,
    over_time,
    step_times,
    style,
    sweep,
    throughput,
)
from corun.bench.figures.drawing import Drawing
from corun.bench.operator_records import OperatorFile, StepTimeFile
from corun.bench.results import Group, Load, Results
from corun.bench.sweeps import concurrency_sweeps, main_groups, padding_sweeps

SWEEPS = "Concurrency and padding"
OPERATORS = "Operators and decode steps"


def draw_all(results: Results) -> list[Drawing]:
    """The figures. What was not measured has none; no two have one file name."""
    with style.styled():
        found = [*_serving(results), *_sweeps(results), *_operators(results)]
        for drawing in found:
            style.lay_out(drawing.figure)
    seen: dict[str, int] = {}
    named = []
    for drawing in found:
        seen[drawing.stem] = count = seen.get(drawing.stem, 0) + 1
        stem = drawing.stem if count == 1 else f"{drawing.stem}-{count}"
        named.append(replace(drawing, stem=stem))
    return named


def _serving(results: Results) -> Iterator[Drawing]:
    for group in main_groups(results.groups):
        yield from _group(group)


def _sweeps(results: Results) -> Iterator[Drawing]:
    for found in concurrency_sweeps(results.groups):
        yield Drawing(
            SWEEPS,
            _stem("fig11-concurrency", found.model, found.workload, found.slots),
            "11",
            f"Throughput over concurrency: {found.model}, {found.workload}",
            f"A closed loop keeps so many requests in flight; {found.slots}.",
            sweep.draw_concurrency(found),
        )
    for found in padding_sweeps(results.groups):
        yield Drawing(
            SWEEPS,
            _stem("fig12-padding", found.model, found.workload),
            "12",
            f"The cost of padding: {found.model}, {found.workload}",
            "One request at a time, the worst case of a padded decode. A dashed level is a mode "
            "that was measured at one size.",
            sweep.draw_padding(found),
        )


def _operators(results: Results) -> Iterator[Drawing]:
    for steps in results.step_times:
        yield from _step_file(steps)
    for file in results.operators:
        yield from _operator_file(file)


def _step_file(file: StepTimeFile) -> Iterator[Drawing]:
    yield Drawing(
        OPERATORS,
        _stem("fig1b-decode-step", file.model),
        "1b",
        f"One decode step by operator type: {file.model}",
        "The number over a bar is the whole step in milliseconds.",
        step_times.draw_breakdown(file.steps),
    )
    yield Drawing(
        OPERATORS,
        _stem("fig4-operator-types", file.model),
        "4",
        f"Operator types of one decode step: {file.model}",
        "Time of each type, summed over all layers.",
        step_times.draw_by_type(file.steps),
    )


def _operator_file(file: OperatorFile) -> Iterator[Drawing]:
    over_rows = operators.draw_over_rows(file.operators)
    if over_rows is not None:
        yield Drawing(
            OPERATORS,
            "fig2a-operators",
            "2a",
            "Standard and batch-invariant operators",
            "Above each panel: the least and the greatest ratio of batch-invariant to standard.",
            over_rows,
        )
    matmul = operators.draw_matmul(file.operators)
    if matmul is not None:
        yield Drawing(
            OPERATORS,
            "fig2b-matmul",
            "2b",
            "Standard and batch-invariant matrix multiplication",
            "M rows times a K x N matrix. An empty cell was not measured.",
            matmul,
        )


def _group(group: Group) -> Iterator[Drawing]:
    load, section = group.load, described(group.load)
    yield Drawing(
        section,
        _stem("fig8-throughput", load.model, load.arrivals, str(load.max_num_seqs)),
        "8",
        "Output throughput",
        "Over a bar: the multiple of plain vLLM. Total: the time-weighted aggregate of the paper's "
        "Section V. The legend tells whether outputs kept their bits in another order.",
        throughput.draw(group),
    )
    for comparison in group.comparisons:
        figure = over_time.draw(comparison)
        if figure is not None:
            yield Drawing(
                section,
                _stem("fig9-over-time", load.model, comparison.workload, load.arrivals),
                "9",
                f"Throughput over time: {comparison.workload}",
                "The first repeat of each mode; a step's tokens are spread over its time.",
                figure,
            )
    yield Drawing(
        section,
        _stem("fig10-latency", load.model, load.arrivals, str(load.max_num_seqs)),
        "10",
        "Latency",
        "The share of requests at or below a time; all repeats together.",
        latency.draw(group),
    )
    for modes in throughput.ablations(group):
        yield Drawing(
            section,
            _stem("fig13-ablation", load.model, load.arrivals, str(load.max_num_seqs)),
            "13",
            "Ablation",
            "Each mode adds one constraint to the one before it. Over a bar: the multiple of plain "
            "vLLM.",
            throughput.draw(group, modes),
        )


def described(load: Load) -> str:
    """A load in words."""
    value = load.arrivals.partition(":")[2]
    arrivals = {
        "all": "all requests at once",
        "closed": f"{value} request{'s' * (value != '1')} in flight",
        "poisson": f"Poisson arrivals, {value} requests/s",
    }
    return f"{load.model}, {arrivals[load.kind]}, max_num_seqs {load.max_num_seqs}"


def _stem(*names: str) -> str:
    """A file name from names: lower case, and anything else than a-z, 0-9 as one dash."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")
