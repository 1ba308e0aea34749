"""Figures and the page of ``corun bench report``, really rendered from small recorded files."""

import argparse
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import bench_files
import pytest
from bench_files import write
from matplotlib.image import imread

from corun.bench import kernel_types, mode_names, mode_process, report, report_notes, report_tables
from corun.bench.fields import RecordError
from corun.bench.figures import catalog, drawing, over_time, step_times, style
from corun.bench.operator_records import read_step_times
from corun.bench.results import read_directory

MODES = ("std", "bi", "nosplit", "nosplit+prefill", "isolate", "pack", "certified")


def everything(directory):
    """A directory that gives every figure; plain vLLM changes one of two requests when repeated."""
    serving = [bench_files.run(m, w) for m in MODES for w in ("burstgpt", "1024/128")]
    serving = [r for r in serving if (r["mode"], r["workload"]) != ("pack", "1024/128")]
    repeats = [
        bench_files.run("std", repeat=1, order_seed=1, digests=("a", "other")),
        bench_files.run("isolate", repeat=1, order_seed=1, wall_s=8.0),
    ]
    sweep = [
        bench_files.run(mode, arrivals=f"closed:{n}", slots=n)
        for mode in ("std", "bi")
        for n in (2, 4)
    ]
    padding = [
        bench_files.run("isolate", "64/64", arrivals="closed:1", slots=n, wall_s=4.0 * n)
        for n in (1, 2, 4)
    ]
    padding.append(bench_files.run("std", "64/64", arrivals="closed:1", slots=4))
    measured = [bench_files.operators(), bench_files.step_times(), bench_files.server()]
    return write(directory, *serving, *repeats, *sweep, *padding, *measured)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def page(directory):
    return report.write(directory).read_text()


@pytest.fixture(scope="module")
def drawings(directory):
    return {d.stem: d for d in catalog.draw_all(read_directory(directory))}


def texts(svg):
    """The texts in an SVG document, as they are shown."""
    root = ElementTree.fromstring(svg)
    return ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]


def heights(figure):
    """The heights of the bars of a figure's first axes, by x, left to right."""
    return [bar.get_height() for bar in sorted(figure.axes[0].patches, key=lambda b: b.get_x())]


def test_every_figure_of_the_paper_is_drawn(drawings):
    numbers = {d.number for d in drawings.values()}
    assert numbers == {"1b", "2a", "2b", "4", "8", "9", "10", "11", "12", "13"}


def test_figures_are_saved_as_png_and_svg(directory, page):
    saved = sorted((directory / "figures").iterdir())
    pngs, svgs = ([p for p in saved if p.suffix == s] for s in (".png", ".svg"))
    assert len(pngs) == 14
    assert [p.stem for p in pngs] == [p.stem for p in svgs]
    for png in pngs:
        pixels = imread(png)
        assert min(pixels.shape[:2]) > 300
        assert len({tuple(p) for p in pixels.reshape(-1, pixels.shape[2])[::97]}) > 3, png.name
    for svg in svgs:
        assert len(texts(svg.read_text())) > 8, svg.name


def test_axes_are_labeled_with_units(drawings):
    labels = {d.number: set() for d in drawings.values()}
    for d in drawings.values():
        for ax in d.figure.axes:
            labels[d.number] |= {ax.get_xlabel(), ax.get_ylabel()} - {""}
    assert labels["8"] == labels["13"] == {"output tokens/s"}
    assert "time since the run began (s)" in labels["9"]
    assert {"prefill tokens/s, in bins of 0.1 s", "decode tokens/s, in bins of 0.1 s"} <= labels[
        "9"
    ]
    assert labels["10"] == {
        "share of requests",
        "time to first token (s)",
        "time per output token (ms)",
    }
    assert labels["11"] == {"requests in flight", "output tokens/s"}
    assert labels["12"] == {"max_num_seqs (rows of a padded decode step)", "output tokens/s"}
    assert labels["1b"] == {"time of one decode step (ms)"}
    assert labels["4"] == {"time in one decode step (ms)"}
    assert labels["2a"] == {"rows", "latency (µs)"}
    assert labels["2b"] == {"N (output)", "K (reduction)"}


