"""Seam: split decode of latent attention, on FLASH_ATTN_MLA (see ``corun.engine.split_steps``).

vLLM computes the one-token rows of a step, and its short pieces of prompts, in one call of their
own: the `decode` part of the metadata, which holds the step's first requests. Split rows are among
these. (A plan for latent attention grants neither preemption nor cache hits, so a position past the
prompt is only ever computed as a decode row. A longer piece goes another way, with one split.)
"""

import copy
from typing import Any

import torch

from corun.engine.split_attention import CACHES
from corun.engine.split_schedule import LATENT, LATENT_RULE, SplitRule
from corun.engine.split_steps import ATTRIBUTE, SplitSteps

_MLA = "vllm.model_executor.layers.attention.mla_attention"
# What vLLM's FlashAttnMLAImpl and its metadata add can be imported on NVIDIA GPUs only.
SEAMS: tuple[tuple, ...] = (
    (_MLA, "MLAAttention.forward_impl", ("q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata")),
    (
        _MLA,
        "MLACommonImpl.forward_mqa",
        ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    ),
    (_MLA, "MLACommonMetadata.decode"),
    (_MLA, "MLACommonMetadata.num_decodes"),
    (_MLA, "MLACommonDecodeMetadata.block_table"),
    (_MLA, "MLACommonDecodeMetadata.seq_lens"),
    ("vllm.v1.attention.backend", "AttentionImplBase.need_to_return_lse_for_decode"),
)


class SplitLatent(SplitSteps):
    """``SplitSteps`` of latent attention; its metadata is the `decode` part."""

    def layers(self, model: torch.nn.Module) -> list[Any]:
        """See ``SplitSteps``."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        return [m for m in model.modules() if isinstance(m, MLAAttention)]

    def why_not(self, layer: Any) -> str | None:
        """See ``SplitSteps``."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        if type(layer) is not MLAAttention:
            return f"it is of another kind ({type(layer).__name__})"
        if (backend := layer.attn_backend.get_name()) != "FLASH_ATTN_MLA":
            return f"its backend is {backend}, not FLASH_ATTN_MLA"
        sizes, kv_cache = (layer.kv_lora_rank, layer.qk_rope_head_dim), layer.impl.kv_cache_dtype
        reasons = (
            (sizes != LATENT, f"its latent and rotary dimensions are {sizes}, not {LATENT}"),
            (kv_cache not in CACHES, f"its KV cache is {kv_cache}"),
            (
                layer.impl.need_to_return_lse_for_decode,
                "its context is divided among devices (decode_context_parallel_size)",
            ),
        )
        return next((why for applies, why in reasons if applies), None)

    def shape(self, layer: Any) -> dict[str, int]:
        """See ``SplitSteps``."""
        heads = {"num_heads_q": layer.num_heads, "num_heads_kv": 1}
        return {**heads, "headdim": layer.qk_rope_head_dim, "headdim_v": layer.kv_lora_rank}

    def rule(self, layer: Any) -> SplitRule:
        """See ``SplitSteps``."""
        return LATENT_RULE

    def cache(self, metadata: Any, builder: Any) -> dict[str, Any]:
        """See ``SplitSteps``."""
        return {
            "qkv_dtype": builder.kv_cache_spec.dtype,
            "page_size": builder.page_size,
            "causal": True,
        }

    def hold(self, layer: Any) -> None:
        """See ``SplitSteps``."""
        impl = layer.impl
        forward_mqa, forward_impl = impl.forward_mqa, layer.forward_impl

        def split_mqa(q: Any, kv_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> tuple:
            def call(query: Any, decode: Any, out: torch.Tensor | None) -> torch.Tensor:
                given = copy.copy(attn_metadata)
                given.decode = decode
                return forward_mqa(query, kv_cache, given, layer)[0]

            step = getattr(attn_metadata.decode, ATTRIBUTE, None)
            if step is None:
                return forward_mqa(q, kv_cache, attn_metadata, layer)
            return step.attend(call, q, attn_metadata.decode), None

        def impl_with_room(
            q: Any, k_c_normed: Any, k_pe: Any, kv_cache: Any, attn_metadata: Any,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if attn_metadata is None:
                self.take_room()
            return forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, *args, **kwargs)

        impl.forward_mqa = split_mqa
        layer.forward_impl = impl_with_room
