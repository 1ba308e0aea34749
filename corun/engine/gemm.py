"""Seam: GEMMs without split-K reductions (``certified`` on CUDA).

cuBLASLt's heuristics split K among blocks at small M and reduce the parts afterwards, which is the
one thing that makes a GEMM's rows depend on their number (measured on an H200; see
docs/contract.md). Such a reduction needs a workspace: with next to none, no such kernel is chosen.
``CUBLAS_WORKSPACE_CONFIG`` must be unset beside it: torch 2.11 parses that variable anew at every
cuBLASLt call, which costs over 100 us of host time each.
"""

from collections.abc import MutableMapping

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.corun")

SEAMS: tuple[tuple, ...] = ()
WORKSPACE, WORKSPACE_KIB = "CUBLASLT_WORKSPACE_SIZE", "1"
UNWANTED = "CUBLAS_WORKSPACE_CONFIG"


def settle(env: MutableMapping[str, str]) -> None:
    """Set the environment of this process and its workers, before CUDA starts.

    ValueError where the user set another workspace.
    """
    given = env.get(WORKSPACE)
    if given not in (None, WORKSPACE_KIB):
        raise ValueError(
            f"CoRun's certified policy needs {WORKSPACE}={WORKSPACE_KIB}, so that no GEMM splits "
            "its sums; unset it"
        )
    env[WORKSPACE] = WORKSPACE_KIB
    if env.pop(UNWANTED, None) is not None:
        logger.info("CoRun: %s is unset: it slows every GEMM down and is not needed", UNWANTED)


def install(env: MutableMapping[str, str]) -> None:
    """Have torch use cuBLASLt, in the worker, before its first GEMM."""
    if env.get(WORKSPACE) != WORKSPACE_KIB or UNWANTED in env:
        raise RuntimeError(
            f"CoRun: the worker's environment has {WORKSPACE}={env.get(WORKSPACE)!r} and "
            f"{UNWANTED}={env.get(UNWANTED)!r}; something changed it after CoRun set it"
        )
    torch.backends.cuda.preferred_blas_library("cublaslt")
