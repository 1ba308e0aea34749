"""What in a VllmConfig a scheduler cannot keep its policy with, or serve every request with."""

from collections.abc import Iterator
from typing import Any

from corun.plan import Grants


def never_starts(config: Any) -> Iterator[str]:
    """What in a finished VllmConfig would keep some request, and all behind it, waiting for ever.

    Whoever schedules: vLLM checks ``max_model_len`` (and the longest image) against
    ``max_num_batched_tokens``, but a plan may allow a step fewer tokens. Its other limits only
    delay: ``long_prefill_token_threshold`` shortens a chunk, never to nothing; ``watermark`` holds
    a request back only while others run; and a KV cache that cannot hold ``max_model_len`` tokens
    is an error of vLLM's at start-up.
    """
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and budget < longest:
        yield (
            f"chunked prefill off (enable_chunked_prefill=False): a step holds at most {budget} "
            f"tokens, so a longer prompt (max_model_len is {longest}) would never start. Leave "
            f"chunked prefill on, or set max_model_len to {budget}"
        )
    media = config.model_config.multimodal_config
    whole = scheduler.disable_chunked_mm_input and budget < scheduler.max_num_batched_tokens
    if whole and media is not None and not media.language_model_only:
        yield (
            "images, audio and video kept whole (disable_chunked_mm_input): a step holds at most "
            f"{budget} tokens, so a longer one would never start. Set language_model_only"
        )


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
    yield from never_starts(config)
    scheduler = config.scheduler_config
    # vLLM 0.32 heeds it only where several requests are in sight; alone, a prompt is the same
    # under it, whatever else runs.
    if scheduler.long_prefill_token_threshold and (grants.batched_prefill or grants.mixed):
        yield (
            f"long_prefill_token_threshold={scheduler.long_prefill_token_threshold} (where it cuts "
            "a prompt depends on the other requests in the step)"
        )
