"""README.md's tables are what benchmarks/results say, and nothing else."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import readme_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def record(**modes):
    return {
        "benchmark": "throughput",
        "model": "m",
        "settings": {"requests": 3, "max_num_seqs": 8},
        "hardware": {"vllm": "0", "gpu": "G"},
        "modes": [
            {
                "mode": name,
                "workloads": {"1/2": {"tokens_per_s": speed}},
                "determinism": {"requests": 32, "tokens_equal": 30, "logprobs_equal": 1},
            }
            for name, speed in modes.items()
        ],
    }


def throughput(*records):
    return readme_tables.throughput_table({f"t{i}.json": r for i, r in enumerate(records)})


def test_shares_are_of_plain_vllm_in_the_same_record():
    table = throughput(record(isolate=50.0, std=200.0))
    assert "| plain vLLM | 200 (1.00) | 30/32, 1/32 |" in table
    assert "| CoRun `isolate` | 50 (0.25) | 30/32, 1/32 |" in table


def test_a_failed_mode_is_left_out_and_a_record_without_plain_is_an_error():
    failed = record(std=200.0)
    failed["modes"].append({"mode": "bi", "error": "timed out"})
    assert "BATCH_INVARIANT" not in throughput(failed)
    with pytest.raises(ValueError, match="no plain vLLM"):
        throughput(record(isolate=50.0))


def test_what_a_mode_lacks_is_said_to_be_not_measured_and_why():
    cut = record(std=200.0, isolate=50.0)
    plain, isolate = cut["modes"]
    plain["workloads"]["3/4"] = {"tokens_per_s": 100.0}
    isolate["workloads"]["5/6"] = {"tokens_per_s": 7.0}
    del isolate["determinism"]
    isolate["note"], cut["note"] = "stopped by the time limit", "beside another run"
    table = throughput(cut)
    assert "| plain vLLM | 200 (1.00) | 100 (1.00) | not measured | 30/32, 1/32 |" in table
    assert "| CoRun `isolate` | 50 (0.25) | not measured | 7 | not measured |" in table
    assert "- CoRun `isolate`: stopped by the time limit." in table
    assert "- beside another run." in table


def test_records_of_one_model_can_be_told_apart():
    other = record(std=1.0)
    other["model"] = "other"
    table = throughput(record(std=200.0), other, record(std=300.0))
    assert "m shape, run 1 of 2, random" in table and "(benchmarks/results/t0.json)" in table
    assert "m shape, run 2 of 2, random" in table and "(benchmarks/results/t2.json)" in table
    assert "other shape, random" in table


def claim(name, classes, variant=()):
    return {"name": name, "classes": [[[n, n]] for n in classes], "variant": variant, "values": 10}


def certified(rows, held, engine):
    steps = [
        {"operation": "model", "name": name, "holds": holds, "values": 1}
        for name, holds in held.items()
    ]
    domain = {"dtype": "torch.bfloat16", "device": "G"}
    return {
        "command": "corun certify M --budget 3",
        "certificate": {"domain": domain, "rows": rows, "steps": steps, "engine": engine},
        "policies": [
            {"policy": "certified", "allowed": False},
            {"policy": "isolate", "allowed": True},
        ],
        "seconds": 12.34,
    }


def test_a_certificate_is_told_in_one_line():
    rows = [claim("A", [1]), claim("B", [1, 2]), claim("C", [1, 2, 3], [[4, 4]]), claim("D", [1])]
    held = {"decode_rows": True, "mixed": False}
    engine = {"equal": True, "tokens": 1000, "logprobs": 20}
    given = {"c.json": certified(rows, held, engine), "d.json": certified(rows[:1], held, None)}
    first, second = readme_tables.certificate_table(given).splitlines()[2:4]
    assert first == (
        "| [M](benchmarks/results/c.json), bfloat16, G | 1: 2 of 4 operations; 2: B; 3: C; "
        "depends on place: C | model: 1 of 2 (not mixed) | 42 | "
        "1,000 tokens, 20 logprobs: equal | 12.3 | `isolate` |"
    )
    assert (
        "| 1: 1 of 1 operations | model: 1 of 2 (not mixed) | 12 | not checked | 12.3 |" in second
    )
    engine["equal"] = False
    assert "20 logprobs: differ |" in readme_tables.certificate_table(given)
    given["d.json"]["note"] = "beside others"
    assert "\n- M: beside others.\n" in readme_tables.certificate_table(given)


def test_a_verification_is_told_in_one_line():
    given = {
        "command": "corun verify M",
        "policy": "certified",
        "model": "m",
        "device": "G",
        "settings": {"suite": "paper", "engines": 1},
        "total": {
            "token_values": 3000,
            "token_values_equal": 2999,
            "logprob_values": 50,
            "logprob_values_equal": 49,
        },
        "audit": [
            {"mixed_steps": 1, "preempted": 2, "cached_tokens": 1000},
            {"mixed_steps": 1, "preempted": 0, "cached_tokens": 1},
        ],
        "verdict": "broke",
    }
    older = {**given, "command": "VLLM_USE_V2_MODEL_RUNNER=0 corun verify M", "audit": [{}]}
    first, second = readme_tables.verify_table({"v.json": given, "w.json": older}).splitlines()[2:]
    assert first == (
        "| `certified` | [m](benchmarks/results/v.json), G | vLLM's default | paper, 1 | "
        "2,999 of 3,000 | 49 of 50 | 2 / 2 / 1,001 | broke |"
    )
    assert "| V1 |" in second and "| not counted | broke |" in second


def test_the_readme_is_up_to_date():
    for benchmark in ("throughput", "certify", "verify"):
        assert readme_tables.records_of(RESULTS, benchmark)
    readme = (ROOT / "README.md").read_text()
    for body in readme_tables.parts(RESULTS).values():
        assert body in readme
