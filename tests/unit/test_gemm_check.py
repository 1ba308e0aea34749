"""The check that this process can calculate: it passes here, and finds every kind of garbage."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch

from corun.engine import gemm_check

DTYPES = ("bfloat16", "float16", "float32")
CPU = torch.device("cpu")
VALUES = 65 * 2048  # both numbers of rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_working_machine_passes(dtype):
    assert gemm_check.check(CPU, getattr(torch, dtype)) == VALUES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3.7e19, 0.0])
def test_values_that_nobody_computed_are_found(monkeypatch, dtype, garbage):
    """The last of 64 threads did not run: an equal 32 columns are garbage at every call."""

    def broken(layer, x, weight, bias):
        y = torch.nn.functional.linear(x, weight)
        y[:, -32:] = garbage
        return y

    monkeypatch.setattr(gemm_check.utils, "dispatch_unquantized_gemm", lambda: broken)
    with pytest.raises(RuntimeError, match=r"gave \d+ wrong values of 2048, and 0 other bytes"):
        gemm_check.check(CPU, getattr(torch, dtype))


def test_results_that_do_not_repeat_are_found(monkeypatch):
    calls = iter(range(2))

    def unsteady(layer, x, weight, bias):
        y = torch.nn.functional.linear(x, weight)
        y[0, 0] += 1e-3 * next(calls)  # far within the bound
        return y

    monkeypatch.setattr(gemm_check.utils, "dispatch_unquantized_gemm", lambda: unsteady)
    with pytest.raises(RuntimeError, match=r"gave 0 wrong values of 2048, and [1-4] other bytes"):
        gemm_check.check(CPU, torch.float32)


@pytest.mark.parametrize("policy", ["isolate", "pack", "certified"])
def test_a_worker_checks_before_it_loads_a_model_under_every_policy(monkeypatch, policy):
    from corun.engine import worker
    from corun.plan import Plan

    class Device:
        def init_device(self):
            self.device = CPU

    class Worker(worker.CoRunWorkerMixin, Device):
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            additional_config={
                "corun": {"policy": policy},
                worker.PLAN_KEY: Plan(policy, 8, 32, False, "test").to_mapping(),
            },
        )

    seen = []
    monkeypatch.setattr(gemm_check, "check", lambda *given: seen.append(given))
    Worker().init_device()
    assert seen == [(CPU, torch.float32)]


def test_the_message_names_what_is_set():
    env = {"OMP_DYNAMIC": "true", "KMP_BLOCKTIME": "1", "HOME": "/", "CUDA_CACHE_PATH": "x"}
    text = gemm_check._message("gave 5 wrong values", "cpu", env)
    assert "broken under the present environment. A linear layer gave 5 wrong values. " in text
    assert "set here: KMP_BLOCKTIME, OMP_DYNAMIC. " in text
    assert "set here: none" in gemm_check._message("gave 5 wrong values", "cpu", {})


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one thread cannot be cut to fewer")
def test_openmp_with_too_few_threads_never_passes_unseen():
    """The real thing. Other kernels than oneDNN's may be right all the same; garbage never is."""
    code = (
        "import torch; from corun.engine import gemm_check\n"
        "try: gemm_check.check(torch.device('cpu'), torch.float32); print('passed')\n"
        "except RuntimeError as e: print(e)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "OMP_THREAD_LIMIT": "1",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "passed" in run.stdout or "OMP_THREAD_LIMIT" in run.stdout.split("set here:")[1]
