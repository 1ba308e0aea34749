"""`corun bench run` around its processes: order, resuming, and what it refuses to mix."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")
import bench_runs
from bench_runs import parse

from corun.bench import run as bench_run
from corun.bench import run_child
from corun.bench.run_directory import run_file
from corun.bench.run_order import Process, groups


@pytest.fixture
def model(tmp_path):
    return bench_runs.write_model(tmp_path / "model")


@pytest.fixture
def made(monkeypatch):
    return bench_runs.without_processes(monkeypatch)


def test_each_repeat_begins_with_another_mode():
    found = groups(["a", "b", "c"], 2, one_engine=False, together=None)
    assert [[p.mode for p in group] for group in found] == [
        ["a"],
        ["b"],
        ["c"],
        ["b"],
        ["c"],
        ["a"],
    ]
    assert [group[0].repeats for group in found] == [(0,)] * 3 + [(1,)] * 3
    assert groups(["a", "b"], 3, one_engine=True, together=None) == [
        [Process("a", (0, 1, 2))],
        [Process("b", (0, 1, 2))],
    ]


def test_files_are_named_by_what_they_hold():
    names = {
        run_file("isolate@v1", workload, arrivals, repeat)
        for workload in ("1024/128", "burstgpt")
        for arrivals in ("all", "closed:32")
        for repeat in (0, 1)
    }
    assert len(names) == 8
    assert "run-1024_128-closed_32-isolate@v1-1.json" in names


def test_all_runs_are_made_once(model, tmp_path, made, capsys):
    out = tmp_path / "out"
    assert bench_run.run(parse(model, out)) == 0
    assert len(list(out.glob("run-*.json"))) == 4
    assert [spec.mode for spec in made] == ["std", "isolate", "isolate", "std"]
    assert made[0].engine_args["enable_prefix_caching"] is False
    assert [item.order_seed for spec in made for item in spec.items] == [0, 0, 1, 1]
    assert "4 runs made, 0 kept" in capsys.readouterr().out
    made.clear()
    assert bench_run.run(parse(model, out)) == 0
    assert not made
    assert "0 runs made, 4 kept" in capsys.readouterr().out


def test_a_benchmark_that_was_stopped_goes_on(model, tmp_path, made):
    out = tmp_path / "out"
    bench_run.run(parse(model, out))
    missing = out / run_file("isolate", "8/4", "all", 1)
    missing.unlink()
    made.clear()
    bench_run.run(parse(model, out))
    assert [(spec.mode, len(spec.items)) for spec in made] == [("isolate", 1)]
    assert missing.exists()


def test_another_benchmarks_directory_is_refused(model, tmp_path, made):
    out = tmp_path / "out"
    bench_run.run(parse(model, out))
    for flags, word in (
        (["--temperature", "0"], "temperature"),
        (["--count", "3"], "8/4"),
        (["--cell", "8/4 closed:1 3", "--count", "3"], "8/4 all"),
        (["--seed", "1"], "seed"),
        (["--engine-arg", "block_size=32"], "engine_args"),
    ):
        with pytest.raises(ValueError, match=f"another benchmark.*{word}"):
            bench_run.run(parse(model, out, *flags))
    bench_run.run(parse(model, out, "--workloads", "16/4"))  # more of the same is fine
    assert len(list(out.glob("run-*.json"))) == 8
    bench_run.run(parse(model, out, "--temperature", "0", "--fresh"))
    assert len(list(out.glob("run-*.json"))) == 4


def test_cells_have_counts_of_their_own(model, tmp_path, made):
    out = tmp_path / "out"
    bench_run.run(parse(model, out, "--cell", "8/4 closed:1 1x1", "--cell", "8/4 closed:2 2"))
    assert len(list(out.glob("run-8_4-closed_1-std-*.json"))) == 1
    assert len(list(out.glob("run-8_4-closed_2-std-*.json"))) == 2
    counts = {}
    for item in made[0].items:
        requests = json.loads(Path(item.requests).read_text())["requests"]
        counts.setdefault(item.arrivals, set()).add(len(requests))
    assert counts == {"all": {2}, "closed:1": {1}, "closed:2": {2}}
    plan = json.loads((out / "plan.json").read_text())["requests"]
    assert set(plan) == {"8/4 all", "8/4 closed:1", "8/4 closed:2"}
    assert plan["8/4 all"] == plan["8/4 closed:2"] != plan["8/4 closed:1"]


def test_a_damaged_run_file_is_not_taken_for_a_result(model, tmp_path, made):
    out = tmp_path / "out"
    bench_run.run(parse(model, out))
    file = out / run_file("std", "8/4", "all", 0)
    file.write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match=file.name):
        bench_run.run(parse(model, out))


def test_runs_of_unknown_origin_are_left_alone(model, tmp_path, made):
    out = tmp_path / "out"
    out.mkdir()
    (out / "run-x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"without a plan\.json"):
        bench_run.run(parse(model, out))


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--modes", "fast"], "there is no mode"),
        (["--workloads", "bust"], "workload"),
        (["--arrivals", "closed"], "closed"),
        (["--repeats", "0"], "repeats"),
        (["--workloads", "60/60"], "max_model_len"),
        (["--together", "-1"], "--together"),
        (["--sweep-rows", "4,x"], "--sweep-rows"),
        (["--sweep-rows", "4,0"], "--sweep-rows"),
        (["--sweep-rows", "4,8", "--rows", "4"], "without --rows"),
    ],
)
def test_bad_input_is_one_error_before_any_engine(model, tmp_path, made, flags, word):
    with pytest.raises(ValueError, match=word):
        bench_run.run(parse(model, tmp_path / "out", *flags))
    assert not made


def test_a_mode_that_fails_ends_the_command_with_2(model, tmp_path, monkeypatch, capsys):
    def execute(given, timeout_s, outcome):
        for started in given:
            outcome.failed[started.name] = "its process ended with status 1, see above"

    monkeypatch.setattr(bench_run, "_execute", execute)
    assert bench_run.run(parse(model, tmp_path / "out")) == 2
    assert "std failed" in capsys.readouterr().err


def test_a_run_file_holds_microseconds_and_no_more():
    given = {"a": [1.23456789, 2], "b": {"c": 0.1}, "d": True, "e": None, "f": "1.23456789"}
    kept = run_child.rounded(given)
    assert kept == {"a": [1.234568, 2], "b": {"c": 0.1}, "d": True, "e": None, "f": "1.23456789"}
