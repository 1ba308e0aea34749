"""Seam: the rows of a step where no CUDA graph pads (paper, Section IV-C), and what was executed.

With graphs, configuration alone does it (``corun.engine.compilation``): they pad to their own
sizes. Without (CPU, ``enforce_eager``, long steps), both runners' dispatchers return the unpadded
size, and the step is padded here as the plan says. Padding rows have slot -1: they write no KV.
Both paths note in RunnerState what the model was given, for the audit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode

from corun.engine.runner_state import RunnerState

_DETERMINE = "_determine_batch_execution_and_padding"
# From the descriptor of a step and its graph mode, the descriptor to run.
Change = Callable[[Any, CUDAGraphMode], Any]

SEAMS = (
    (
        "vllm.v1.worker.gpu_model_runner",
        f"GPUModelRunner.{_DETERMINE}",
        ("num_tokens", "num_reqs", "force_uniform_decode"),
    ),
    (
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        ("num_reqs", "num_tokens", "uniform_token_count"),
    ),
    ("vllm.v1.worker.gpu.cudagraph_utils", "BatchExecutionDescriptor"),
    ("vllm.forward_context", "BatchDescriptor"),
)


def _padded(state: RunnerState, descriptor: Any, mode: CUDAGraphMode) -> Any:
    """The descriptor to run: the plan's rows in a step that no graph pads."""
    if mode == CUDAGraphMode.NONE and descriptor.num_tokens:
        rows = state.plan.rows_for(descriptor.num_tokens, decode=state.decode_step)
        if rows != descriptor.num_tokens:
            descriptor = dataclasses.replace(descriptor, num_tokens=rows)
    state.rows = descriptor.num_tokens
    state.graph = mode == CUDAGraphMode.FULL
    return descriptor


def _padding(state: RunnerState) -> Change:
    return lambda descriptor, mode: _padded(state, descriptor, mode)


def install_v1(runner: Any, state: RunnerState) -> None:
    """Hold the V1 runner (GPU and CPU)."""
    _follow_v1(runner, _padding(state))


def install_v2(runner: Any, state: RunnerState) -> None:
    """Hold the V2 runner."""
    _follow_v2(runner, _padding(state))


def follow(runner: Any, change: Change) -> None:
    """Have `change` see, and replace, every step's descriptor; of either runner."""
    (_follow_v1 if hasattr(runner, _DETERMINE) else _follow_v2)(runner, change)


def _follow_v1(runner: Any, change: Change) -> None:
    determine = getattr(runner, _DETERMINE)

    def followed(*args: Any, **kwargs: Any) -> tuple:
        mode, descriptor, *rest = determine(*args, **kwargs)
        return (mode, change(descriptor, mode), *rest)

    setattr(runner, _DETERMINE, followed)


def _follow_v2(runner: Any, change: Change) -> None:
    manager = runner.cudagraph_manager
    dispatch = manager.dispatch

    def followed(*args: Any, **kwargs: Any) -> Any:
        descriptor = dispatch(*args, **kwargs)
        return change(descriptor, descriptor.cg_mode)

    manager.dispatch = followed
