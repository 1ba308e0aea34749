"""The tables of benchmarks: their numbers are those of the recorded files."""

import json
import re
import sys
from pathlib import Path

import bench_files
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import readme_bench  # noqa: E402


@pytest.fixture
def results(tmp_path):
    """A directory of results with one benchmark in it; `write` adds a run to it, or to a part."""
    directory = tmp_path / "tiny-gpu"

    def write(part=".", **run):
        inner = directory / part
        inner.mkdir(parents=True, exist_ok=True)
        (inner / "plan.json").write_text(json.dumps({"format": "corun-bench-plan/1"}))
        number = len(list(inner.glob("run-*.json")))
        (inner / f"run-{number}.json").write_text(json.dumps(bench_files.run(**run)))

    return tmp_path, write


def test_rates_shares_and_bits(results):
    directory, write = results
    for repeat in (0, 1):
        digests = ("a", "b") if repeat == 0 else ("a", "c")
        slower = {"wall_s": 4.0 + repeat}  # the faster run counts
        write(mode="std", repeat=repeat, order_seed=repeat, digests=digests, **slower)
        write(mode="isolate", repeat=repeat, order_seed=repeat, wall_s=5.0)
    write(mode="std", arrivals="closed:1", workload="8/4")
    write(mode="certified", arrivals="poisson:2.0", wall_s=6.0)
    (directory / "tiny-gpu" / readme_bench.NOTE_FILE).write_text("Beside others.\n")
    table = readme_bench.bench_tables(directory, "results").splitlines()
    assert "Beside others." in table
    assert table[0] == "### tiny-gpu"
    assert table[2].startswith("tiny shape, ") and "([records](results/tiny-gpu)):" in table[2]
    heads = "| in/out | requests | arrivals | plain vLLM | CoRun isolate | CoRun certified |"
    assert table[4] == heads
    rows = set(table[6:])
    assert "| 1024/128 | 2 | all at once | 2 (1.00) | 1 (0.80) | not run |" in rows
    assert "| 8/4 | 2 | 1 in flight | 2 (1.00) | not run | not run |" in rows
    assert "| 1024/128 | 2 | 2.0 a second | not run | not run | 1 |" in rows
    assert "|  |  | equal | 1 of 2 equal | 2 of 2 equal | not checked |" in rows


def test_a_sweep_over_rows_is_one_benchmark(results):
    directory, write = results
    for slots, wall_s in ((8, 4.0), (64, 8.0)):
        loads = {"part": f"rows-{slots}", "slots": slots, "arrivals": "closed:1"}
        write(mode="std", **loads)
        write(mode="isolate", wall_s=wall_s, **loads)
    rows = set(readme_bench.bench_tables(directory, "results").splitlines())
    assert "| 1024/128 | 2 | 1 in flight | 8 | 2 (1.00) | 2 (1.00) |" in rows
    assert "| 1024/128 | 2 | 1 in flight | 64 | 2 (1.00) | 1 (0.50) |" in rows
    summary = readme_bench.bench_summary(directory, "page.md")
    assert (
        "\n| [tiny](page.md#tiny-gpu) | 8 to 64 | 2 | 1.00, not checked | "
        "0.50 to 1.00, not checked |\n" in summary
    )


def test_operators_and_steps_beside_the_runs_or_deeper_or_alone(results):
    directory, write = results
    write(mode="std")
    bench_files.write(directory / "tiny-gpu" / "more", bench_files.operators())
    steps = bench_files.step_times()
    steps["steps"][0]["engines_beside"] = 1
    bench_files.write(directory / "steps-gpu", steps)
    page = readme_bench.bench_tables(directory, "results")
    assert page.index("### steps-gpu") < page.index("### tiny-gpu")
    assert "([record](results/tiny-gpu/more/record-0.json))" in page
    rows = page.splitlines()
    assert "| matmul | 3 | 1.5 to 12.5 | 32 rows, K 1024, N 512 |" in rows
    assert "| rmsnorm | 2 | 2.0 to 8.0 | 8 rows, N 4096 |" in rows
    assert "| requests | context | plain vLLM | batch-invariant |" in rows
    assert "| 32 | 1024 | 10.00 (1.00) | 20.00 (2.00) |" in rows
    assert any(row.startswith("- 2 engines were up together") for row in rows)
    assert "steps-gpu" not in readme_bench.bench_summary(directory, "page.md")


def test_what_a_client_saw_over_http(results):
    directory, write = results
    write(mode="std")
    bench_files.write(directory / "tiny-gpu-http", bench_files.server())
    rows = readme_bench.bench_tables(directory, "results").splitlines()
    (title,) = (row for row in rows if row.startswith("Over HTTP, tiny shape"))
    assert title.endswith("([record](results/tiny-gpu-http/record-0.json)):")
    head = "| in/out | arrivals | mode | output tokens/s | mean TTFT, ms | mean TPOT, ms | same"
    assert any(row.startswith(head) for row in rows)
    numbers = "1,234 (1.00) | 30.0 | 7.2"  # half a thousandth rounds to even
    assert f"| 1024/128 | all at once | plain vLLM | {numbers} | first run |" in rows
    assert f"| 1024/128 | 4 in flight | plain vLLM | {numbers} | 1 of 2 |" in rows
    assert f"| 1024/128 | 4 in flight | CoRun isolate | {numbers} | 2 of 2 |" in rows
    assert "- CoRun pack failed over HTTP: no memory" in rows


def test_the_summary_gives_ranges_bits_and_how_many_cells(results):
    directory, write = results
    for repeat, last in ((0, "b"), (1, "c")):
        write(mode="std", repeat=repeat, order_seed=repeat, digests=("a", last))
        write(mode="isolate", repeat=repeat, order_seed=repeat, wall_s=5.0)
    beside = {"settings": {**bench_files.SETTINGS, "engines_beside": 3}}
    write(mode="std", arrivals="closed:4", **beside)
    write(mode="nosplit", arrivals="closed:4", **beside)
    lines = readme_bench.bench_summary(directory, "page.md").splitlines()
    assert lines[0] == (
        "| model shape | `max_num_seqs` | cells | plain vLLM | CoRun isolate |"  # no ablation
    )
    assert lines[2] == (
        "| [tiny](page.md#tiny-gpu), 4 engines up | 4 | 2 | 1.00, 1 of 2 equal | "
        "0.80 (1 of 2 cells), 2 of 2 equal |"
    )
    assert lines[-1].startswith("Engines up:")


def test_every_directory_of_results_is_on_the_page_and_in_the_readme():
    page = (ROOT / "docs/results.md").read_text()
    directories = {path.name for path in (ROOT / "benchmarks/results").iterdir() if path.is_dir()}
    plans = {path.parts[-2] for path in (ROOT / "benchmarks/results").glob("*/plan.json")}
    headings = set(re.findall(r"^#+ (.+)$", page, re.M))
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    readme = (ROOT / "README.md").read_text()
    assert directories <= headings
    assert plans <= set(re.findall(r"docs/results\.md#([a-z0-9-]+)", readme)) <= anchors
