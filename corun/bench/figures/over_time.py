"""Fig. 9: prefill and decode throughput over time."""

import math

from matplotlib.figure import Figure

from corun.bench import metrics, mode_names
from corun.bench.figures import style
from corun.bench.results import Comparison

_BINS = 60
"""About how many bins the longest run is cut into."""


def draw(comparison: Comparison) -> Figure | None:
    """Two panels, prefill and decode, in tokens/s; the first repeat of each mode.

    None where no mode recorded its steps.
    """
    first = {mode: runs[0] for mode, runs in comparison.modes.items()}
    width = bin_width(max(run.wall_s for run in first.values()))
    found = {mode: metrics.over_time(run, width) for mode, run in first.items()}
    lines = {mode: timeline for mode, timeline in found.items() if timeline is not None}
    if not lines:
        return None
    figure, axes = style.panels(1, 2, width=9.6, height=2.7, sharex=True)
    for ax, stage in zip(axes[0], ("prefill", "decode"), strict=True):
        for mode, timeline in lines.items():
            values = timeline.prefill if stage == "prefill" else timeline.decode
            edges = [width * i for i in range(len(values) + 1)]
            ax.stairs(values, edges, label=mode_names.label(mode), **style.line(mode))
        ax.set_title(stage.capitalize())
        ax.set_xlabel("time since the run began (s)")
        ax.set_ylabel(f"{stage} tokens/s, in bins of {width:g} s")
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        style.thousands(ax.yaxis)
    style.legend_above(figure, axes.flat, columns=4)
    return figure


def bin_width(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, such that `seconds` make at most _BINS bins."""
    least = seconds / _BINS
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least)
