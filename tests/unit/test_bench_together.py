"""`corun bench run --together` and `--sweep-rows`: what starts at once, and whose run is when."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import bench_runs
from bench_runs import parse

from corun.bench import run as bench_run
from corun.bench.records import read_run
from corun.bench.results import read_directory
from corun.bench.run_directory import run_file
from corun.bench.run_order import groups
from corun.bench.shared_gpu import shared_engine_args
from corun.bench.sweeps import padding_sweeps
from corun.engine import arguments


@pytest.fixture
def model(tmp_path):
    return bench_runs.write_model(tmp_path / "model")


@pytest.fixture
def made(monkeypatch):
    return bench_runs.without_processes(monkeypatch)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts tests/unit/bench_child.py in the place of the engines' processes; gives their log."""
    log = tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.setenv("BENCH_CHILD_LOG", str(log))
    monkeypatch.setattr(bench_run, "CHILD", "bench_child")

    def told():
        return [tuple(line.split()) for line in log.read_text().splitlines()]

    return SimpleNamespace(told=told, forget=log.unlink)


@pytest.mark.parametrize(
    ("together", "modes"),
    [(0, ["abc"]), (2, ["ab", "c"]), (1, ["a", "b", "c"]), (3, ["abc"]), (9, ["abc"])],
)
def test_engines_that_start_at_once_share_them_over_the_repeats(together, modes):
    found = groups(["a", "b", "c"], 2, one_engine=False, together=together)
    assert ["".join(p.mode for p in group) for group in found] == modes
    assert {p.repeats for group in found for p in group} == {(0, 1)}


TOGETHER = ("--together", "--modes", "std,isolate,bi", "--workloads", "8/4,9/4")
IN_TURN = [
    (mode, workload, repeat)
    for workload, repeat, order in (
        ("8/4", "0", ("std", "isolate", "bi")),
        ("8/4", "1", ("isolate", "bi", "std")),
        ("9/4", "0", ("bi", "std", "isolate")),
        ("9/4", "1", ("std", "isolate", "bi")),
    )
    for mode in order
]


def test_modes_that_are_up_together_run_side_by_side(model, tmp_path, stand_in, capsys):
    out = tmp_path / "out"
    assert bench_run.run(parse(model, out, *TOGETHER)) == 0
    told = stand_in.told()
    assert sorted(told[:3]) == [("up", "bi"), ("up", "isolate"), ("up", "std")]
    assert told[3:] == IN_TURN
    assert "12 runs made, 0 kept" in capsys.readouterr().out
    runs = [read_run(path) for path in out.glob("run-*.json")]
    assert [run.settings["engines_beside"] for run in runs] == [2] * 12


def test_engines_come_in_groups(model, tmp_path, stand_in):
    assert bench_run.run(parse(model, tmp_path / "out", *TOGETHER, "--together", "2")) == 0
    told = stand_in.told()
    assert sorted(told[:2]) == [("up", "isolate"), ("up", "std")]
    assert [line[0] for line in told[2:10]] == ["std", "isolate", "isolate", "std"] * 2
    assert told[10] == ("up", "bi") and [line[0] for line in told[11:]] == ["bi"] * 4


def test_what_was_stopped_goes_on_together_in_the_same_order(model, tmp_path, stand_in, capsys):
    out = tmp_path / "out"
    bench_run.run(parse(model, out, *TOGETHER))
    missing = [IN_TURN[n] for n in (1, 4, 6, 9, 10)]  # one of them is the only one of its round
    for mode, workload, repeat in missing:
        (out / run_file(mode, workload, "all", repeat)).unlink()
    stand_in.forget()
    capsys.readouterr()
    assert bench_run.run(parse(model, out, *TOGETHER)) == 0
    assert stand_in.told()[3:] == missing
    assert "5 runs made, 7 kept" in capsys.readouterr().out


