"""How every figure looks: a color-blind-safe color for each mode, units on axes, little else.

Modes have the colors of Okabe and Ito, operator types those of Paul Tol's "bright" scheme, so that
the one is not taken for the other. All of them can be told apart on white and on near-black.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from corun.bench import mode_names, summary
from corun.bench.metrics import Determinism

INK = "#1b1f24"
MUTED = "#6b7681"
GRID = "#d9dee3"
"""Text and axes, secondary text, and grid. No data has these colors: a page may replace them."""

MODE_COLORS = {
    "std": "#666c74",
    "bi": "#d55e00",
    "nosplit": "#e69f00",
    "nosplit+prefill": "#cc79a7",
    "isolate": "#0072b2",
    "pack": "#56b4e9",
    "certified": "#009e73",
    "certified+split": "#117733",
    "auto": "#332288",
}
UNKNOWN_MODE = "#b0a000"
MODE_MARKERS = {
    "std": "o",
    "bi": "s",
    "nosplit": "v",
    "nosplit+prefill": "<",
    "isolate": "D",
    "pack": "^",
    "certified": "P",
    "certified+split": "X",
    "auto": "*",
}
RUNNER_LINES = {"": "-", "v1": "--", "v2": ":"}
RUNNER_HATCHES = {"": "", "v1": "////", "v2": "...."}

TYPE_COLORS = {
    "matmul": "#4477aa",
    "attention": "#ee6677",
    "norm": "#228833",
    "moe": "#ccbb44",
    "sampling": "#66ccee",
    "other": "#aa3377",
    "between kernels": "#bbbbbb",
}
UNKNOWN_TYPE = "#777777"

RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    # Text stays text: it can be searched, read aloud, and takes a page's color.
    "svg.fonttype": "none",
    # The same data gives the same file.
    "svg.hashsalt": "corun",
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures made and saved inside look as above."""
    with matplotlib.rc_context(RC):
        yield


def color(mode: str) -> str:
    """A mode's color, the same in every figure and on each runner."""
    return MODE_COLORS.get(mode_names.split(mode)[0], UNKNOWN_MODE)


def line(mode: str) -> dict[str, Any]:
    """Keywords of a mode's lines: color, and dashes for a runner that was chosen by hand.

    Plain vLLM is a broad line below the others: a mode that is as fast does not hide it.
    """
    name, runner = mode_names.split(mode)
    broad = name == mode_names.PLAIN
    return {
        "color": color(mode),
        "linestyle": RUNNER_LINES.get(runner, "-."),
        "linewidth": 3.2 if broad else 1.6,
        "zorder": 2.0 if broad else 2.2,
    }


def marker(mode: str) -> str:
    """A mode's marker, for those who cannot tell the colors apart."""
    return MODE_MARKERS.get(mode_names.split(mode)[0], "X")


def thousands(axis: Axis) -> None:
    """Write the axis's numbers as 12,000."""
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def bar(mode: str) -> dict[str, Any]:
    """Keywords of a mode's bars."""
    hatch = RUNNER_HATCHES.get(mode_names.split(mode)[1], "xx")
    return {"color": color(mode), "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def type_color(name: str) -> str:
    """An operator type's color."""
    return TYPE_COLORS.get(name, UNKNOWN_TYPE)


def legend_label(mode: str, found: Determinism | None) -> str:
    """A mode's name and whether its outputs kept their bits: a fast wrong mode is seen as wrong."""
    return f"{mode_names.label(mode)} ({summary.short_verdict(found)})"


def legend_above(figure: Figure, axes: Iterable[Axes], *, columns: int = 3) -> None:
    """One legend for the whole figure, above its panels, with each label once."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper left",
        ncols=min(columns, len(found)),
        fontsize=8.5,
    )


def lay_out(figure: Figure) -> None:
    """Place everything once and for all: a layout that runs again moves things by a hair."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def panels(
    rows: int, columns: int, *, width: float, height: float, **options: Any
) -> tuple[Figure, Any]:
    """A figure of rows x columns axes (always a 2-d array), each height inches high."""
    figure = Figure(figsize=(width, height * rows + 0.5), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
