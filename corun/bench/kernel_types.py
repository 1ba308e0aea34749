"""Which type of operator a kernel (CUDA) or an operator (CPU) belongs to, by its name.

The first rule that matches decides, so special kinds come before general ones: FlashAttention's
kernels carry "cutlass" in their names, and grouped GEMMs belong to the experts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MATMUL, ATTENTION, NORM, MOE, SAMPLING, OTHER = TYPES = (
    "matmul",
    "attention",
    "norm",
    "moe",
    "sampling",
    "other",
)
LONGEST_NAME = 160


def _any(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(words), re.IGNORECASE)


CUDA_RULES = (
    (
        OTHER,  # vLLM's preparation of a step; some of it speaks of sampled tokens
        _any(
            "slot_mapping|block_table|_prepare_(prefill|decode|pos|rope)|_post_update|_expand_idx",
            "_apply_write|_combine_sampled|_get_num_sampled",
        ),
    ),
    (
        ATTENTION,
        _any(
            "flash(?!infer)",  # FlashAttention, FlashMLA, and vLLM's kernels that write its cache
            "fmha|unified_attention|paged_attention|prefillwith|decodewith|attn",
            "reduce_segments|reshape_and_cache|concat_and_cache|mla_",
            "_fwd_kernel_stage|_fwd_grouped_kernel",
        ),
    ),
    (MOE, _any("moe|expert|topk_?gating|topk_?softmax|grouped_?topk|grouped_?gemm")),
    (
        SAMPLING,
        _any(
            "_race_blocks|_finish_rows|_score_blocks|_score_rows|_noise_words",  # CoRun's
            "gumbel|temperature|penalties|bincount|min_p_kernel|bad_words|^_bias_kernel",
            "top_?k_?top_?p|sampl|log_?softmax|_ranks_kernel|logprob|multinomial|distribution",
            "arg_?max|sort|top_?k|softmax|cumsum|DeviceScan|bitmask|num_nans",
        ),
    ),
    (NORM, _any("(rms|layer)_?norm|rsqrt|qk_?norm")),
    # Inductor's kernels of their own have names such as triton_red_fused_3; a decode step's only
    # reductions that it makes are norms.
    (NORM, _any("^triton_(red|per)_fused")),
    (
        MATMUL,
        _any("gemm|gemv|nvjet|cutlass|matmul|split_?k|cublas|xmma|bmm_kernel|triton_tem|marlin"),
    ),
    (
        OTHER,
        _any(
            "rotary|rope|act_and_mul|silu|gelu|swiglu",
            "embedding|index_?select|gather|scatter|memcpy|memset|cat_?array",
            "nccl|all_?reduce|cross_device_reduce",
            "^triton_poi_fused|elementwise_kernel",
        ),
    ),
)

CPU_RULES = (
    (
        ATTENTION,
        _any("attention|attn|reshape_and_cache|concat_and_cache|mla_|kv_cache|scheduler_metadata"),
    ),
    (MOE, _any("moe|expert|grouped_?topk|topk_softmax")),
    (NORM, _any(r"(rms|layer)_?norm|::(rsqrt|pow|mean)\b")),  # the last three: RMSNorm in parts
    (
        MATMUL,
        _any(
            r"::(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum)\b",
            "gemm|onednn|mkldnn|packed_linear",
        ),
    ),
    (
        SAMPLING,
        _any(
            "softmax|arg_?max|::sort|top_?k|top_?p|multinomial|exponential|uniform|sampl",
            "logsumexp|cumsum|logprob|penalt|temperature",
            "bitwise|__(xor|and|or|rshift|lshift)__",  # CoRun's counter-based generator
        ),
    ),
    (
        OTHER,
        _any(
            "rotary|rope|silu|gelu|act_and_mul|embedding|index|slot_mapping",
            r"::(empty|copy_|_to_copy|to|view|reshape|slice|select|as_strided|expand|cat|resize_"
            r"|t|transpose|permute|split|split_with_sizes|unsqueeze|squeeze|detach|alias|narrow"
            r"|fill_|zero_|zeros|full|item|_local_scalar_dense|lift_fresh|contiguous|clone|unbind"
            r"|empty_like|empty_strided|unflatten|flatten|_unsafe_view|arange|pin_memory|chunk"
            r"|new_empty|stack)\b",
        ),
    ),
)


def classify(name: str, rules: Iterable[tuple[str, re.Pattern[str]]]) -> str | None:
    """The type of a kernel or operator, or None where no rule knows it."""
    return next((kind for kind, pattern in rules if pattern.search(name)), None)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Microseconds of each of ``TYPES``, and of every name that no rule knew (in OTHER too)."""

    by_type: dict[str, float]
    unclassified: dict[str, float]


def breakdown(
    times: Iterable[tuple[str, float]], rules: Iterable[tuple[str, re.Pattern[str]]]
) -> Breakdown:
    """Add up `times`: (name, microseconds). Unknown names are cut short, the slowest first."""
    rules = tuple(rules)
    by_type = dict.fromkeys(TYPES, 0.0)
    unknown: dict[str, float] = {}
    for name, microseconds in times:
        kind = classify(name, rules)
        by_type[kind or OTHER] += microseconds
        if kind is None:
            short = name[:LONGEST_NAME]
            unknown[short] = unknown.get(short, 0.0) + microseconds
    ranked = sorted(unknown.items(), key=lambda item: -item[1])
    return Breakdown(by_type, dict(ranked))
