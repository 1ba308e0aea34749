"""Seam: what a scheduler's output says of the requests in it."""

from typing import Any

SEAMS: tuple[tuple, ...] = (
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("num_scheduled_tokens",)),
    ("vllm.v1.core.sched.output", "CachedRequestData", ("req_ids", "num_computed_tokens")),
)


def computed_before(scheduler_output: Any) -> dict[str, int]:
    """Tokens that each request in the output, new or not, had in its KV cache before the step."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {
        new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
    }
