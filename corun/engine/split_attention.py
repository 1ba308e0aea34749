"""Seam: split decode of ordinary heads, on FLASH_ATTN (see ``corun.engine.split_steps``)."""

from typing import Any

import torch

from corun.engine.split_schedule import RULES, SplitRule
from corun.engine.split_steps import ATTRIBUTE, SplitSteps

_METADATA = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "causal",
    "scheduler_metadata",
    "max_num_splits",
)
SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.attention", "Attention"),
    (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    *(
        ("vllm.v1.attention.backends.flash_attn", f"FlashAttentionMetadata.{name}")
        for name in _METADATA
    ),
)

CACHES = ("auto", "bfloat16", "float16")  # KV caches that are split
_VERSION = 3  # of FlashAttention: the one whose schedule holds each sequence's splits


def why_not(layer: Any) -> str | None:
    """Why an attention layer cannot be split, or None."""
    from vllm.model_executor.layers.attention import Attention

    impl = layer.impl
    if type(layer) is not Attention or impl.attn_type != "decoder":
        return "it is not causal self-attention over the whole context"
    if (backend := layer.attn_backend.get_name()) != "FLASH_ATTN":
        return f"its backend is {backend}, not FLASH_ATTN"
    width = getattr(layer, "head_size_v", impl.head_size)
    version = impl.vllm_flash_attn_version
    reasons = (
        (version != _VERSION, f"FlashAttention {version} computes it, not {_VERSION}"),
        (impl.head_size not in RULES, f"its head dimension is {impl.head_size}"),
        (width != impl.head_size, f"its values have {width} dimensions, not {impl.head_size}"),
        (impl.sliding_window not in (None, (-1, -1)), "it has a sliding window"),
        (bool(impl.logits_soft_cap), "it caps its scores"),
        (impl.alibi_slopes is not None, "it has ALiBi slopes"),
        (getattr(impl, "sinks", None) is not None, "it has sinks"),
        (impl.kv_cache_dtype not in CACHES, f"its KV cache is {impl.kv_cache_dtype}"),
    )
    return next((why for applies, why in reasons if applies), None)


class SplitAttention(SplitSteps):
    """``SplitSteps`` of layers with ordinary heads."""

    def layers(self, model: torch.nn.Module) -> list[Any]:
        """See ``SplitSteps``."""
        from vllm.model_executor.layers.attention import Attention

        return [m for m in model.modules() if isinstance(m, Attention)]

    def why_not(self, layer: Any) -> str | None:
        """See ``SplitSteps``."""
        return why_not(layer)

    def shape(self, layer: Any) -> dict[str, int]:
        """See ``SplitSteps``."""
        impl = layer.impl
        heads = {"num_heads_q": impl.num_heads, "num_heads_kv": impl.num_kv_heads}
        return {**heads, "headdim": impl.head_size}

    def rule(self, layer: Any) -> SplitRule:
        """See ``SplitSteps``."""
        return RULES[layer.impl.head_size]

    def cache(self, metadata: Any, builder: Any) -> dict[str, Any]:
        """See ``SplitSteps``."""
        return {
            "qkv_dtype": builder.kv_cache_dtype,
            "page_size": builder.block_size,
            "causal": metadata.causal,
        }

    def hold(self, layer: Any) -> None:
        """See ``SplitSteps``."""
        impl = layer.impl
        forward = impl.forward

        def split_forward(  # noqa: PLR0917 -- as vLLM's
            layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            def call(query: torch.Tensor, metadata: Any, out: torch.Tensor | None) -> torch.Tensor:
                if out is None:
                    out = torch.empty_like(query, dtype=output.dtype)
                # The layer's new keys and values are in the cache by now: nothing reads them here.
                forward(layer, query, key, value, kv_cache, metadata, out, *args, **kwargs)
                return out

            if attn_metadata is None:
                self.take_room()
            step = getattr(attn_metadata, ATTRIBUTE, None)
            if step is None:
                return forward(
                    layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
                )
            heads = (-1, impl.num_heads, impl.head_size)
            step.attend(call, query.view(heads), attn_metadata, output.view(heads))
            return output

        impl.forward = split_forward
