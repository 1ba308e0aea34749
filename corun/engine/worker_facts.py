"""What a worker's process says of its own arithmetic; it may be another process than the front end.

The number of threads decides how a CPU's GEMMs cut their sums, and vLLM gives a worker in a process
of its own another number than one in the front end's process. torch's float32 precision can be set
by any code in the process.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform

SEAMS: tuple[tuple, ...] = (("vllm.platforms", "current_platform.is_cpu"),)


def this_process() -> dict[str, Any]:
    """threads (CPUs only) and torch's settings of matrix products, as JSON values."""
    matmul: Any = torch.backends.cuda.matmul
    of_cpu: Any = torch.backends.mkldnn
    facts: dict[str, Any] = {
        "matmul": {
            "float32_cuda": matmul.fp32_precision,
            "float32_cpu": of_cpu.matmul.fp32_precision,
            "bf16_reduced": matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced": matmul.allow_fp16_reduced_precision_reduction,
            "fp16_accumulation": matmul.allow_fp16_accumulation,
        }
    }
    if current_platform.is_cpu():
        facts["threads"] = torch.get_num_threads()
    return facts


def check(measured: Mapping[str, Any]) -> None:
    """RuntimeError unless this process is as the one that a certificate was `measured` in."""
    here = this_process()
    wrong = sorted(n for n in {*measured, *here} if measured.get(n) != here.get(n))
    if wrong:
        details = "; ".join(f"{n}: {measured.get(n)!r}, here {here.get(n)!r}" for n in wrong)
        raise RuntimeError(
            f"CoRun: the certificate was measured in another kind of worker ({details}), and other "
            "kernels may run here. Run 'corun certify' with the same "
            "VLLM_ENABLE_V1_MULTIPROCESSING, VLLM_CPU_OMP_THREADS_BIND and OMP_NUM_THREADS as "
            "this engine, or use the policy 'isolate'"
        )