@pytest.mark.parametrize("fails_at", ["isolate", "isolate 8/4 1"])
def test_one_of_several_fails(model, stand_in, monkeypatch, capsys, fails_at):
    monkeypatch.setenv("BENCH_CHILD_FAILS_AT", fails_at)
    out, made = model.parent / "out", len(fails_at.split()) // 2  # none, or one run
    assert bench_run.run(parse(model, out, *TOGETHER)) == 2
    assert len(list(out.glob("run-*-isolate-*.json"))) == made
    told = [line for line in stand_in.told() if line[0] != "up"]
    assert [line for line in told if line[0] != "isolate"] == [
        line for line in IN_TURN if line[0] != "isolate"
    ]
    said = capsys.readouterr()
    assert f"{8 + made} runs made" in said.out
    assert "isolate failed: its process ended with status 1" in said.err


def test_a_sweep_over_rows_is_a_benchmark_for_each(model, tmp_path, stand_in, capsys):
    out = tmp_path / "out"
    flags = (
        "--sweep-rows",
        "2,8",
        "--together",
        "--arrivals",
        "closed:1",
        "--modes",
        "std,isolate",
    )
    assert bench_run.run(parse(model, out, *flags)) == 0
    told = stand_in.told()
    assert sorted(line[1] for line in told[:4]) == ["isolate", "isolate", "std", "std"]
    assert [line[0] for line in told[4:]] == [
        "std",
        "std",
        "isolate",
        "isolate",
        "std",
        "isolate",
        "isolate",
        "std",
    ]
    assert "8 runs made" in capsys.readouterr().out
    for rows in (2, 8):
        runs = [read_run(path) for path in (out / f"rows-{rows}").glob("run-*.json")]
        assert [run.max_num_seqs for run in runs] == [rows] * 4
        assert json.loads((out / f"rows-{rows}" / "plan.json").read_text())["rows"] == rows
    (sweep,) = padding_sweeps(read_directory(out).groups)
    assert {mode: list(points) for mode, points in sweep.points.items()} == {
        "std": [2, 8],
        "isolate": [2, 8],
    }
    stand_in.forget()
    assert bench_run.run(parse(model, out, *flags[:2], "--arrivals", "closed:1")) == 0
    assert "0 runs made, 8 kept" in capsys.readouterr().out


def test_engines_of_a_sweep_fail_one_by_one(model, tmp_path, monkeypatch, capsys):
    def execute(given, timeout_s, outcome):
        seen.extend(started.name for started in given)
        outcome.failed[given[0].name] = "no memory"

    seen = []
    monkeypatch.setattr(bench_run, "_execute", execute)
    flags = ("--sweep-rows", "2,8", "--modes", "isolate")
    assert bench_run.run(parse(model, tmp_path / "out", *flags)) == 2
    assert seen == ["isolate with 2 rows", "isolate with 8 rows"]
    assert "isolate with 8 rows failed: no memory" in capsys.readouterr().err


def test_a_gpu_is_shared_by_engines_of_known_size(model, tmp_path, made, monkeypatch):
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(ValueError, match=r"^2 engines .* kv_cache_memory_bytes=\d+ "):
        bench_run.run(parse(model, tmp_path / "out", "--together"))
    assert not made and not (tmp_path / "out").exists()
    known = ("--engine-arg", "kv_cache_memory_bytes=1000")
    assert bench_run.run(parse(model, tmp_path / "a", "--together", *known)) == 0
    assert bench_run.run(parse(model, tmp_path / "b", *known, "--one-engine")) == 0
    shares = [spec.engine_args["gpu_memory_utilization"] for spec in made]
    assert shares == [0.45, 0.45, 0.85, 0.85]
    assert [len(spec.items) for spec in made] == [2] * 4
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in "ab"]
    assert plans[0] == plans[1]  # what one of them made, the other can go on with


def test_shares_of_a_gpu():
    known = {"kv_cache_memory_bytes": 1000, "dtype": "half"}
    assert shared_engine_args(known, 3, on_cpu=False) == {**known, "gpu_memory_utilization": 0.3}
    less = {**known, "gpu_memory_utilization": 0.1}
    assert shared_engine_args(less, 3, on_cpu=False) == less
    for engines, on_cpu in ((1, False), (1, True), (3, True)):
        assert shared_engine_args({"dtype": "half"}, engines, on_cpu=on_cpu) == {"dtype": "half"}