def test_throughput_bars(drawings):
    figure = drawings["fig8-throughput-tiny-all-4"].figure
    # burstgpt has 7 modes, 1024/128 and the total have no pack; isolate's repeat took 8 s.
    one, two, three = 6 / 4, 12 / 12, 18 / 16
    slow = [one, one, one, one, two, one]
    total = [one, one, one, one, three, one]
    assert heights(figure) == pytest.approx([one] * 7 + slow + total)
    shown = texts(drawings["fig8-throughput-tiny-all-4"].svg())
    assert shown.count("no run") == 2
    assert shown.count("0.67×") == 1 and shown.count("0.75×") == 1
    assert "plain vLLM (outputs differ)" in shown
    assert "CoRun isolate (bits equal)" in shown
    assert "CoRun certified (bits not checked)" in shown


def test_ablation_has_its_modes_only(drawings):
    shown = texts(drawings["fig13-ablation-tiny-all-4"].svg())
    legend = [t for t in shown if t.endswith(")")]
    assert [t.rpartition(" (")[0] for t in legend] == [
        mode_names.label(mode) for mode in mode_names.ABLATION
    ]


def test_curves_over_time(drawings):
    figure = drawings["fig9-over-time-tiny-1024-128-all"].figure
    prefill, decode = ([p.get_data() for p in ax.patches] for ax in figure.axes)
    assert sum(prefill[0].values) * 0.1 == pytest.approx(30)
    assert sum(decode[0].values) * 0.1 == pytest.approx(4)


@pytest.mark.parametrize("seconds, width", [(60, 1), (61, 2), (4, 0.1), (290, 5), (0.003, 0.00005)])
def test_bins_have_round_widths(seconds, width):
    assert over_time.bin_width(seconds) == pytest.approx(width)


def test_distributions_begin_on_the_axis_and_reach_one(drawings):
    figure = drawings["fig10-latency-tiny-all-4"].figure
    for ax in figure.axes:
        for line in ax.lines:
            assert line.get_ydata()[0] == 0 and line.get_ydata()[-1] == 1
    left, right = figure.axes[-2:]
    assert left.lines[0].get_xdata().tolist() == [1, 1, 1, 1.5, 1.5]
    assert right.lines[0].get_xdata().tolist() == [500, 500, 500]


def test_sweeps(drawings):
    concurrency = drawings["fig11-concurrency-tiny-1024-128-max-num-seqs-concurrency"].figure
    assert [line.get_xdata().tolist() for line in concurrency.axes[0].lines] == [[2, 4]] * 2
    padding = drawings["fig12-padding-tiny-64-64"]
    level, curve = padding.figure.axes[0].lines
    assert curve.get_xdata().tolist() == [1, 2, 4]
    assert curve.get_ydata().tolist() == [6 / 4, 6 / 8, 6 / 16]
    assert set(level.get_ydata()) == {1.5}
    assert "plain vLLM (at 4)" in texts(padding.svg())


def test_operator_figures(drawings):
    shown = texts(drawings["fig2b-matmul"].svg())
    assert {"2.00×", "1.50×", "12.5×"} <= set(shown)
    assert {"M = 32: standard (µs)", "M = 32: batch-invariant / standard"} <= set(shown)
    assert len([t for t in shown if t.endswith("×")]) == 3  # the fourth shape was not measured
    assert any("RMSNorm, 4,096" in t for t in texts(drawings["fig2a-operators"].svg()))


def test_operator_figures_without_batch_invariant_kernels(tmp_path):
    record = bench_files.operators()
    for op in record["operators"]:
        op["batch_invariant_us"] = None
    found = catalog.draw_all(read_directory(write(tmp_path, record)))
    assert [d.number for d in found] == ["2a", "2b"]
    for d in found:
        assert not any("batch-invariant" in text for text in texts(d.svg()))


def test_step_times(tmp_path, drawings):
    write(tmp_path, bench_files.step_times())
    plain = read_step_times(tmp_path / "record-0.json").steps[1]
    assert step_times.parts(plain) == {"matmul": 5.0, "attention": 3.0, step_times.GAPS: 2.0}
    shown = texts(drawings["fig1b-decode-step-tiny"].svg())
    assert {"10.00", "20.00", "16.00", "32 requests of 1,024 tokens"} <= set(shown)
    assert "moe" not in shown


def test_the_same_files_give_the_same_figures(directory, drawings):
    again = {d.stem: d for d in catalog.draw_all(read_directory(directory))}
    for stem in ("fig8-throughput-tiny-all-4", "fig2b-matmul"):
        assert again[stem].svg() == drawings[stem].svg()


