"""Split decode: the rule for the splits, room for partial results, checks of the inputs.

A request's KV is cut at multiples of its split length, counted from its own start. The split length
is ``SplitConfig.split`` tokens. A request longer than ``split * max_splits`` tokens takes the
shortest multiple of ``tile`` that makes ``max_splits`` splits or fewer, which bounds the workspace.
Both depend on the request's own length alone. No Triton here.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 16  # bytes; one alignment, one compiled kernel
# Tokens of KV up to which a row is left to the attention backend. One split is as fast there.
SPLIT_BEYOND = 2048


@dataclass(frozen=True)
class SplitConfig:
    """How a request is split and a split computed. Other values may give other bits.

    split: tokens in a split, a multiple of tile. tile: tokens in one step of a split's loop.
    max_splits: splits of a request at most. heads: query heads in one work item. warps, stages,
    merge_warps: Triton's, of the two kernels. Two fields reach no bit: programs_per_sm, programs
    launched per multiprocessor (no more than fit on one), and overlap, whether the second kernel
    is launched while the first ends (GPUs from Hopper on).
    """

    split: int
    tile: int
    max_splits: int = 64
    heads: int = 16
    warps: int = 4
    stages: int = 5  # page numbers are loaded ahead of the KV: 5 stages hold two KV tiles
    merge_warps: int = 4
    programs_per_sm: int = 3
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.split % self.tile:
            raise ValueError(f"split ({self.split}) must be a multiple of tile ({self.tile})")
        for name in ("tile", "max_splits", "heads"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} ({value}) must be a power of two, 16 or more")


# By the head dimension of the values (512: MLA's latent).
CONFIGS = {
    64: SplitConfig(split=256, tile=64, programs_per_sm=4),
    128: SplitConfig(split=256, tile=64),
    256: SplitConfig(split=256, tile=32),
    512: SplitConfig(split=256, tile=32, heads=32, warps=8, programs_per_sm=1),
}


HEAD_DIMS = (64, 128, 256)  # of ordinary heads
_NO_BITS = ("programs_per_sm", "overlap")


def reaching_bits() -> dict[str, Any]:
    """What decides a split row's bits, as JSON values: the rule, and every configuration of it."""
    configs = {
        str(dim): {n: v for n, v in dataclasses.asdict(c).items() if n not in _NO_BITS}
        for dim, c in CONFIGS.items()
    }
    return {"beyond": SPLIT_BEYOND, "configs": configs}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class SplitWorkspace:
    """Room for the partial results of `rows` rows; every call overwrites it.

    partial: [rows, max_splits, Hq, Dv] fp32. peak, total: [rows, max_splits, Hq] fp32. Calls that
    may run at the same time need workspaces of their own; layers that follow each other share one.
    """

    config: SplitConfig
    programs: int
    partial: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        query_heads: int,
        value_dim: int,
        device: torch.device,
        config: SplitConfig | None = None,
    ) -> "SplitWorkspace":
        """A workspace for up to `rows` rows: rows * max_splits * Hq * (Dv + 2) fp32 values."""
        if value_dim not in CONFIGS:
            raise ValueError(f"head dimension {value_dim}: must be one of {sorted(CONFIGS)}")
        config = config or CONFIGS[value_dim]
        shape = (rows, config.max_splits, query_heads)
        return cls(
            config,
            config.programs_per_sm * _multiprocessors(device),
            torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def check_inputs(  # noqa: PLR0917 -- as split_decode takes them
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: SplitWorkspace,
) -> None:
    """ValueError for what ``split_decode`` cannot take; it documents the shapes."""
    rows, query_heads, key_dim = query.shape
    kv_heads, dim = value_cache.shape[2:]
    latent = key_dim != dim
    if dim not in CONFIGS or key_cache.shape[3] != key_dim:
        raise ValueError(f"head dimensions {key_dim} and {dim}: must be equal, 64, 128 or 256")
    if latent and (key_dim != 576 or dim != 512 or key_cache.data_ptr() != value_cache.data_ptr()):
        raise ValueError("MLA: the values must be the first 512 dimensions of 576-wide keys")
    if query.dtype not in (torch.float16, torch.bfloat16) or not (
        query.dtype == key_cache.dtype == value_cache.dtype
    ):
        raise ValueError(f"query and cache must be both bfloat16 or float16, not {query.dtype}")
    if query_heads % kv_heads or key_cache.shape[1] % 16:
        raise ValueError(
            f"{query_heads} query heads, {kv_heads} KV heads, blocks of {key_cache.shape[1]}: "
            "heads must divide, and the block size must be a multiple of 16"
        )
    if block_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError("block_table and seq_lens must be int32")
    if out.shape != (rows, query_heads, dim) or len(block_table) < rows or len(seq_lens) < rows:
        raise ValueError(f"out, block_table and seq_lens must have {rows} rows, as the query has")
    if block_table.stride(1) != 1 or seq_lens.stride(0) != 1:
        raise ValueError("block_table rows and seq_lens must be contiguous")
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride()[1:] != (tensor.shape[2], 1):
            raise ValueError(f"a row of {name} must be contiguous")
    strides = (query.stride(0), *key_cache.stride()[:3], *value_cache.stride()[:3])
    starts = [x.data_ptr() for x in (query, key_cache, value_cache)]
    if any(s % 8 for s in strides) or any(p % _ALIGNMENT for p in starts):
        raise ValueError(f"query and cache rows must be aligned to {_ALIGNMENT} bytes")
    room = workspace.partial.shape
    if room[0] < rows or room[2:] != (query_heads, dim):
        raise ValueError(
            f"workspace for {room[0]} rows of {tuple(room[2:])}: "
            f"{rows} rows of {(query_heads, dim)} need another"
        )
