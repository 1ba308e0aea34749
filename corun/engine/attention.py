"""Seam: attention without split-KV (paper, Section IV-C); isolated prefills keep it.

A split of the KV sequence is chosen from the whole batch, so a decode row's reduction order would
depend on its co-runners. (``corun.engine.split_steps`` splits it by the row's own length.)
Each backend says "one split" in its own way; a backend that has no entry here is refused by name.
Prefill steps hold one request, so their splits depend on nothing else.
"""

from collections.abc import Callable
from typing import Any

from vllm import envs

from corun.engine.latent_attention import hold_prefill
from corun.engine.runner_state import RunnerState

SEAMS: tuple[tuple, ...] = (
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata.max_num_splits"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata.scheduler_metadata"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata.max_query_len"),
    ("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version"),
    ("vllm.v1.attention.backends.mla.triton_mla", "_compute_num_kv_splits", ("max_seq_len",)),
    ("vllm.v1.worker.utils", "AttentionGroup.get_metadata_builder"),
    ("vllm.config", "AttentionConfig.flash_attn_max_num_splits_for_cuda_graph"),
)
SEAMS_BY_VERSION: dict[str, tuple[tuple, ...]] = {
    "0.32": (("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder.build"),),
}


def _one_split(metadata: Any, graph: bool, where: str) -> None:
    """Set FlashAttention metadata to one KV split (a graph has it from its capture)."""
    if not graph:
        metadata.max_num_splits = 1
        # An ahead-of-time schedule was made for the heuristic's splits: let the kernel make its
        # own.
        metadata.scheduler_metadata = None
    if metadata.max_num_splits != 1:
        raise RuntimeError(
            f"CoRun: {where} decode would split KV {metadata.max_num_splits} ways; "
            "attention_config.flash_attn_max_num_splits_for_cuda_graph must be 1"
        )


LONGEST_QUERY = 256
"""Tokens. FlashAttention 3 picks its tile by the longest query of a step: at head_dim 64 a decode
row's bits change where longest query x query heads per KV head passes 64 (the one-warpgroup tile),
and in pages of whole tiles where it passes the tile's rows, 192 at most (TMA). Told of at least so
many tokens it always takes the same tile. At other head sizes no row was seen to change."""


def _hold_flash_attn(builder: Any, state: RunnerState) -> None:
    build = builder.build
    steady_tile = state.plan.policy != "isolate" and builder.headdim <= 64 and _is_fa3()

    if state.plan.certified:
        # No ahead-of-time schedule, not in graphs either: it is made for the whole batch.
        builder.aot_schedule = False

    def held(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        decode = metadata.max_query_len == 1
        if state.one_split:
            _one_split(metadata, state.graph and not state.plan.certified, "FLASH_ATTN")
        if steady_tile:
            metadata.max_query_len = max(metadata.max_query_len, LONGEST_QUERY)
        if state.split is not None:
            longest = LONGEST_QUERY if steady_tile else 1
            state.split.attach(metadata, builder, decode=decode, longest=longest)
        return metadata

    builder.build = held


def _is_fa3() -> bool:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version() == 3


def _hold_flash_attn_mla(builder: Any, state: RunnerState) -> None:
    hold_prefill(builder, state)
    build = builder.build
    # One latent KV head: more than 64 query heads pass the one-warpgroup tile with one token.
    steady_tile = state.plan.policy != "isolate" and builder.num_heads <= 64

    if state.plan.certified:
        builder.fa_aot_schedule = False  # as for FLASH_ATTN

    def held(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        part = metadata.decode
        if not state.one_split or part is None:
            return metadata
        _one_split(part, state.graph and not state.plan.certified, "FLASH_ATTN_MLA")
        decode = part.max_query_len <= 1  # vLLM has 0 where it captures graphs
        if steady_tile:
            part.max_query_len = max(part.max_query_len, LONGEST_QUERY)
        if state.split is not None:
            longest = LONGEST_QUERY if steady_tile else 1
            state.split.attach(
                part, builder, decode=decode, longest=longest, leading=metadata.num_decodes
            )
        return metadata

    builder.build = held


def _hold_triton_attn(builder: Any, state: RunnerState) -> None:
    # More sequences than the threshold take the unsplit ("2D") kernel: with 0, all do.
    builder.seq_threshold_3D = 0


def _hold_triton_mla(builder: Any, state: RunnerState) -> None:
    from vllm.v1.attention.backends.mla import triton_mla

    def one_split(max_seq_len: int, sm_count: int) -> int:
        return 1

    triton_mla._compute_num_kv_splits = one_split
    hold_prefill(builder, state)


def _hold_cpu_attn(builder: Any, state: RunnerState) -> None:
    if envs.VLLM_CPU_ATTN_SPLIT_KV:
        raise RuntimeError("CoRun: VLLM_CPU_ATTN_SPLIT_KV is on in the worker; unset it")


HOLD: dict[str, Callable[[Any, RunnerState], None]] = {
    "FLASH_ATTN": _hold_flash_attn,
    "FLASH_ATTN_MLA": _hold_flash_attn_mla,
    "TRITON_ATTN": _hold_triton_attn,
    "TRITON_MLA": _hold_triton_mla,
    "CPU_ATTN": _hold_cpu_attn,
}


def install(runner: Any, state: RunnerState) -> list[str]:
    """Constrain every attention group's metadata builders; returns the backends' names.

    Called after the KV cache exists and before graphs are captured (a graph bakes the kernel in).
    """
    names = set()
    for groups in runner.attn_groups:
        for group in groups:
            name = group.backend.get_name()
            if name not in HOLD:
                raise ValueError(
                    f"CoRun has not been tested with the attention backend {name}; "
                    f"choose one of {', '.join(sorted(HOLD))} with --attention-backend"
                )
            names.add(name)
            for builder in group.metadata_builders:
                HOLD[name](builder, state)
    return sorted(names)
