"""What a reader must know beside the numbers: nondeterminism, and whatever is missing."""

from collections.abc import Iterator

from corun.bench import mode_names, summary
from corun.bench.mode_names import label
from corun.bench.records import BESIDE
from corun.bench.report_tables import text
from corun.bench.results import Group

FEW = 32
"""Below so many requests plain vLLM, too, may well keep every bit by chance."""


def of_group(group: Group) -> list[str]:
    """Sentences, the most serious first."""
    return [
        *_wrong(group),
        *_outside_plan(group),
        *_unchecked(group),
        *_asked(group),
        *_missing(group),
        *_beside(group),
        *_unlike(group),
    ]


def wrong_modes(group: Group) -> list[str]:
    """The modes of which some request changed a bit from one repeat to another."""
    found = {mode: summary.determinism(group, mode) for mode in group.modes}
    return [mode for mode, d in found.items() if d is not None and not d.holds]


def _start(mode: str) -> str:
    """A mode's name at the start of a sentence."""
    name = label(mode)
    return name[0].upper() + name[1:]


def _wrong(group: Group) -> Iterator[str]:
    for mode in wrong_modes(group):
        found = summary.determinism(group, mode)
        assert found is not None
        order = "in another order" if found.orders > 1 else "again"
        yield (
            f"{_start(mode)} is not deterministic: {found.equal:,} of {found.requests:,} requests "
            f"kept every bit when all of them ran {order}."
        )


def _outside_plan(group: Group) -> Iterator[str]:
    for mode in group.modes:
        counts = [run.report.get("violation_count", 0) for run in group.runs(mode) if run.report]
        if any(counts):
            yield f"{_start(mode)} ran {sum(counts):,} steps outside its plan."


def _unchecked(group: Group) -> Iterator[str]:
    for mode in group.modes:
        found = summary.determinism(group, mode)
        if found is None:
            yield f"{_start(mode)} ran once: whether its outputs keep their bits was not checked."
        elif found.orders < 2:
            yield f"{_start(mode)} was repeated in the same order only, which proves little."
        elif found.holds and found.requests < FEW:
            yield (
                f"Of {label(mode)} only {found.requests:,} requests were compared: equal here does "
                "not mean deterministic."
            )


def _asked(group: Group) -> Iterator[str]:
    settings = [run.settings for mode in group.modes for run in group.runs(mode)]
    if any(found.get("seeded") is False for found in settings):
        yield (
            "Requests had no seeds: plain vLLM then draws other tokens every time, whatever its "
            "kernels do."
        )
    if any(found.get("logprobs") is False for found in settings):
        yield "No logprobs were returned: equal means equal tokens."


def _missing(group: Group) -> Iterator[str]:
    if not any(mode_names.split(mode)[0] == mode_names.PLAIN for mode in group.modes):
        yield "Plain vLLM was not run: there is nothing to measure the other modes against."
    for mode in group.modes:
        absent = [c.workload for c in group.comparisons if mode not in c.modes]
        if absent:
            yield f"{_start(mode)} has no run of {', '.join(absent)}, and so no total."
        if any(run.steps is None for run in group.runs(mode)):
            yield f"{_start(mode)} did not record its steps: no padding, KV use or curve over time."
        elif all(summary.mode_numbers([run]).padded is None for run in group.runs(mode)):
            yield f"{_start(mode)} did not record the rows that it ran: its padding is not known."


def _beside(group: Group) -> Iterator[str]:
    """Runs that were made with other engines up, by how many. Older files do not say: none."""
    found: dict[int, list[str]] = {}
    for mode in group.modes:
        for count in sorted({run.settings.get(BESIDE, 0) for run in group.runs(mode)} - {0}):
            found.setdefault(count, []).append(label(mode))
    for count, modes in sorted(found.items()):
        engines = "one other engine was" if count == 1 else f"{count} other engines were"
        yield f"While {', '.join(modes)} ran, {engines} up beside it, idle."


def _unlike(group: Group) -> Iterator[str]:
    """Settings that are not required to be the same, where they are not."""
    told: dict[str, list[str]] = {}
    for comparison in group.comparisons:
        first = {mode: runs[0].settings for mode, runs in comparison.modes.items()}
        for name in sorted({name for settings in first.values() for name in settings} - {BESIDE}):
            by_value: dict[str, list[str]] = {}
            for mode, settings in first.items():
                by_value.setdefault(text(settings.get(name)), []).append(label(mode))
            if len(by_value) > 1:
                usual = max(by_value, key=lambda value: len(by_value[value]))
                parts = [
                    f"{value} in {', '.join(modes)}"
                    for value, modes in by_value.items()
                    if value != usual
                ]
                difference = f"{name} differs: {'; '.join(parts)}; {usual} in the others"
                told.setdefault(difference, []).append(comparison.workload)
    for difference, workloads in told.items():
        yield f"{difference} ({', '.join(workloads)})."
