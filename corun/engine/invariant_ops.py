"""Seam: the operators of the paper's Fig. 2, as plain vLLM and as batch-invariant vLLM runs them.

The batch-invariant ones are Triton kernels that ``VLLM_BATCH_INVARIANT=1`` puts in the place of
these operators; called directly, they need no such engine. Where they cannot run (no CUDA device,
or no Triton) ``unavailable`` says why.
"""

import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.triton_utils import HAS_TRITON

from corun.engine.seams import vllm_version

_MODULES = {
    "0.25": "vllm.model_executor.layers.batch_invariant",
    "0.32": "vllm.model_executor.determinism.batch_invariant",
}
_FUNCTIONS = (
    ("mean_batch_invariant", ("input", "dim")),
    ("softmax_batch_invariant", ("input", "dim")),
    ("rms_norm_batch_invariant", ("input", "weight", "eps")),
    ("linear_batch_invariant", ("input", "weight")),
)
SEAMS = (
    ("vllm._custom_ops", "rms_norm", ("out", "input", "weight", "epsilon")),
    ("vllm.triton_utils", "HAS_TRITON"),
)
SEAMS_BY_VERSION = {
    prefix: tuple((module, name, parameters) for name, parameters in _FUNCTIONS)
    for prefix, module in _MODULES.items()
}

EPSILON = 1e-6
# From an input [rows, N] (MatMul: [rows, K]) and a weight (RMSNorm: [N]; MatMul: [N, K]; the others
# none) to the operator's output.
Operator = Callable[[Tensor, Tensor | None], Tensor]


def _rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, EPSILON)
    return out


def _linear(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    return torch.nn.functional.linear(x, weight)


def standard() -> dict[str, Operator]:
    """What plain vLLM calls: PyTorch's own operators, and vLLM's kernel for RMSNorm."""
    return {
        "mean": lambda x, _: torch.mean(x, dim=-1),
        "rmsnorm": _rms_norm,
        "softmax": lambda x, _: torch.softmax(x, dim=-1),
        "matmul": _linear,
    }


def unavailable() -> str | None:
    """Why the batch-invariant operators cannot run here, or None where they can."""
    if not torch.cuda.is_available():
        return "vLLM's batch-invariant operators are CUDA kernels, and there is no CUDA device"
    if not HAS_TRITON:
        return "vLLM's batch-invariant operators are Triton kernels, and Triton is missing"
    return None


def batch_invariant() -> Mapping[str, Operator]:
    """The operators of batch-invariant vLLM. RuntimeError where they are ``unavailable``."""
    if why := unavailable():
        raise RuntimeError(why)
    installed = vllm_version()
    name = next((m for prefix, m in _MODULES.items() if installed.startswith(prefix)), None)
    if name is None:
        raise RuntimeError(
            f"where vLLM {installed} keeps its batch-invariant operators is not known; "
            f"known are {', '.join(_MODULES)}"
        )
    module = importlib.import_module(name)
    return {
        "mean": lambda x, _: module.mean_batch_invariant(x, [-1]),
        "rmsnorm": lambda x, weight: module.rms_norm_batch_invariant(x, weight, EPSILON),
        "softmax": lambda x, _: module.softmax_batch_invariant(x, -1),
        "matmul": module.linear_batch_invariant,
    }
