"""README.md's tables are what benchmarks/results say, and nothing else."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import readme_tables  # noqa: E402


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


def test_shares_are_of_plain_vllm_in_the_same_record():
    table = readme_tables.throughput_table([record(isolate=50.0, std=200.0)])
    assert "| plain vLLM | 200 (1.00) | 30/32, 1/32 |" in table
    assert "| CoRun `isolate` | 50 (0.25) | 30/32, 1/32 |" in table


def test_a_failed_mode_is_left_out_and_a_record_without_plain_is_an_error():
    failed = record(std=200.0)
    failed["modes"].append({"mode": "bi", "error": "timed out"})
    assert "BATCH_INVARIANT" not in readme_tables.throughput_table([failed])
    with pytest.raises(ValueError, match="no plain vLLM"):
        readme_tables.throughput_table([record(isolate=50.0)])


def test_the_readme_is_up_to_date():
    records = readme_tables.throughput_records(ROOT / "benchmarks" / "results")
    assert records
    assert readme_tables.throughput_table(records) in (ROOT / "README.md").read_text()
