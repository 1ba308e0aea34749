"""How much memory ``corun generate`` and ``corun serve`` give the KV cache on a CPU.

vLLM would take 0.92 of the machine's memory, as it does on a GPU, which nothing else uses.
"""

import os
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from corun.verify.engine import CPU_KV_BYTES

logger = init_logger("vllm.corun")

SEAMS = (
    ("vllm.engine.arg_utils", "EngineArgs.kv_cache_memory_bytes"),
    ("vllm.engine.arg_utils", "EngineArgs.gpu_memory_utilization"),
    ("vllm.config", "ModelConfig.get_total_num_kv_heads"),
    ("vllm.config", "ModelConfig.get_total_num_hidden_layers"),
    ("vllm.config", "ModelConfig.get_head_size"),
)
SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
SPARE_TOKENS = 1024  # vLLM's null block, and the rest of a request's last block


def settle(args: Any, engine: EngineArgs, flags: Sequence[str]) -> None:
    """Set ``args.kv_cache_memory_bytes`` on a CPU, unless the user said how much memory to use.

    args: what is started, EngineArgs or a namespace of vLLM's flags. engine: the same as
    EngineArgs. flags: the command line that it was read from.
    """
    if not current_platform.is_cpu() or _given(engine, flags):
        return
    config = engine.create_model_config()
    per_token = _bytes_per_token(config) // max(1, engine.tensor_parallel_size)
    chosen = _choose(
        per_token * (config.max_model_len + SPARE_TOKENS), psutil.virtual_memory().available
    )
    args.kv_cache_memory_bytes = chosen
    logger.info(
        "CoRun: %.1f GiB of memory for the KV cache, about %s tokens (--kv-cache-memory-bytes "
        "sets another size)",
        chosen / 2**30,
        f"{chosen // per_token:,}",
    )


def _given(engine: EngineArgs, flags: Sequence[str]) -> bool:
    """Whether the user said how much memory to use."""
    return (
        engine.kv_cache_memory_bytes is not None
        or engine.gpu_memory_utilization != EngineArgs.gpu_memory_utilization
        or any(f.replace("_", "-").startswith("--gpu-memory-utilization") for f in flags)
        or bool(os.environ.get(SPACE_VARIABLE))
    )


def _choose(one_request: int, free: int) -> int:
    """Bytes for the KV cache: what verification takes, or one request of any length.

    Never more than half of what is free: where that is too little, vLLM's error names a shorter
    ``max_model_len`` that fits.
    """
    return min(max(CPU_KV_BYTES, one_request), free // 2)


def _bytes_per_token(config: Any) -> int:
    """Bytes of KV for one token, at most (a quantized cache, or a window, needs less)."""
    heads = 1 if config.use_mla else 2 * config.get_total_num_kv_heads()
    return (
        config.get_total_num_hidden_layers()
        * heads
        * config.get_head_size()
        * config.dtype.itemsize
    )
