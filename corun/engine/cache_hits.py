"""Seam: requests that must not start behind a prefix cache hit.

vLLM fills prompt logprobs for the positions that it computes. Behind a hit the others are memory
that nobody wrote: whatever lies there, or an error that ends the engine. vLLM skips the cache for
such requests by itself, unless they ask for it.
"""

from typing import Any

SEAMS: tuple[tuple, ...] = (
    (
        "vllm.sampling_params",
        "SamplingParams",
        ("skip_reading_prefix_cache", "prompt_logprobs"),
    ),
    ("vllm.v1.request", "Request.get_skip_reading_prefix_cache"),
)


def settle(params: Any) -> None:
    """Have a request with prompt logprobs skip the cache; `params` are its own (None: pooling)."""
    if params is not None and params.prompt_logprobs is not None:
        params.skip_reading_prefix_cache = True
