"""``corun bench report DIR``: one HTML page with every figure and table, from recorded files alone.

The page needs nothing else: its figures are inside it. They are also kept as PNG and SVG.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.bench import mode_names, report_notes, report_tables, results, summary
from corun.bench.report_tables import Table
from corun.bench.results import Group, Results
from corun.bench.sweeps import main_groups
from corun.commands.options import add_json_option
from corun.jobs.files import write_json

PAGE = "report.html"
FIGURES = "figures"
TITLE = "CoRun benchmark"
_TEMPLATE = Path(__file__).parent / "templates" / PAGE
_PIXELS_PER_INCH = 100


@dataclass(frozen=True, slots=True)
class PageFigure:
    """A figure inside the page. svg: an element. width: the most pixels it is shown at."""

    number: str
    title: str
    caption: str
    svg: Any
    width: int


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: notes, then first_tables, figures, and tables."""

    anchor: str
    title: str
    notes: Sequence[str]
    first_tables: Sequence[Table]
    figures: Sequence[PageFigure]
    tables: Sequence[Table]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``corun bench report``."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the recorded files are")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the report, and every number as JSON where asked to; 0."""
    page = write(args.directory)
    if args.json:
        write_json(args.json, summary.to_mapping(results.read_directory(args.directory)))
    print(page)
    return 0


def write(directory: Path) -> Path:
    """Write DIR/report.html and DIR/figures/*; returns the page's path.

    RecordError (a ValueError) where the files cannot be used, see ``results.read_directory``, and
    ValueError where matplotlib or Jinja is not installed.
    """
    _require_packages()
    found = results.read_directory(directory)
    page = directory / PAGE
    page.write_text(render(found, directory))
    return page


def render(found: Results, directory: Path) -> str:
    """The page's text. Figures are saved under `directory`, and files are named relative to it."""
    import jinja2

    folder = directory / FIGURES
    folder.mkdir(exist_ok=True)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE.read_text()).render(
        title=TITLE,
        lead=_lead(found),
        sections=_sections(found, _figures(found, folder)),
        origin=_origin(found),
        files=[
            (record.path.relative_to(directory), record.date, record.command)
            for record in _records(found)
        ],
    )


def _require_packages() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib as mpl  # noqa: F401
    except ImportError as e:
        raise ValueError(
            f"a report needs the package {e.name}; install corun-vllm with the extra 'bench'"
        ) from e


def _figures(found: Results, folder: Path) -> dict[str, list[PageFigure]]:
    """The figures by section; each is saved as PNG and SVG too."""
    from markupsafe import Markup
    from tqdm import tqdm

    from corun.bench.figures import catalog, drawing

    for old in (*folder.glob("fig*.png"), *folder.glob("fig*.svg")):
        old.unlink()  # no figure of numbers that are gone
    shown: dict[str, list[PageFigure]] = {}
    drawings = tqdm(catalog.draw_all(found), desc="figures", unit="figure", disable=None)
    for i, drawn in enumerate(drawings):
        svg = drawn.save(folder)
        element = drawing.for_page(svg, f"f{i}", f"{drawn.title}. {drawn.section}")
        width = round(drawn.figure.get_figwidth() * _PIXELS_PER_INCH)
        # Made here, of escaped text: the page takes it as it is.
        figure = PageFigure(drawn.number, drawn.title, drawn.caption, Markup(element), width)
        shown.setdefault(drawn.section, []).append(figure)
    return shown


def _sections(found: Results, figures: dict[str, list[PageFigure]]) -> list[Section]:
    from corun.bench.figures import catalog

    made = []
    for group in main_groups(found.groups):
        title = catalog.described(group.load)
        made.append(_serving(group, title, figures[title]))
    if catalog.SWEEPS in figures:
        made.append(_plain(catalog.SWEEPS, [], figures[catalog.SWEEPS]))
    for file in found.servers:
        title = f"Over HTTP: {file.model}"
        anchor = f"{_anchor(title)}-{len(made)}"
        made.append(Section(anchor, title, file.notes, [report_tables.over_http(file)], (), ()))
    notes = [note for steps in found.step_times for note in steps.notes]
    notes += [note for operators in found.operators for note in operators.notes]
    if catalog.OPERATORS in figures or notes:
        made.append(_plain(catalog.OPERATORS, notes, figures.get(catalog.OPERATORS, [])))
    return made


def _serving(group: Group, title: str, figures: Sequence[PageFigure]) -> Section:
    details = [
        table
        for comparison in group.comparisons
        for table in (
            report_tables.latency(comparison),
            report_tables.rows_and_memory(comparison),
        )
    ]
    first = [report_tables.throughput(group), report_tables.determinism(group)]
    return Section(_anchor(title), title, report_notes.of_group(group), first, figures, details)


def _plain(title: str, notes: Sequence[str], figures: Sequence[PageFigure]) -> Section:
    return Section(_anchor(title), title, notes, (), figures, ())


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _records(found: Results) -> list[Any]:
    return [*found.runs, *found.servers, *found.operators, *found.step_times]


def _lead(found: Results) -> str:
    records = _records(found)
    dates = sorted({record.date for record in records})
    models = [run.model for run in found.runs]
    models += [file.model for file in found.servers]
    models += [steps.model for steps in found.step_times]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    what = ", ".join(dict.fromkeys(models)) or "Operators"
    return f"{what}. Measured {when}; recorded files: {len(records)}."


def _origin(found: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Hardware and versions, then each model's workloads, settings and policies; each one once."""
    parts: list[tuple[str, dict[str, Any]]] = []
    for record in _records(found):
        parts += [("Hardware", dict(record.hardware)), ("Versions", dict(record.versions))]
    for run in found.runs:
        parts.append((f"Workloads, {run.model}", _sources(found, run.model)))
        parts.append((f"Settings, {run.model}", _settings(found, run.model)))
        parts.append((f"Policies and domains, {run.model}", _policies(found, run.model)))
    return [(title, report_tables.facts(values)) for title, values in _distinct(parts)]


def _settings(found: Results, model: str) -> dict[str, list[Any]]:
    """Every value that a setting had."""
    values: dict[str, list[Any]] = {}
    for run in found.runs:
        if run.model == model:
            for name, value in run.settings.items():
                _add(values, name, value)
    return values


def _sources(found: Results, model: str) -> dict[str, list[Any]]:
    """What each workload was made from, and of how many requests it was."""
    values: dict[str, list[Any]] = {}
    for run in found.runs:
        if run.model == model:
            _add(values, run.workload, f"{run.source} ({len(run.requests):,} requests)")
    return values


def _policies(found: Results, model: str) -> dict[str, list[Any]]:
    """What CoRun chose in each of its modes, why, and the domain that the outputs hold in."""
    values: dict[str, list[Any]] = {}
    for run in found.runs:
        if run.model == model and run.domain:
            name, reason = run.policy.get("name"), run.policy.get("reason")
            _add(values, mode_names.label(run.mode), f"{name} ({reason}), {run.domain}")
    return values


def _add(values: dict[str, list[Any]], name: str, value: Any) -> None:
    seen = values.setdefault(name, [])
    if value not in seen:
        seen.append(value)


def _distinct(parts: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    kept: list[tuple[str, dict[str, Any]]] = []
    for part in parts:
        if part[1] and part not in kept:
            kept.append(part)
    return kept
