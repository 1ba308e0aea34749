"""`corun bench` on real engines: modes side by side, a killed run, and the page made of it."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corun.bench import report
from corun.bench import run as bench_run
from corun.bench.mode_process import environment

MODES = ("nosplit+prefill", "isolate")
FLAGS = (
    *("--workloads", "24/6", "--arrivals", "closed:4", "--count", "6", "--repeats", "2"),
    *("--rows", "4", "--tokens", "256", "--max-model-len", "256", "--one-engine"),
    *("--modes", ",".join(MODES), "--engine-arg", "kv_cache_memory_bytes=500000000"),
)


def parse(model, out, *flags):
    parser = argparse.ArgumentParser()
    bench_run.add_arguments(parser)
    return parser.parse_args([model, "--out", str(out), *FLAGS, *flags])


@pytest.fixture(scope="module")
def results(shallow_model, tmp_path_factory):
    """A benchmark that was killed after its first run file, and then run again to its end."""
    out = tmp_path_factory.mktemp("bench") / "results"
    code = "import sys; from corun.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "run", shallow_model, "--out", str(out), *FLAGS]
    first = subprocess.Popen(command, env=environment("std"), start_new_session=True)
    deadline = time.monotonic() + 240
    while not any(out.glob("run-*.json")) and time.monotonic() < deadline:
        assert first.poll() is None, "it ended before its first run"
        time.sleep(0.05)

    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = {path.name: path.read_bytes() for path in out.glob("run-*.json")}
    status = bench_run.run(parse(shallow_model, out))
    return out, before, status


def test_a_killed_benchmark_keeps_whole_runs_and_goes_on(results):
    out, before, status = results
    assert status == 0
    assert 1 <= len(before) < 4
    files = sorted(out.glob("run-*.json"))
    assert len(files) == 2 * len(MODES)
    for name, content in before.items():
        assert (out / name).read_bytes() == content
    assert not list(out.glob("*.tmp"))


def test_every_mode_answered_the_same_requests(results):
    runs = [json.loads(path.read_text()) for path in sorted(results[0].glob("run-*.json"))]
    assert {run["mode"] for run in runs} == set(MODES)
    assert len({run["requests_digest"] for run in runs}) == 1
    assert all([r["n_out"] for r in run["requests"]] == [6] * 6 for run in runs)
    domains = {run["mode"]: run["domain"] for run in runs}
    assert domains["nosplit+prefill"] is None and domains["isolate"].startswith("corun1-")


def test_steps_are_what_each_mode_promises(results):
    for path in results[0].glob("run-*.json"):
        run = json.loads(path.read_text())
        steps = run["steps"]
        rows = list(
            zip(steps["prefill_tokens"], steps["decode_rows"], steps["rows_run"], strict=True)
        )
        assert sum(steps["prefill_tokens"]) == 6 * 24
        assert sum(steps["decode_rows"]) == 6 * 5
        if run["mode"] == "isolate":
            assert {ran for prefill, _, ran in rows if not prefill} == {4}
            assert {decode for prefill, decode, _ in rows if not prefill} == {2, 4}
        else:
            assert all(ran == prefill + decode for prefill, decode, ran in rows)
        assert all(prefill in (0, 24) for prefill, _, _ in rows)
        assert not any(prefill and decode for prefill, decode, _ in rows)


def test_isolate_repeats_itself_in_another_order(results):
    first, second = (
        json.loads((results[0] / f"run-24_6-closed_4-isolate-{repeat}.json").read_text())
        for repeat in (0, 1)
    )
    assert (first["order_seed"], second["order_seed"]) == (0, 1)
    digests = [[r["digest"] for r in run["requests"]] for run in (first, second)]
    print(f"compared {len(digests[0])} digests of 6 tokens and 6 logprobs each")
    assert len(digests[0]) == 6 and digests[0] == digests[1]
    assert len(set(digests[0])) == 6


def test_engines_that_are_up_together_give_the_same_bits_in_turn(results, shallow_model, tmp_path):
    out = tmp_path / "together"
    assert bench_run.run(parse(shallow_model, out, "--together")) == 0
    files = sorted(out.glob("run-*.json"), key=lambda path: path.stat().st_mtime_ns)
    runs = [json.loads(path.read_text()) for path in files]
    assert [(run["mode"], run["repeat"]) for run in runs] == [
        (MODES[0], 0),
        (MODES[1], 0),
        (MODES[1], 1),
        (MODES[0], 1),
    ]
    assert [run["settings"]["engines_beside"] for run in runs] == [1] * 4
    for path, run in zip(files, runs, strict=True):
        if run["mode"] == "isolate":
            alone = json.loads((results[0] / path.name).read_text())
            assert alone["settings"]["engines_beside"] == 0
            digests = [[r["digest"] for r in made["requests"]] for made in (alone, run)]
            print(f"compared {len(digests[0])} digests of 6 tokens and 6 logprobs each")
            assert len(digests[0]) == 6 and digests[0] == digests[1]


def test_the_report_is_made_of_the_files(results):
    page = report.write(results[0])
    text = page.read_text()
    assert "CoRun isolate" in text and "+ isolated prefill" in text
    assert list((results[0] / "figures").glob("*.png"))
    assert Path(page).name == "report.html"
