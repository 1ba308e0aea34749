"""What engines need to know to start on one GPU at the same time."""

from collections.abc import Mapping
from typing import Any

USABLE = 0.9
"""The share of a GPU's memory that engines may divide among themselves."""


def shared_engine_args(
    engine_args: Mapping[str, Any], engines: int, *, on_cpu: bool
) -> dict[str, Any]:
    """`engine_args`, keywords of vLLM's LLM, for each of `engines` that start at once.

    ValueError where the size of the KV cache is not given: vLLM would find it by watching the GPU's
    free memory while it starts, of which the other engines take their parts meanwhile. It also
    refuses to start where less than gpu_memory_utilization is free, which decides nothing else
    then, and becomes a share that is free still when all others hold as much.
    """
    if on_cpu or engines < 2:
        return dict(engine_args)
    if engine_args.get("kv_cache_memory_bytes") is None:
        raise ValueError(
            f"{engines} engines that start together on a GPU need the size of their KV caches, as "
            "in --engine-arg kv_cache_memory_bytes=20000000000 (for each, beside its weights): "
            "vLLM cannot measure free memory (--memory) while other engines start; or leave out "
            "--together"
        )
    share = USABLE / engines
    asked = engine_args.get("gpu_memory_utilization", share)
    return {**engine_args, "gpu_memory_utilization": min(asked, share)}
