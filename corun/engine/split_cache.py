"""Seam: the prefix cache holds no KV that split rows made, and gives none to them.

A prompt's rows are never split, so a block with a split row's KV must not be offered to another
request's prompt. The other way round, a request that was preempted recomputes its split rows: it
must not take their KV from another request in whose prompt the same tokens stood. So a request
caches, and is given, its first ``unsplit`` positions only; those two have the same bits whoever
computes them. Only for plans that split, on the scheduler's own KV cache manager.
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from corun.engine.arguments import PLAN_KEY
from corun.engine.split_rows import unsplit

SEAMS: tuple[tuple, ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__", ("vllm_config",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_computed_blocks", ("request",)),
    (
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        ("request", "num_computed_tokens"),
    ),
    (
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        ("block_hashes", "max_cache_hit_length"),
    ),
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


def cap(manager: Any, beyond: int) -> None:
    """Keep split rows' KV out of the prefix cache of a ``KVCacheManager``, and cached KV from them.

    beyond: see ``Plan.split_beyond``.
    """
    coordinator = manager.coordinator
    cache, find, look_up = (
        coordinator.cache_blocks,
        coordinator.find_longest_cache_hit,
        manager.get_computed_blocks,
    )
    most: list[int] = []  # what may be cached of the request that is being looked up

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        cache(request, min(num_computed_tokens, unsplit(request.num_prompt_tokens, beyond)))

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
        return find(block_hashes, min([max_cache_hit_length, *most]))

    def get_computed_blocks(request: Any) -> Any:
        most.append(unsplit(request.num_prompt_tokens, beyond))
        try:
            return look_up(request)
        finally:
            most.pop()

    coordinator.cache_blocks = cache_blocks
    coordinator.find_longest_cache_hit = find_longest_cache_hit
    manager.get_computed_blocks = get_computed_blocks


class SplitMixin(_Base):
    """Puts ``cap`` on a vLLM scheduler whose plan splits decode; put it before the class."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        plan = (vllm_config.additional_config or {}).get(PLAN_KEY, {})
        if beyond := plan.get("split_beyond", 0):
            cap(self.kv_cache_manager, beyond)


class SplitScheduler(SplitMixin, Scheduler):
    """vLLM's synchronous scheduler under a plan that splits and grants everything."""


class AsyncSplitScheduler(SplitMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler under a plan that splits and grants everything."""
