"""Environment variables that are pinned, and those that are refused."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from corun.engine import environment


def test_pins_what_reaches_the_arithmetic():
    env: dict[str, str] = {}
    environment.settle(env)
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert env["VLLM_MOE_SKIP_PADDING"] == "0"
    assert env["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    environment.settle(env)  # its own values are no conflict


@pytest.mark.parametrize(
    "given", [{"VLLM_BATCH_INVARIANT": "1"}, {"VLLM_USE_FLASHINFER_SAMPLER": "1"}]
)
def test_a_conflict_is_refused_by_name(given):
    name = next(iter(given))
    with pytest.raises(ValueError, match=name):
        environment.settle(dict(given))


def test_an_explicit_zero_is_fine():
    environment.settle({"VLLM_BATCH_INVARIANT": "0"})


CAPS = [
    ("OMP_DYNAMIC", "true"),
    ("OMP_DYNAMIC", " TRUE"),
    ("OMP_MAX_ACTIVE_LEVELS", "0"),
    ("OMP_THREAD_LIMIT", "1"),
    ("OMP_THREAD_LIMIT", "7"),
    ("KMP_DEVICE_THREAD_LIMIT", "1"),
    ("KMP_ALL_THREADS", "1"),
]


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize(("name", "value"), CAPS)
def test_fewer_threads_than_asked_for_are_refused_on_a_cpu(monkeypatch, name, value, cpu):
    monkeypatch.setattr(environment, "_most_threads", lambda env: 8)
    monkeypatch.setattr(environment, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    if not cpu:  # no OpenMP in a GPU's GEMM
        environment.settle({name: value})
        return
    with pytest.raises(ValueError, match=f"{name}={value} on a CPU, because .*up to 8"):
        environment.settle({name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"OMP_DYNAMIC": "false"},
        {"OMP_DYNAMIC": ""},
        {"OMP_MAX_ACTIVE_LEVELS": "1"},
        {"OMP_THREAD_LIMIT": "8"},
        {"OMP_THREAD_LIMIT": "many"},  # OpenMP ignores it
        {"KMP_ALL_THREADS": "9"},
        {"OMP_NUM_THREADS": "1", "OMP_NESTED": "false", "OMP_PROC_BIND": "true"},
    ],
)
def test_what_leaves_the_threads_alone_is_fine(monkeypatch, given):
    monkeypatch.setattr(environment, "_most_threads", lambda env: 8)
    environment.settle(dict(given))


def test_the_most_threads_are_those_of_the_process_or_of_the_cpus_that_vllm_binds(monkeypatch):
    monkeypatch.setattr(environment.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(8)))
    for given, most in (
        ({}, 8),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, 8),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, 3),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, 3),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-5"}, 8),
    ):
        assert environment._most_threads(given) == most
        environment.settle({**given, "OMP_THREAD_LIMIT": str(most)})
        with pytest.raises(ValueError, match=f"OMP_THREAD_LIMIT={most - 1} .*up to {most}"):
            environment.settle({**given, "OMP_THREAD_LIMIT": str(most - 1)})
