"""Fig. 1b, a decode step's time by operator type, and Fig. 4, each type in each mode."""

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from corun.bench import mode_names
from corun.bench.figures import style
from corun.bench.operator_records import StepTime

GAPS = "between kernels"
_COLUMNS = 3
_WORTH_SAYING = 0.06
"""A part of a bar is named inside it from this share of the tallest bar on."""

Case = tuple[int, str]


def cases(steps: Iterable[StepTime]) -> dict[Case, list[StepTime]]:
    """The steps of each batch (rows, context), modes in order."""
    found: dict[Case, list[StepTime]] = {}
    for step in steps:
        found.setdefault((step.rows, step.context), []).append(step)
    return {
        case: sorted(modes, key=lambda s: mode_names.order(s.mode)) for case, modes in found.items()
    }


def parts(step: StepTime) -> dict[str, float]:
    """Milliseconds by type, in the order of the colors; the rest of the step is GAPS. None is 0."""
    known = [name for name in style.TYPE_COLORS if name in step.by_type]
    names = [*known, *(name for name in step.by_type if name not in style.TYPE_COLORS)]
    found = {name: step.by_type[name] / 1000 for name in names if step.by_type[name]}
    rest = step.total_us / 1000 - sum(found.values())
    if rest > 0:
        found[GAPS] = rest
    return found


def draw_breakdown(steps: Iterable[StepTime]) -> Figure:
    """Fig. 1b: a stacked bar for each mode, a panel for each batch."""
    found = cases(steps)
    figure, panels = _panels(found, height=3.1)
    for ax, modes in panels:
        bars = [parts(step) for step in modes]
        tallest = max(sum(bar.values()) for bar in bars)
        for x, bar in enumerate(bars):
            _stack(ax, x, bar, tallest)
        ax.set_xticks(range(len(modes)), [_wrapped(step.mode) for step in modes])
        ax.set_xlim(-0.6, len(modes) - 0.4)
        ax.set_ylim(0, tallest * 1.1)
        ax.tick_params(axis="x", length=0)
    style.legend_above(figure, [ax for ax, _ in panels], columns=4)
    return figure


def _stack(ax: Axes, x: int, bar: Mapping[str, float], tallest: float) -> None:
    bottom = 0.0
    for name, value in bar.items():
        ax.bar(x, value, 0.66, bottom, color=style.type_color(name), label=name, linewidth=0)
        if value > _WORTH_SAYING * tallest:
            ax.text(
                x, bottom + value / 2, f"{value:.2f}", ha="center", va="center", fontsize=7.5,
                color="white" if name in ("matmul", "norm", "other") else "black",
            )  # fmt: skip
        bottom += value
    ax.annotate(
        f"{bottom:.2f}", (x, bottom), (0, 2), textcoords="offset points", ha="center", va="bottom",
        fontsize=8.5, fontweight="bold",
    )  # fmt: skip


def draw_by_type(steps: Iterable[StepTime]) -> Figure:
    """Fig. 4: for each operator type a bar for each mode, a panel for each batch.

    A type that took no time in any mode is left out.
    """
    found = cases(steps)
    most = max(len(modes) * len(_named(modes)) for modes in found.values())
    figure, panels = _panels(found, height=0.16 * most + 0.9, across=True)
    for ax, modes in panels:
        names, width = _named(modes), 0.84 / len(modes)
        for i, step in enumerate(modes):
            bar = parts(step)
            places = [(y, bar[name]) for y, name in enumerate(names) if name in bar]
            drawn = ax.barh(
                [y - 0.42 + width * (i + 0.5) for y, _ in places],
                [value for _, value in places],
                width * 0.94,
                label=mode_names.label(step.mode),
                **style.bar(step.mode),
            )
            ax.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False, axis="y")
        ax.grid(visible=True, axis="x")
        ax.set_xlim(0, ax.get_xlim()[1] * 1.12)
    style.legend_above(figure, [ax for ax, _ in panels], columns=4)
    return figure


def _named(modes: Iterable[StepTime]) -> list[str]:
    return list(dict.fromkeys(name for step in modes for name in parts(step)))


def _panels(
    found: Mapping[Case, list[StepTime]], *, height: float, across: bool = False
) -> tuple[Figure, list[tuple[Axes, list[StepTime]]]]:
    """A panel for each batch, titled; across: time runs from left to right."""
    columns = min(_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    figure, axes = style.panels(rows, columns, width=max(5.5, 3.4 * columns), height=height)
    for ax in axes.flat[len(found) :]:
        ax.set_visible(False)
    panels = list(zip(axes.flat, found.values(), strict=False))
    for (ax, _), (requests, context) in zip(panels, found, strict=True):
        tokens = f"{int(context):,}" if context.isdecimal() else context
        between = "\n" if across and columns > 1 else " "  # beside long labels there is less room
        ax.set_title(f"{requests:,} request{'s' * (requests != 1)}{between}of {tokens} tokens")
        if across:
            ax.set_xlabel("time in one decode step (ms)")
    if not across:
        for row in axes:
            row[0].set_ylabel("time of one decode step (ms)")
    return figure, panels


def _wrapped(mode: str) -> str:
    return mode_names.label(mode).replace(" ", "\n", 1).replace("-", "-\n", 1)
