"""README.md's table of benchmarks: its numbers are those of the run files."""

import json
import sys
from pathlib import Path

import bench_files
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import readme_bench  # noqa: E402


@pytest.fixture
def results(tmp_path):
    """A directory of results with one benchmark in it; `write` adds a run to it."""
    directory = tmp_path / "tiny-gpu"
    directory.mkdir()
    (directory / "plan.json").write_text(json.dumps({"format": "corun-bench-plan/1"}))

    def write(**run):
        number = len(list(directory.glob("run-*.json")))
        (directory / f"run-{number}.json").write_text(json.dumps(bench_files.run(**run)))

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
    assert table[0].startswith("tiny shape, ") and "([records](results/tiny-gpu)):" in table[0]
    heads = "| in/out | requests | arrivals | plain vLLM | CoRun isolate | CoRun certified |"
    assert table[2] == heads
    rows = set(table[4:])
    assert "| 1024/128 | 2 | all at once | 2 (1.00) | 1 (0.80) | not run |" in rows
    assert "| 8/4 | 2 | 1 in flight | 2 (1.00) | not run | not run |" in rows
    assert "| 1024/128 | 2 | 2.0 a second | not run | not run | 1 |" in rows
    assert "|  |  | equal | 1 of 2 equal | 2 of 2 equal | not checked |" in rows


def test_the_readme_is_up_to_date():
    body = readme_bench.bench_tables(ROOT / "benchmarks/results", "benchmarks/results")
    assert body.count("([records]") == len(list((ROOT / "benchmarks/results").glob("*/plan.json")))
    assert body in (ROOT / "README.md").read_text()
