"""Fig. 2: standard against batch-invariant operators."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from corun.bench.figures import style
from corun.bench.operator_records import MATMUL, Operator

NAMES = {"matmul": "MatMul", "rmsnorm": "RMSNorm", "softmax": "Softmax", "mean": "Mean"}
_BI = "batch-invariant"
_TITLES = ("standard (µs)", f"{_BI} (µs)", f"{_BI} / standard")
_STANDARD, _INVARIANT = style.MODE_COLORS["std"], style.MODE_COLORS["bi"]


def draw_over_rows(operators: Iterable[Operator]) -> Figure | None:
    """Fig. 2a: latency over the rows (the batch size), a panel for each operator and width.

    A matmul needs three row counts, another operator two. None where nothing has as many.
    """
    found: dict[tuple[str, int | None, int], list[Operator]] = {}
    for op in operators:
        found.setdefault((op.operator, op.k, op.n), []).append(op)
    # Two heat maps over K and N are no reason for a curve of two points for each of their cells.
    lines = {key: ops for key, ops in found.items() if len(ops) > (2 if key[1] else 1)}
    if not lines:
        return None
    columns = min(4, len(lines))
    rows = -(-len(lines) // columns)
    figure, axes = style.panels(rows, columns, width=3.1 * columns, height=2.5)
    for ax, ((name, k, n), ops) in zip(axes.flat, lines.items(), strict=False):
        ops.sort(key=lambda op: op.rows)
        _lines(ax, ops)
        shape = f"{n:,}" if k is None else f"{k:,} × {n:,}"
        ax.set_title(f"{NAMES.get(name, name)}, {shape}{_range(ops)}")
    for row in axes:
        row[0].set_ylabel("latency (µs)")
    for ax in axes.flat[len(lines) :]:
        ax.set_visible(False)
    style.legend_above(figure, axes.flat)
    return figure


def _lines(ax: Axes, ops: Sequence[Operator]) -> None:
    x = [op.rows for op in ops]
    ax.plot(x, [op.standard_us for op in ops], marker="o", color=_STANDARD, label="standard")
    invariant = [(op.rows, op.batch_invariant_us) for op in ops if op.batch_invariant_us]
    if invariant:
        ax.plot(*zip(*invariant, strict=True), marker="s", color=_INVARIANT, label=_BI)
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{value:,}" for value in x], rotation=45 if len(x) > 6 else 0)
    ax.minorticks_off()
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    ax.set_xlabel("rows")


def _range(ops: Iterable[Operator]) -> str:
    ratios = [op.ratio for op in ops if op.ratio]
    return f"\n{min(ratios):.2f}× to {max(ratios):.2f}×" if ratios else ""


def draw_matmul(operators: Iterable[Operator]) -> Figure | None:
    """Fig. 2b: heat maps over K and N: standard, batch-invariant, and their ratio; a row per M.

    A shape that was not measured stays empty. None where no M has two shapes.
    """
    found: dict[int, list[Operator]] = {}
    for op in operators:
        if op.operator == MATMUL:
            found.setdefault(op.rows, []).append(op)
    maps = {m: ops for m, ops in sorted(found.items()) if len(ops) > 1}
    if not maps:
        return None
    every = [op for ops in maps.values() for op in ops]
    ks, ns = sorted({op.k or 0 for op in every}), sorted({op.n for op in every})
    titles = _TITLES if any(op.ratio for op in every) else _TITLES[:1]
    width, height = 0.55 * len(ns) + 1.2, max(2.2, 0.3 * len(ks) + 1.1)
    figure, axes = style.panels(
        len(maps), len(titles), width=max(3.2, width) * len(titles), height=height
    )
    for line, (m, ops) in zip(axes, maps.items(), strict=True):
        grids = np.full((3, len(ks), len(ns)), np.nan)
        for op in ops:
            place = ks.index(op.k or 0), ns.index(op.n)
            values = (op.standard_us, op.batch_invariant_us, op.ratio)
            grids[(slice(None), *place)] = [np.nan if v is None else v for v in values]
        times = LogNorm(np.nanmin(grids[:2]), np.nanmax(grids[:2]))
        for ax, title, grid in zip(line, titles, grids, strict=False):
            if title == _TITLES[2]:
                ratios = Normalize(1, max([2.0, *(op.ratio for op in ops if op.ratio)]))
                _heat_map(ax, grid, ratios, "YlOrRd", "×")
            else:
                _heat_map(ax, grid, times, "cividis", "")
            ax.set_xticks(range(len(ns)), [str(n) for n in ns], rotation=45 if len(ns) > 4 else 0)
            ax.set_yticks(range(len(ks)), [str(k) for k in ks])
            ax.set_title(f"M = {m:,}: {title}")
            ax.set_xlabel("N (output)")
        line[0].set_ylabel("K (reduction)")
    return figure


def _heat_map(ax: Axes, values: np.ndarray, norm: Normalize, colors: str, unit: str) -> None:
    """values: [K, N], NaN where not measured. Each cell shows its number and the unit."""
    image = ax.imshow(values, norm=norm, cmap=colors, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            red, green, blue, _ = image.cmap(norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            ax.text(
                column,
                row,
                f"{_short(value)}{unit}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    ax.tick_params(length=0)
    ax.grid(visible=False)


def _short(value: float) -> str:
    """Three digits, and no fraction from 100 on."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}"
