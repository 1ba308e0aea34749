"""Fig. 10: cumulative distributions of the time to first token and the time per output token."""

from collections.abc import Callable, Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from corun.bench import metrics, mode_names
from corun.bench.figures import style
from corun.bench.records import Run
from corun.bench.results import Comparison, Group

Measure = Callable[[Iterable[Run]], list[float]]


def draw(group: Group) -> Figure:
    """A row for each workload: TTFT in seconds, TPOT in milliseconds; all repeats together."""
    rows = len(group.comparisons)
    figure, axes = style.panels(rows, 2, width=9.6, height=2.1, sharey=True)
    for (left, right), comparison in zip(axes, group.comparisons, strict=True):
        _panel(left, comparison, metrics.ttfts, 1.0)
        _panel(right, comparison, metrics.tpots, 1000.0)
        left.set_ylabel("share of requests")
        left.set_title(comparison.workload)
    axes[-1, 0].set_xlabel("time to first token (s)")
    axes[-1, 1].set_xlabel("time per output token (ms)")
    style.legend_above(figure, axes.flat, columns=4)
    return figure


def _panel(ax: Axes, comparison: Comparison, measure: Measure, scale: float) -> None:
    for mode, runs in comparison.modes.items():
        if values := measure(runs):
            x, y = metrics.cdf([value * scale for value in values])
            # From the axis up, so that the smallest value is seen as a step too.
            x, y = [x[0], *x], [0.0, *y]
            label = mode_names.label(mode)
            ax.step(x, y, where="post", label=label, **style.line(mode))
    ax.set_ylim(0, 1.02)
    ax.set_xlim(left=0)
