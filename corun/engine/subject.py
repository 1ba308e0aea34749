"""Seam: the subject of a certificate, read from engine arguments before an engine starts.

See ``corun.certify.store`` for what a subject is. Whatever picks a kernel is in it: the model's
shape, dtype, device, software, parallelism, compilation, and the constraints that CoRun sets.
"""

import os
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from corun.engine.domain import device_name, library_settings, model_shape, software

SEAMS = (("vllm.platforms", "current_platform.get_device_name"),)


def _threads() -> list[Any]:
    """What vLLM derives the CPU's number of threads from; it changes how GEMMs cut their sums."""
    names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
    return [os.cpu_count(), torch.get_num_threads(), *(os.environ.get(name) for name in names)]


def subject(args: EngineArgs, model_config: Any, tokens: int) -> dict[str, Any]:
    """What a certificate for this engine speaks of, as JSON values.

    model_config: vLLM's, made from `args`. tokens: ``max_num_batched_tokens``; the compiler's
    kernels may depend on it.
    """
    return {
        "model": model_shape(model_config.hf_config),
        "dtype": str(model_config.dtype),
        "device": device_name(),
        "threads": _threads() if current_platform.is_cpu() else None,
        "software": software(),
        "libraries": library_settings(),
        "tensor_parallel": args.tensor_parallel_size,
        "compiled_for": None if args.enforce_eager else tokens,
        "attention_backend": str(getattr(args, "attention_backend", None)),
        "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        "block_size": args.block_size,
        "kv_cache_dtype": str(args.kv_cache_dtype),
        "moe_backend": str(getattr(args, "moe_backend", None)),
    }
