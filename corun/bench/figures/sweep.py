"""Fig. 11, throughput over concurrency, and Fig. 12, the cost of padding with one request."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from corun.bench import metrics, mode_names
from corun.bench.figures import style
from corun.bench.records import Run
from corun.bench.sweeps import Sweep


def draw_concurrency(sweep: Sweep) -> Figure:
    """Output tokens/s over the number of requests in flight."""
    figure, ax = _axes(sweep, "requests in flight")
    for mode, points in sweep.points.items():
        _line(ax, mode, points)
    return _finished(figure, ax)


def draw_padding(sweep: Sweep) -> Figure:
    """Output tokens/s over max_num_seqs, the rows that a padded decode step has.

    A mode that ran at one size only is drawn as a level: it does not pad.
    """
    figure, ax = _axes(sweep, "max_num_seqs (rows of a padded decode step)")
    for mode, points in sweep.points.items():
        if len(points) > 1:
            _line(ax, mode, points)
            continue
        (size, runs) = next(iter(points.items()))
        level = metrics.aggregate_throughput(runs)
        label = f"{mode_names.label(mode)} (at {size})"
        ax.axhline(level, label=label, **{**style.line(mode), "linestyle": "--"})
    return _finished(figure, ax)


def _axes(sweep: Sweep, quantity: str) -> tuple[Figure, Axes]:
    figure, axes = style.panels(1, 1, width=5.8, height=3.1)
    ax = axes[0, 0]
    values = sorted({value for points in sweep.points.values() for value in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [str(value) for value in values])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(quantity)
    ax.set_ylabel("output tokens/s")
    return figure, ax


def _line(ax: Axes, mode: str, points: Mapping[int, Sequence[Run]]) -> None:
    rates = [metrics.aggregate_throughput(runs) for runs in points.values()]
    ax.plot(
        list(points),
        rates,
        marker=style.marker(mode),
        label=mode_names.label(mode),
        **style.line(mode),
    )


def _finished(figure: Figure, ax: Axes) -> Figure:
    ax.set_ylim(bottom=0)
    style.thousands(ax.yaxis)
    style.legend_above(figure, [ax], columns=3)
    return figure
