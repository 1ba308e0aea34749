"""What in a VllmConfig a held scheduler cannot keep its policy with."""

from collections.abc import Iterator
from typing import Any

from corun.plan import Grants


def breaks_policy(config: Any, grants: Grants) -> Iterator[str]:
    """What in a VllmConfig would let one request change another's shapes, or its place in KV."""
    if config.cache_config.enable_prefix_caching and not grants.prefix_cache:
        yield "prefix caching (a hit changes the shape of the prefill)"
    if config.speculative_config is not None:
        yield "speculative decoding (a decode step would hold more than one token a request)"
    if getattr(config.model_config, "is_diffusion", False):
        yield "a diffusion model (it does not decode one token a step)"
    if config.model_config.is_encoder_decoder:
        yield "an encoder-decoder model (the KV cache it needs is not known on arrival)"
    if config.kv_transfer_config is not None:
        yield "a KV connector (its KV was not computed under CoRun, and it holds blocks of its own)"
    if config.ec_transfer_config is not None:
        yield "an encoder cache connector"
    if config.lora_config is not None:
        yield "LoRA (vLLM limits the adapters in a step by looking at all running requests)"
    scheduler = config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and budget < config.model_config.max_model_len:
        yield f"chunked prefill off and a budget of {budget} tokens, less than max_model_len"
    # vLLM 0.32 heeds it only where several requests are in sight; alone, a prompt is the same
    # under it, whatever else runs.
    if scheduler.long_prefill_token_threshold and (grants.batched_prefill or grants.mixed):
        yield (
            f"long_prefill_token_threshold={scheduler.long_prefill_token_threshold} (where it cuts "
            "a prompt depends on the other requests in the step)"
        )
