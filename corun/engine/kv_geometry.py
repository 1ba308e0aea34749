"""Seam: vLLM's KV block pool. How many blocks there are, and how many a request may ever hold.

Each KV cache group has a manager that allocates for it. CoRun knows the bound of some kinds of
manager and refuses the rest by name: a bound that is too low would end in a preemption.
"""

from typing import Any

from corun.schedule.ledger import KVGeometry, KVGroup

_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
SEAMS = (
    (_MANAGERS, "FullAttentionManager"),
    (_MANAGERS, "RSWAManager"),
    (_MANAGERS, "SlidingWindowManager"),
    (_MANAGERS, "ChunkedLocalAttentionManager"),
    (_MANAGERS, "MambaManager"),
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
)

# One block for each block_size tokens, kept (or given back early) until the request ends.
_KEEPS_ALL = frozenset({"FullAttentionManager", "RSWAManager", "SinkFullAttentionManager"})
# Blocks behind the window are given back, so vLLM caps what one request holds.
_CAPPED = frozenset({"SlidingWindowManager", "ChunkedLocalAttentionManager"})
# vLLM 0.32, then 0.25.
_CAP_NAMES = ("max_admission_blocks_per_request", "_max_admission_blocks_per_request")


def read_geometry(kv_cache_manager: Any, max_model_len: int) -> KVGeometry:
    """The geometry of a ``KVCacheManager`` that nothing has been allocated from yet.

    max_model_len: in tokens. ValueError: a kind of KV cache whose bound CoRun does not know.
    """
    managers = kv_cache_manager.coordinator.single_type_managers
    # What is free now is what requests can get: the null block and attention sinks are out of it.
    capacity = kv_cache_manager.block_pool.get_num_free_blocks()
    return KVGeometry(tuple(_group(manager) for manager in managers), capacity, max_model_len)


def _group(manager: Any) -> KVGroup:
    kind = type(manager).__name__
    if kind in _KEEPS_ALL:
        return KVGroup(manager.block_size)
    if kind in _CAPPED:
        cap = next(getattr(manager, name) for name in _CAP_NAMES if hasattr(manager, name))
        # vLLM's cap for chunked-local attention leaves out the block that a chunk starts within.
        return KVGroup(manager.block_size, cap + (kind == "ChunkedLocalAttentionManager"))
    if kind == "MambaManager" and manager.mamba_cache_mode != "align":
        return KVGroup(manager.block_size, extra_blocks=manager.num_speculative_blocks)
    raise ValueError(
        f"CoRun's isolate policy cannot bound the KV cache of this model: it does not know how "
        f"many blocks a request may hold in a {kind}. Run the model with policy 'off'"
    )