def test_colors_are_one_to_a_mode_and_a_type():
    assert set(mode_names.LABELS) == set(style.MODE_COLORS) == set(style.MODE_MARKERS)
    assert set(mode_names.LABELS) == set(mode_process.MODES)
    assert set(kernel_types.TYPES) <= set(style.TYPE_COLORS)
    taken = [*style.MODE_COLORS.values(), style.UNKNOWN_MODE, style.INK, style.MUTED, style.GRID]
    assert len(set(taken)) == len(taken)
    assert style.color("isolate@v1") == style.color("isolate")
    assert style.line("isolate@v1")["linestyle"] != style.line("isolate")["linestyle"]


@pytest.mark.parametrize(
    "value, shown",
    [
        (12_000, "12,000"),
        (0.6, "0.6"),
        (None, "none"),
        ([True, False], "yes, no"),
        ({"dtype": "bfloat16", "rows": 4}, "dtype bfloat16, rows 4"),
    ],
)
def test_json_values_as_people_read_them(value, shown):
    assert report_tables.text(value) == shown


class Page(HTMLParser):
    """Open elements, ids, texts, and whatever the page would load from elsewhere."""

    VOID = frozenset({"meta", "link", "br", "img", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.loads, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag, attrs):
        self._attributes(attrs)

    def _attributes(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:")):
                self.loads.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data.strip())


def test_the_page_is_whole_and_loads_nothing(page):
    found = Page(page)
    assert found.open == []
    assert found.loads == []
    assert "@import" not in page and "<script" not in page
    assert len(found.ids) == len(set(found.ids))
    references = re.findall(r'(?:url\(|href=")#([^")]+)', page)
    assert references and set(references) <= set(found.ids)


def test_the_page_follows_light_and_dark(page):
    assert "prefers-color-scheme: dark" in page
    body = page[page.index("<body") :]
    for fixed in (style.INK, style.MUTED, style.GRID):
        assert fixed not in body
    assert "currentColor" in body and "var(--grid)" in body


def test_the_page_shows_every_number(page):
    text = " | ".join(filter(None, Page(page).text))
    for expected in (
        "tiny, all requests at once, max_num_seqs 4",
        "1.00×",
        "NVIDIA H200",
        "0.25.0",
        "burstgpt | made of burstgpt (2 requests)",
        "corun bench run tiny --modes certified",
        "record-0.json",
        "1 of 2 equal",
        "2 of 2 equal",
        "50.0%",  # padding of decode steps: 4 of 8 rows
        "10.5%",  # of all rows: 4 of 38
        "40.0%",  # KV peak
        "500.00",  # TPOT, ms
        "Over HTTP: tiny | CoRun pack failed over HTTP: no memory",
        "1,234.50",
    ):
        assert expected in text, expected


def test_the_page_warns(page):
    text = " ".join(Page(page).text)
    assert "Plain vLLM is not deterministic: 1 of 2 requests kept every bit when all" in text
    assert "CoRun pack has no run of 1024/128, and so no total." in text
    assert "CoRun certified ran once: whether its outputs keep their bits was not checked." in text
    assert "CoRun isolate is not deterministic" not in text


def notes_of(tmp_path, *records):
    (group,) = read_directory(write(tmp_path, *records)).groups
    return " ".join(report_notes.of_group(group))


def test_notes_of_what_is_missing(tmp_path):
    blind = {**bench_files.STEPS, "rows_run": None}
    notes = notes_of(
        tmp_path,
        bench_files.run("bi", steps=blind),
        bench_files.run("isolate", steps=None),
        bench_files.run("pack", report={"violation_count": 3}),
    )
    assert "Plain vLLM was not run" in notes
    assert "Batch-invariant did not record the rows that it ran" in notes
    assert "CoRun isolate did not record its steps" in notes
    assert "CoRun pack ran 3 steps outside its plan." in notes


def test_notes_of_what_was_asked(tmp_path):
    settings = {**bench_files.SETTINGS, "seeded": False, "logprobs": False}
    notes = notes_of(tmp_path, bench_files.run(settings=settings))
    assert "Requests had no seeds" in notes and "equal means equal tokens" in notes


def test_notes_of_settings_that_differ(tmp_path):
    less = {**bench_files.SETTINGS, "kv_cache_tokens": 50_000}
    both = ("1024/128", "burstgpt")
    alike = [bench_files.run(mode, w) for mode in ("std", "isolate") for w in both]
    other = [bench_files.run("bi", w, settings=less) for w in both]
    told = "kv_cache_tokens differs: 50,000 in batch-invariant; 100,000 in the others"
    assert f"{told} (burstgpt, 1024/128)." in notes_of(tmp_path, *alike, *other)


def test_notes_of_engines_that_were_up_beside(tmp_path):
    beside = {n: {**bench_files.SETTINGS, "engines_beside": n} for n in (0, 1, 3)}
    notes = notes_of(
        tmp_path,
        bench_files.run("std", settings=beside[3]),
        bench_files.run("bi", settings=beside[0]),
        bench_files.run("isolate", settings=beside[3]),
        bench_files.run("isolate", repeat=1, settings=beside[1]),
        bench_files.run("pack"),  # of before such runs were made
    )
    assert "While CoRun isolate ran, one other engine was up beside it, idle." in notes
    assert "While plain vLLM, CoRun isolate ran, 3 other engines were up beside it, idle." in notes
    assert "engines_beside" not in notes and notes.count("beside") == 2


def test_names_from_files_cannot_write_into_the_page(tmp_path):
    hostile = '<script>alert("1")</script>&'
    record = bench_files.run(hostile, hostile, model=hostile, command=hostile)
    page = report.write(write(tmp_path, record)).read_text()
    assert "<script" not in page
    assert Page(page).open == []


def test_a_mode_without_steps_or_second_tokens_is_drawn_all_the_same(tmp_path):
    request = {**bench_files.REQUESTS[1], "digest": "d"}
    record = bench_files.run(steps=None, count=1, requests=[request])
    page = report.write(write(tmp_path, record)).read_text()
    assert "not recorded" in page
    assert [d.number for d in catalog.draw_all(read_directory(tmp_path))] == ["8", "10"]


def test_a_report_again_is_the_same(tmp_path):
    write(tmp_path, bench_files.run())
    first = report.write(tmp_path).read_bytes()
    assert report.write(tmp_path).read_bytes() == first


def test_the_command(tmp_path, capsys):
    """Its JSON may lie beside the files that it was made from."""
    write(tmp_path, bench_files.run())
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    args = parser.parse_args([str(tmp_path), "--json", str(tmp_path / "summary.json")])
    for _ in range(2):
        assert report.run(args) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    (load,) = json.loads((tmp_path / "summary.json").read_text())["groups"]
    assert load["aggregate_tokens_per_s"] == {"std": 1.5}


def test_figures_of_removed_runs_go(tmp_path):
    write(tmp_path, bench_files.run(), bench_files.operators())
    report.write(tmp_path)
    assert (tmp_path / "figures" / "fig2b-matmul.svg").exists()
    (tmp_path / "figures" / "mine.png").write_bytes(b"")
    (tmp_path / "record-1.json").unlink()
    report.write(tmp_path)
    names = {p.name for p in (tmp_path / "figures").iterdir()}
    assert "mine.png" in names and "fig8-throughput-tiny-all-4.svg" in names
    assert not any(name.startswith("fig2") for name in names)


def test_the_page_names_policies_and_domains(tmp_path):
    policy = {"name": "pack", "reason": "no certificate"}
    record = bench_files.run("certified", domain="corun1-0123", policy=policy)
    text = " | ".join(filter(None, Page(report.write(write(tmp_path, record)).read_text()).text))
    assert "CoRun certified | pack (no certificate), corun1-0123" in text


def test_nothing_is_written_where_a_file_is_damaged(tmp_path):
    write(tmp_path, bench_files.run(), bench_files.run("bi", wall_s=0.1))
    with pytest.raises(RecordError, match="ended before its last request"):
        report.write(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["record-0.json", "record-1.json"]


def test_svg_for_a_page_keeps_its_texts_and_box(drawings):
    svg = drawings["fig8-throughput-tiny-all-4"].svg()
    element = drawing.for_page(svg, "f1", 'A "label" \\1 & more')
    root = ElementTree.fromstring(
        element.replace(
            "<svg ",
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ',
            1,
        )
    )
    assert root.get("aria-label") == 'A "label" \\1 & more'
    assert root.get("viewBox") == ElementTree.fromstring(svg).get("viewBox")
    assert texts(svg) == texts(ElementTree.tostring(root, encoding="unicode"))
