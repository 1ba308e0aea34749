"""``corun certify`` of an engine on two ranks, each bound to a core of its own."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
from benchmarks.models import write_config
from corun.certify.certificate import Certificate

FLAGS = {
    "tensor_parallel_size": 2,
    "max_model_len": 384,
    "max_num_batched_tokens": 384,
    "kv_cache_memory_bytes": 1 << 28,
}


def test_two_ranks_are_certified_together(tmp_path):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    report = tmp_path / "report.json"
    model = write_config("tiny-llama", tmp_path / "tiny")
    flags = [f"--engine-arg={name}={value}" for name, value in FLAGS.items()]
    command = [sys.executable, "-m", "corun.cli", "certify", str(model), "--random-weights"]
    subprocess.run(
        [*command, "--rows", "16", "--budget", "3", "--json", str(report), *flags],
        env={
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
            "CORUN_CACHE": str(tmp_path),
        },
        check=True,
    )
    found = json.loads(report.read_text())
    certificate = Certificate.from_mapping(found["certificate"])
    assert certificate.domain["tensor_parallel"] == 2
    claims = {claim.name: claim for claim in certificate.rows}
    print(f"compared {sum(claim.values for claim in certificate.rows)} values")
    total = claims["all-reduce of 2 ranks, 256"]
    assert [rows.to_lists() for rows in total.classes] == [[[1, 384]]]
    assert total.values > 1_000_000
    assert "RowParallelLinear 128 x 256" in claims  # a rank's half of the heads
    assert certificate.engine.equal and certificate.engine.logprobs > 200
    assert {v["policy"]: v["allowed"] for v in found["policies"]}["certified"]
