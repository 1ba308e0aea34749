"""The environment that keeps GEMMs from splitting their sums."""

import pytest
import torch

pytest.importorskip("vllm")
from corun.engine import gemm


def test_settle_sets_what_workers_inherit():
    env = {"OTHER": "1"}
    gemm.settle(env)
    assert env == {"OTHER": "1", gemm.WORKSPACE: "1"}
    gemm.settle(env)  # a second engine of this process
    assert env[gemm.WORKSPACE] == "1"


def test_what_slows_gemms_down_is_removed():
    env = {gemm.UNWANTED: ":16:8"}
    gemm.settle(env)
    assert env == {gemm.WORKSPACE: "1"}


def test_another_workspace_is_refused():
    env = {gemm.WORKSPACE: "4096"}
    with pytest.raises(ValueError, match=r"CUBLASLT_WORKSPACE_SIZE=1.*unset it"):
        gemm.settle(env)
    assert env == {gemm.WORKSPACE: "4096"}


def test_the_worker_takes_cublaslt(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    gemm.install({gemm.WORKSPACE: "1"})
    assert chosen == ["cublaslt"]


@pytest.mark.parametrize(
    "env",
    [{}, {gemm.WORKSPACE: "2"}, {gemm.WORKSPACE: "1", gemm.UNWANTED: ":16:8"}],
)
def test_a_worker_with_another_environment_stops(env, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    with pytest.raises(RuntimeError, match="something changed it"):
        gemm.install(env)
    assert chosen == []
