"""Seam: the subject of a certificate, read from engine arguments before an engine starts.

See ``corun.certify.store`` for what a subject is. Whatever picks a kernel is in it: the model's
shape and code, dtype, device, software, parallelism, compilation, kernel settings, and variables of
the environment. What CoRun itself pins for the plan is not: it is the same for every certificate,
and read here before it is set and after.
"""

import os
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from corun.engine import compilation, gemm, settings
from corun.engine.domain import device_name, model_shape, software
from corun.engine.environment import usable_cpus
from corun.engine.split_schedule import reaching_bits
from corun.engine.variables import reaching_arithmetic

SEAMS = (
    ("vllm.platforms", "current_platform.get_device_name"),
    ("vllm.engine.arg_utils", "EngineArgs.linear_backend"),
    ("vllm.engine.arg_utils", "EngineArgs.attention_config"),
    ("vllm.engine.arg_utils", "EngineArgs.kernel_config"),
    ("vllm.engine.arg_utils", "EngineArgs.ir_op_priority"),
    ("vllm.engine.arg_utils", "EngineArgs.enable_flashinfer_autotune"),
    ("vllm.engine.arg_utils", "EngineArgs.optimization_level"),
)

_PINNED_ATTENTION = ("flash_attn_max_num_splits_for_cuda_graph",)
_PINNED_PASSES = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
_PINNED_VARIABLES = (gemm.WORKSPACE, gemm.UNWANTED)
_SEPARATE = "VLLM_ENABLE_V1_MULTIPROCESSING"


def _executor(args: EngineArgs) -> str:
    """How vLLM's CPU platform runs the worker: "mp" binds its threads to CPUs, "uni" does not."""
    asked = args.distributed_executor_backend
    if asked in (None, "uni"):
        return "mp" if os.environ.get(_SEPARATE, "1") == "1" else "uni"
    return str(asked)


def _threads(args: EngineArgs) -> dict[str, Any]:
    """What vLLM derives the number of a CPU worker's threads from.

    The number itself is not known here: the worker compares it with the certificate's.
    """
    names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
    return {
        "executor": _executor(args),
        "cpus": usable_cpus(),
        **{name: os.environ.get(name) for name in names},
    }


def _compiler(args: EngineArgs) -> dict[str, Any]:
    found = settings.compiler(args.compilation_config, eager=args.enforce_eager)
    for pinned, inside in (
        (_PINNED_PASSES, found["pass_config"]),
        (compilation.PINNED_INDUCTOR, found.get("inductor_compile_config", {})),
    ):
        for name in pinned:
            inside.pop(name, None)
    return {**found, "optimization_level": settings.plain(args.optimization_level)}


def _kernels(args: EngineArgs) -> dict[str, Any]:
    """The config, and the arguments that vLLM puts into it where they are not their defaults."""
    names = ("linear_backend", "moe_backend", "ir_op_priority", "enable_flashinfer_autotune")
    more = ("sparse_indexer_topk_backend",)  # vLLM 0.32
    given = {name: settings.plain(getattr(args, name, None)) for name in (*names, *more)}
    return {"config": settings.kernels(args.kernel_config), **given}


def subject(
    args: EngineArgs, model_config: Any, tokens: int, *, split: bool = False
) -> dict[str, Any]:
    """What a certificate for this engine speaks of, as JSON values.

    model_config: vLLM's, made from `args`. tokens: ``max_num_batched_tokens``; the compiler's
    kernels may depend on it. split: whether decode is split (``CoRunConfig.split_decode``).
    """
    variables = reaching_arithmetic()
    return {
        "model": model_shape(model_config.hf_config),
        "implementation": settings.implementation(model_config),
        "dtype": str(model_config.dtype),
        "device": device_name(),
        "threads": _threads(args) if current_platform.is_cpu() else None,
        "software": software(),
        "variables": {n: v for n, v in variables.items() if n not in _PINNED_VARIABLES},
        "tensor_parallel": args.tensor_parallel_size,
        "compiled_for": None if args.enforce_eager else tokens,
        "compilation": _compiler(args),
        "attention_backend": str(getattr(args, "attention_backend", None)),
        "attention": settings.fields_of(args.attention_config, _PINNED_ATTENTION),
        "kernels": _kernels(args),
        "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        "block_size": args.block_size,
        "kv_cache_dtype": str(args.kv_cache_dtype),
        **({"split_decode": reaching_bits(latent=model_config.use_mla)} if split else {}),
        **({"latent_attention": True} if model_config.use_mla else {}),
    }
