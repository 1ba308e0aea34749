"""Fig. 8, output throughput of every mode and workload, and Fig. 13, the ablation: bars."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from corun.bench import metrics, mode_names, summary
from corun.bench.figures import style
from corun.bench.records import Run
from corun.bench.results import Group

TOTAL = "Total"
_FILL = 0.86
"""Share of the room of a workload that its bars take."""


def draw(group: Group, modes: Sequence[str] | None = None) -> Figure:
    """Bars in output tokens/s for each workload, and the paper's time-weighted total.

    modes: which to draw; default all. Over each bar stands its multiple of plain vLLM; a line spans
    the slowest and the fastest repeat. A mode that did not run a workload has no bar there, and
    none in the total.
    """
    chosen = list(modes or group.modes)
    places = _places(group)
    inches = max(5.5, 0.3 * len(chosen) * len(places) + 1.2)
    figure, axes = style.panels(1, 1, width=inches, height=3.2)
    ax, width = axes[0, 0], _FILL / len(chosen)
    for i, mode in enumerate(chosen):
        first = -_FILL / 2 + width * (i + 0.5)
        bars = [(x + first, runs[mode]) for x, (_, runs) in enumerate(places) if mode in runs]
        ax.bar(
            [x for x, _ in bars],
            [metrics.aggregate_throughput(runs) for _, runs in bars],
            width * 0.94,
            label=style.legend_label(mode, summary.determinism(group, mode)),
            **style.bar(mode),
        )
        for x, (_, runs) in enumerate(places):
            _annotate(ax, x + first, mode, runs, chosen)
    ax.set_xticks(range(len(places)), [name for name, _ in places])
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("output tokens/s")
    style.thousands(ax.yaxis)
    ax.set_xlim(-0.5, len(places) - 0.5)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.1)
    if places[-1][0] == TOTAL:
        ax.axvline(len(places) - 1.5, color=style.MUTED, linewidth=0.8)
    style.legend_above(figure, [ax], columns=2 if inches < 8 else 3)
    return figure


def _places(group: Group) -> list[tuple[str, Mapping[str, Sequence[Run]]]]:
    """Each place on the axis: its name, and the runs that each mode's bar sums up."""
    found: list[tuple[str, Mapping[str, Sequence[Run]]]] = [
        (c.workload, c.modes) for c in group.comparisons
    ]
    if len(found) > 1:
        found.append((TOTAL, {m: group.runs(m) for m in group.modes if group.complete(m)}))
    return found


def _annotate(
    ax: Axes, x: float, mode: str, runs: Mapping[str, Sequence[Run]], chosen: Sequence[str]
) -> None:
    """The multiple of plain vLLM and the span of the repeats, or that there is no run."""
    if mode not in runs:
        _over(ax, x, 0, "no run", style.MUTED)
        return
    rate = metrics.aggregate_throughput(runs[mode])
    top = rate
    if len({run.workload for run in runs[mode]}) == 1 and len(runs[mode]) > 1:
        rates = [metrics.throughput(run) for run in runs[mode]]
        top = max(rates)
        ax.vlines(x, min(rates), top, color=style.INK, linewidth=1)
    plain = mode_names.plain_of(mode, [m for m in runs if m in chosen])
    if plain is not None and plain != mode:
        text = f"{rate / metrics.aggregate_throughput(runs[plain]):.2f}×"
        _over(ax, x, top, text, style.INK)


def _over(ax: Axes, x: float, top: float, text: str, color: str) -> None:
    ax.annotate(
        text, (x, top), (0, 3), textcoords="offset points", color=color,
        ha="center", va="bottom", fontsize=7, rotation=90,
    )  # fmt: skip


def ablations(group: Group) -> list[list[str]]:
    """The ablation's modes that ran, on each runner, where one of the steps between ran."""
    found = []
    for runner in sorted({mode_names.split(mode)[1] for mode in group.modes}):
        suffix = f"@{runner}" if runner else ""
        steps = [mode + suffix for mode in mode_names.ABLATION]
        present = [mode for mode in steps if mode in group.modes]
        if any(mode in present for mode in steps[1:-1]):
            found.append(present)
    return found
