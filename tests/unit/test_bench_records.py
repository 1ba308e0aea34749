"""Reading recorded files: what is refused, and which runs are put beside each other."""

import json

import bench_files
import pytest
from bench_files import HARDWARE, SETTINGS, STEPS, VERSIONS, write

from corun.bench import operator_records, results, server_records
from corun.bench.fields import RecordError
from corun.bench.operator_records import read_operators, read_step_times
from corun.bench.records import read_run
from corun.bench.results import read_directory
from corun.bench.sweeps import concurrency_sweeps, main_groups, padding_sweeps


def closed(mode, n, slots, **more):
    """A run of a closed loop."""
    return bench_files.run(mode, arrivals=f"closed:{n}", slots=slots, **more)


def read_only(directory, record):
    (directory / "run.json").write_text(json.dumps(record))
    return read_run(directory / "run.json")


def test_a_run_is_read_as_recorded(tmp_path):
    found = read_only(tmp_path, bench_files.run(report={"violation_count": 0}))
    assert (found.mode, found.workload, found.arrivals) == ("std", "1024/128", "all")
    assert (found.wall_s, found.start_s, found.warmup_s) == (4.0, 20.0, 1.0)
    assert found.max_num_seqs == 4
    assert [(r.id, r.n_in, r.n_out, r.digest) for r in found.requests] == [
        ("0", 10, 5, "a"),
        ("1", 20, 1, "b"),
    ]
    assert found.steps.rows_run == (10, 20, 4, 4)
    assert found.steps.rows_used() == [10, 20, 2, 2]
    assert found.report == {"violation_count": 0}


def changed(name, value):
    """A run file with one of its requests' fields changed."""
    record = bench_files.run()
    record["requests"][0][name] = value
    return record


def without(name):
    record = bench_files.run()
    del record[name]
    return record


DAMAGED = {
    "a field is missing": (without("wall_s"), "wall_s should be"),
    "an optional field is missing": (without("domain"), "domain should be"),
    "a number is a text": (bench_files.run(wall_s="4"), "wall_s should be"),
    "a number is a truth value": (bench_files.run(count=True), "count should be"),
    "a number is below 0": (changed("arrival_s", -1.0), "requests.0., is damaged: arrival_s"),
    "no output": (changed("n_out", 0), "n_out should be"),
    "time goes back": (changed("first_token_s", 3.5), "first_token_s should be"),
    "fewer requests than stated": (bench_files.run(count=3), "2 requests and states 3"),
    "a request twice": (changed("id", "1"), "there twice"),
    "ended before its requests": (bench_files.run(wall_s=2.5), "before its last request"),
    "columns of two lengths": (
        bench_files.run(steps={**STEPS, "running": [1, 2]}),
        "running should be a list of 4",
    ),
    "steps out of order": (
        bench_files.run(steps={**STEPS, "end_s": [1.0, 3.0, 2.0, 4.0]}),
        "order of time",
    ),
    "fewer rows than tokens": (
        bench_files.run(steps={**STEPS, "rows_run": [10, 20, 1, 4]}),
        "fewer rows than",
    ),
    "more than the whole cache": (
        bench_files.run(steps={**STEPS, "kv_used": [0.1, 0.2, 0.3, 1.5]}),
        r"kv_used\[3\]",
    ),
    "arrivals of no kind": (bench_files.run(arrivals="closed:none"), "arrivals should be"),
    "another version": (bench_files.run(format="corun-bench-run/2"), "format 'corun-bench-run/2'"),
    "no slots": (bench_files.run(settings={}), "max_num_seqs should be"),
}


@pytest.mark.parametrize("record, message", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_runs_are_refused(tmp_path, record, message):
    with pytest.raises(RecordError, match=message) as e:
        read_only(tmp_path, record)
    assert "run.json" in str(e.value)


@pytest.mark.parametrize("text", ["", '{"format": "corun-bench-run/1", "mode"', "[1, 2]", "\x00"])
def test_files_that_are_no_json_object_are_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RecordError, match=r"run\.json"):
        read_run(tmp_path / "run.json")


def test_not_a_number_is_refused(tmp_path):
    with pytest.raises(RecordError, match="wall_s"):
        read_only(tmp_path, bench_files.run(wall_s=float("nan")))


