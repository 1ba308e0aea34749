"""Seam: the memory pool that vLLM's CUDA graphs share, for processes that open several engines.

A closed engine's graphs leave the pool half freed; torch then asserts when the next engine captures
into it. Each engine opened here gets a pool of its own.
"""

from vllm.platforms import current_platform

SEAMS: tuple[tuple, ...] = (
    ("vllm.platforms.interface", "Platform._global_graph_pool"),
    ("vllm.platforms.interface", "Platform.get_global_graph_pool"),
)


def forget() -> None:
    """Have the next engine of this process take a new pool."""
    type(current_platform)._global_graph_pool = None
