"""Seam: one linear layer before the model is loaded, to see that this process can calculate at all.

An environment can break a kernel without breaking the program: where OpenMP starts fewer threads
than vLLM's oneDNN GEMM asked for, it returns memory that nobody wrote. ``corun.engine.environment``
refuses the variables that are known to do so; this catches the others. It checks arithmetic, not
determinism: its bound is broken by garbage only.
"""

import os
from collections.abc import Mapping

import numpy as np
import torch
from vllm.model_executor.layers import utils

SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.utils", "dispatch_unquantized_gemm"),
    (
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
    ),
)

OUTPUTS, INPUTS = 2048, 512
ROWS = (1, 64)  # a decode step of one request, and a prompt
_BOUND = 0.05  # of the largest value of the reference; rounding in bfloat16 stays below 0.01
_SUSPECTS = {
    "cpu": ("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "VLLM_CPU_OMP_", "LD_PRELOAD"),
    "cuda": ("CUBLAS", "CUDA_", "NVIDIA_", "TORCH_"),
}


class _Linear:
    """An unquantized linear layer as vLLM runs it here. weight: [OUTPUTS, INPUTS]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._layer = torch.nn.Module()
        self._layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        if weight.device.type == "cpu":
            utils.dispatch_cpu_unquantized_gemm(self._layer, remove_weight=False)
        self._gemm = utils.dispatch_unquantized_gemm()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, INPUTS]; returns [rows, OUTPUTS]."""
        # Memory that is handed out again must not hold a right answer by chance.
        torch.full((x.shape[0], OUTPUTS), torch.nan, dtype=x.dtype, device=x.device)
        return self._gemm(self._layer, x, self._layer.weight, None)


def _values(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def check(device: torch.device, dtype: torch.dtype) -> int:
    """Run one linear layer twice on `device`; returns how many values were compared.

    Against itself, bit by bit, and against float64 arithmetic that uses no OpenMP (NumPy's).
    RuntimeError where the machine's arithmetic is broken.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).mul_(0.05).to(dtype).to(device)
    linear, compared = _Linear(weight), 0
    for rows in ROWS:
        x = torch.randn(rows, INPUTS, generator=generator).to(dtype).to(device)
        first, again = linear(x), linear(x)
        right = _values(x) @ _values(weight).T
        # Not "error > bound": that is false for a NaN.
        wrong = int((~(np.abs(_values(first) - right) <= _BOUND * np.abs(right).max())).sum())
        other = int((first.view(torch.uint8) != again.view(torch.uint8)).sum())
        compared += first.numel()
        if wrong or other:
            found = (
                f"({rows}x{INPUTS} by {INPUTS}x{OUTPUTS}, {dtype}) gave {wrong} wrong values of "
                f"{first.numel()}, and {other} other bytes when it ran again"
            )
            raise RuntimeError(_message(found, device.type, os.environ))
    return compared


def _message(found: str, device: str, env: Mapping[str, str]) -> str:
    prefixes = _SUSPECTS.get(device, _SUSPECTS["cuda"])
    present = sorted(name for name in env if name.startswith(prefixes))
    return (
        f"CoRun: this machine's arithmetic is broken under the present environment. A linear layer "
        f"{found}. Look at the variables that reach its kernels "
        f"({', '.join(f'{p}*' for p in prefixes)}); set here: {', '.join(present) or 'none'}. "
        "Start again without them"
    )