def test_foreign_files_are_refused(tmp_path):
    write(tmp_path, bench_files.run(), {"benchmark": "throughput"})
    with pytest.raises(RecordError, match=r"record-1\.json is no file of this version"):
        read_directory(tmp_path)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(RecordError, match="corun bench run"):
        read_directory(tmp_path)


def test_what_may_lie_beside_runs(tmp_path):
    beside = [{"format": f"corun-bench-{what}/1"} for what in ("requests", "plan", "summary")]
    write(tmp_path, bench_files.run(), *beside)
    assert len(read_directory(tmp_path).runs) == 1


NOT_COMPARABLE = {
    "other hardware": ({"hardware": {**HARDWARE, "device": "NVIDIA H100"}}, "device .*H200.*H100"),
    "other versions": ({"versions": {**VERSIONS, "vllm": "0.32.0"}}, "vllm '0.25.0' and '0.32.0'"),
    "a version more": ({"versions": {**VERSIONS, "triton": "3"}}, "triton None and '3'"),
    "other requests": ({"requests_digest": "other"}, "request sets differ"),
    "no seeds": ({"settings": {**SETTINGS, "seeded": False}}, "seeded True and False"),
    "other settings": (
        {"settings": {**SETTINGS, "dtype": "float32"}},
        "dtype 'bfloat16' and 'float32'",
    ),
}


@pytest.mark.parametrize("difference, message", NOT_COMPARABLE.values(), ids=NOT_COMPARABLE)
def test_runs_that_differ_are_not_compared(tmp_path, difference, message):
    write(tmp_path, bench_files.run("std"), bench_files.run("bi", **difference))
    with pytest.raises(RecordError, match=message):
        read_directory(tmp_path)


def test_other_requests_of_another_workload_or_load_may_lie_beside(tmp_path):
    write(
        tmp_path,
        bench_files.run("std"),
        bench_files.run("std", "burstgpt"),
        closed("std", 2, 4, requests_digest="fewer"),
    )
    groups = read_directory(tmp_path).groups
    assert [(g.load.arrivals, [c.workload for c in g.comparisons]) for g in groups] == [
        ("all", ["burstgpt", "1024/128"]),
        ("closed:2", ["1024/128"]),
    ]


def test_a_run_recorded_twice_is_refused(tmp_path):
    write(tmp_path, bench_files.run(), bench_files.run())
    with pytest.raises(RecordError, match=r"record-1\.json and .*record-0\.json record the same"):
        read_directory(tmp_path)


def test_modes_and_repeats_are_in_order(tmp_path):
    modes = ("certified", "isolate@v1", "bi", "std", "mine")
    write(tmp_path, bench_files.run("bi", repeat=1), *(bench_files.run(mode) for mode in modes))
    (found,) = read_directory(tmp_path).groups
    assert found.modes == ["std", "bi", "isolate@v1", "certified", "mine"]
    assert [run.repeat for run in found.runs("bi")] == [0, 1]


def test_concurrency_sweeps(tmp_path):
    following = [closed(mode, n, n) for mode in ("std", "isolate") for n in (1, 8, 32)]
    fixed = [closed("std", n, 256) for n in (8, 256)]
    write(tmp_path, *following, *fixed, closed("pack", 32, 32), bench_files.run("std"))
    groups = read_directory(tmp_path).groups
    sweeps = concurrency_sweeps(groups)
    assert {s.slots: {mode: list(p) for mode, p in s.points.items()} for s in sweeps} == {
        "max_num_seqs = concurrency": {"std": [1, 8, 32, 256], "isolate": [1, 8, 32]},
        "max_num_seqs = 256": {"std": [8, 256]},
    }
    # Only the heaviest closed loop stands for itself, beside the other kind of arrivals.
    assert [g.load.arrivals for g in main_groups(groups)] == ["all", "closed:256"]


def test_padding_sweeps_hold_one_request_set(tmp_path):
    padded = [closed("isolate", 1, n) for n in (1, 8, 64)]
    # The first point of a concurrency sweep, with a request set of its own.
    other = closed("isolate", 1, 16, requests_digest="other")
    write(tmp_path, *padded, closed("std", 1, 8), other)
    groups = read_directory(tmp_path).groups
    (found,) = padding_sweeps(groups)
    assert {mode: list(points) for mode, points in found.points.items()} == {
        "std": [8],
        "isolate": [1, 8, 64],
    }
    assert main_groups(groups) == []
    assert concurrency_sweeps(groups) == []


def test_operator_files(tmp_path):
    skipped = [{"operator": "matmul", "rows": 1, "n": 1, "k": 1}]
    write(tmp_path, bench_files.operators(notes=["a note"], skipped=skipped))
    found = read_operators(tmp_path / "record-0.json")
    assert [(op.operator, op.k, op.n, op.rows) for op in found.operators[-2:]] == [
        ("rmsnorm", None, 4096, 2),
        ("rmsnorm", None, 4096, 8),
    ]
    assert [op.ratio for op in found.operators] == [2.0, 1.5, 12.5, 2.0, 8.0]
    assert found.notes == ("a note", "1 shapes were not measured: the time was up")


def test_operators_without_batch_invariant_kernels(tmp_path):
    record = bench_files.operators()
    for op in record["operators"]:
        op["batch_invariant_us"] = None
    write(tmp_path, record)
    assert {op.ratio for op in read_operators(tmp_path / "record-0.json").operators} == {None}


@pytest.mark.parametrize("value", [0, -1.0, "4", True])
def test_damaged_operator_files_are_refused(tmp_path, value):
    record = bench_files.operators()
    record["operators"][2]["standard_us"] = value
    write(tmp_path, record)
    with pytest.raises(RecordError, match=r"operators\[2\], is damaged: standard_us"):
        read_operators(tmp_path / "record-0.json")


def test_step_files(tmp_path):
    write(tmp_path, bench_files.step_times(failed={"pack": "no memory"}))
    found = read_step_times(tmp_path / "record-0.json")
    assert found.steps[0].by_type == {"matmul": 16_000.0, "attention": 3000.0, "moe": 0.0}
    assert found.notes == ("CoRun pack could not run: no memory",)


def test_damaged_step_files_are_refused(tmp_path):
    record = bench_files.step_times()
    record["steps"][1]["by_type"]["matmul"] = None
    write(tmp_path, record)
    with pytest.raises(RecordError, match=r"steps\[1\], is damaged: by_type"):
        read_step_times(tmp_path / "record-0.json")


def test_server_files(tmp_path):
    write(tmp_path, bench_files.server())
    (found,) = read_directory(tmp_path).servers
    assert [(r.mode, r.arrivals, r.equal) for r in found.runs] == [
        ("std", "all", None),
        ("std", "closed:4", (1, 2)),
        ("isolate", "all", None),
        ("isolate", "closed:4", (2, 2)),
    ]
    assert found.runs[0].numbers["output_throughput"] == 1234.5


def test_server_files_of_different_requests_are_refused(tmp_path):
    record = bench_files.server()
    record["runs"][2]["requests_digest"] = "other"
    write(tmp_path, record)
    with pytest.raises(RecordError, match="different requests of 1024/128"):
        read_directory(tmp_path)


def test_damaged_server_files_are_refused(tmp_path):
    record = bench_files.server()
    record["runs"][1]["result"] = {**record["runs"][1]["result"], "p50_tpot_ms": None}
    write(tmp_path, record)
    with pytest.raises(RecordError, match=r"runs\[1\], result, is damaged: p50_tpot_ms"):
        read_directory(tmp_path)


def test_the_formats_are_those_that_are_written():
    from corun.bench import operators, requests, server, step_times, summary

    assert operators.FORMAT == operator_records.OPERATORS_FORMAT
    assert step_times.FORMAT == operator_records.STEPS_FORMAT
    assert server.FORMAT == server_records.FORMAT
    assert {requests.FORMAT, summary.FORMAT} < set(results.OTHER_FORMATS)


def test_a_measured_operator_is_read_back(tmp_path):
    from corun.bench.operator_bench import Measured, Point
    from corun.bench.timing import Timing

    times = Timing(3.0, 5), Timing(6.0, 5)
    record = bench_files.operators(
        operators=[
            Measured(Point("matmul", 1, 512, 256), *times).to_mapping(),
            Measured(Point("mean", 8, 512), times[0], None).to_mapping(),
        ]
    )
    write(tmp_path, record)
    first, second = read_operators(tmp_path / "record-0.json").operators
    assert (first.k, first.n, first.rows, first.ratio) == (256, 512, 1, 2.0)
    assert (second.k, second.n, second.rows, second.ratio) == (None, 512, 8, None)
