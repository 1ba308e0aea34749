# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917 -- a kernel takes its pointers and sizes by position
"""Decode attention over a paged KV cache, split by each request's own length. Needs Triton.

``split_config`` has the rule for the splits. A row's bits depend on its own length, query and KV:

1. ``_attend_splits``: each (row, block of query heads, split) is a work item; programs take items
   in strides. An item's partial softmax (maximum, sum, weighted values in fp32) runs over tiles of
   fixed size, whichever program computes it.
2. ``_merge_splits``: one program per (row, query head) merges a fixed tile of ``max_splits``
   partials, those past the request's own number weighing nothing.

A row of length 0 is left as it is: no item is its own, and the second kernel leaves at once. So a
batch without any other row costs two launches and a look at its lengths.

Every size that the batch decides (rows, block-table width, work items) is a plain integer that
Triton may not specialize on, so one compiled kernel serves every batch. The grid is a constant: the
launch reads nothing from the device and can be captured in a CUDA graph.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from corun.engine.kernels.split_config import SplitWorkspace, check_inputs

_SCAN = tl.constexpr(256)  # rows looked at together when an item looks for its row


@triton.jit
def _split_tiles(lengths, tile: tl.constexpr, least: tl.constexpr, max_splits: tl.constexpr):
    """Tiles in a split and number of splits, by a request's length alone."""
    tiles = (lengths + tile - 1) // tile
    per_split = tl.maximum((tiles + max_splits - 1) // max_splits, least)
    return per_split, (tiles + per_split - 1) // per_split


@triton.jit
def _find_split(
    lengths_ptr, rows, wanted, tile: tl.constexpr, least: tl.constexpr, max_splits: tl.constexpr
):
    """The row and the split in it of the batch's split `wanted`, and the batch's splits in all."""
    scan = tl.arange(0, _SCAN)
    row = 0
    before = 0
    seen = 0
    for first in range(0, rows, _SCAN):
        lengths = tl.load(lengths_ptr + first + scan, mask=first + scan < rows, other=0)
        ends = seen + tl.cumsum(_split_tiles(lengths, tile, least, max_splits)[1], axis=0)
        passed = ends <= wanted
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        seen = tl.max(ends)
    return row, wanted - before, seen


@triton.jit(
    do_not_specialize=["rows", "query_stride", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"],
)
def _attend_splits(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    lengths_ptr,
    partial_ptr,
    peak_ptr,
    total_ptr,
    rows,
    query_stride,
    table_stride,
    scale,
    key_block_stride: tl.constexpr,
    key_token_stride: tl.constexpr,
    key_head_stride: tl.constexpr,
    value_block_stride: tl.constexpr,
    value_token_stride: tl.constexpr,
    value_head_stride: tl.constexpr,
    block_size: tl.constexpr,
    query_heads: tl.constexpr,
    ratio: tl.constexpr,  # query heads per KV head
    heads: tl.constexpr,  # query heads per item, padded
    dim: tl.constexpr,  # of the values
    rope: tl.constexpr,  # dimensions of the keys past those of the values (MLA), or 0
    latent: tl.constexpr,  # the values are the first dimensions of the keys (MLA)
    tile: tl.constexpr,
    least: tl.constexpr,
    max_splits: tl.constexpr,
    overlap: tl.constexpr,
):
    blocks_per_kv_head: tl.constexpr = (ratio + heads - 1) // heads
    head_blocks: tl.constexpr = (query_heads // ratio) * blocks_per_kv_head
    lane = tl.arange(0, heads)
    d = tl.arange(0, dim)
    t = tl.arange(0, tile)
    query_stride = tl.multiple_of(query_stride, 8)
    item = tl.program_id(0)
    row, split, splits = _find_split(
        lengths_ptr, rows, item // head_blocks, tile, least, max_splits
    )
    while item < splits * head_blocks:
        length = tl.load(lengths_ptr + row)
        size = _split_tiles(length, tile, least, max_splits)[0] * tile
        begin = split * size
        end = tl.minimum(begin + size, length)

        block = item % head_blocks
        kv_head = block // blocks_per_kv_head
        place = (block % blocks_per_kv_head) * heads + lane
        head = kv_head * ratio + place
        real = place < ratio
        query_row = query_ptr + row.to(tl.int64) * query_stride
        query_at = query_row + head[:, None] * (dim + rope)
        q = tl.load(query_at + d[None, :], mask=real[:, None], other=0.0)
        if rope > 0:
            r = tl.arange(0, rope)
            q_rope = tl.load(query_at + dim + r[None, :], mask=real[:, None], other=0.0)
        table_row = table_ptr + row.to(tl.int64) * table_stride
        peak = tl.full((heads,), float("-inf"), tl.float32)
        total = tl.zeros((heads,), tl.float32)
        acc = tl.zeros((heads, dim), tl.float32)
        for at in range(begin, end, tile):
            token = at + t
            inside = token < end
            page = tl.load(table_row + token // block_size, mask=inside, other=0).to(tl.int64)
            inner = token % block_size
            key_at = page * key_block_stride + inner * key_token_stride + kv_head * key_head_stride
            key_at = key_ptr + key_at[:, None]
            k = tl.load(key_at + d[None, :], mask=inside[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k))
            if rope > 0:
                k_rope = tl.load(key_at + dim + r[None, :], mask=inside[:, None], other=0.0)
                score = tl.dot(q_rope, tl.trans(k_rope), score)
            if latent:
                v = k
            else:
                value_at = page * value_block_stride + inner * value_token_stride
                value_at = value_ptr + (value_at + kv_head * value_head_stride)[:, None]
                v = tl.load(value_at + d[None, :], mask=inside[:, None], other=0.0)
            score = tl.where(inside[None, :], score * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, axis=1))
            weight = tl.exp2(score - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weight, axis=1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
            peak = new_peak
        slot = (row.to(tl.int64) * max_splits + split) * query_heads + head
        tl.store(peak_ptr + slot, peak, mask=real)
        tl.store(total_ptr + slot, total, mask=real)
        tl.store(partial_ptr + slot[:, None] * dim + d[None, :], acc, mask=real[:, None])
        item += tl.num_programs(0)
        if item < splits * head_blocks:
            row, split, splits = _find_split(
                lengths_ptr, rows, item // head_blocks, tile, least, max_splits
            )
    if overlap:
        gdc_launch_dependents()


@triton.jit(
    do_not_specialize=["out_stride"], do_not_specialize_on_alignment=["lengths_ptr", "out_ptr"]
)
def _merge_splits(
    partial_ptr,
    peak_ptr,
    total_ptr,
    lengths_ptr,
    out_ptr,
    out_stride,
    query_heads: tl.constexpr,
    dim: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
    least: tl.constexpr,
    max_splits: tl.constexpr,
    overlap: tl.constexpr,
):
    row = (tl.program_id(0) // query_heads).to(tl.int64)
    head = tl.program_id(0) % query_heads
    d = tl.program_id(1) * chunk + tl.arange(0, chunk)
    length = tl.load(lengths_ptr + row)
    if overlap:
        gdc_wait()  # the partial results are there, and seen, from here on
    if length > 0:
        splits = _split_tiles(length, tile, least, max_splits)[1]
        s = tl.arange(0, max_splits)
        inside = s < splits
        slot = (row * max_splits + s) * query_heads + head
        peak = tl.load(peak_ptr + slot, mask=inside, other=float("-inf"))
        total = tl.load(total_ptr + slot, mask=inside, other=0.0)
        at = partial_ptr + slot[:, None] * dim + d[None, :]
        acc = tl.load(at, mask=inside[:, None], other=0.0)
        weight = tl.exp2(peak - tl.max(peak))
        value = tl.sum(weight[:, None] * acc, axis=0) / tl.sum(weight * total)
        out_at = out_ptr + row * out_stride + head * dim + d
        tl.store(out_at, value.to(out_ptr.dtype.element_ty))


def split_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: SplitWorkspace,
) -> None:
    """Attention of one query token per row over its request's KV, into `out`.

    query: [N, Hq, Dk] bf16 or fp16. key_cache, value_cache: [blocks, block_size, Hkv, Dk] and
    [blocks, block_size, Hkv, Dv], any strides, same dtype; Dk = Dv in 64, 128, 256, or MLA's latent
    cache: Dk = 576, Hkv = 1 and value_cache = key_cache[..., :512]. block_table: [N, max_blocks]
    int32. seq_lens: [N] int32, the query's own token included; the output of a row of length 0
    (padding, or one that another kernel computes) is not touched. scale: of the scores. out:
    [N, Hq, Dv]. workspace: for at least N rows.

    A row's bits depend on its query, its KV and its length alone. Launches two kernels, reads
    nothing on the host. ValueError for shapes, dtypes or strides that it cannot take.
    """
    check_inputs(query, key_cache, value_cache, block_table, seq_lens, out, workspace)
    rows, query_heads, key_dim = query.shape
    block_size, kv_heads, dim = value_cache.shape[1:]
    config = workspace.config
    rule = {
        "tile": config.tile,
        "least": config.split // config.tile,
        "max_splits": config.max_splits,
        "overlap": config.overlap,
    }
    _attend_splits[(workspace.programs,)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        workspace.partial,
        workspace.peak,
        workspace.total,
        rows,
        query.stride(0),
        block_table.stride(0),
        scale * math.log2(math.e),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_size=block_size,
        query_heads=query_heads,
        ratio=query_heads // kv_heads,
        heads=config.heads,
        dim=dim,
        rope=key_dim - dim,
        latent=key_dim != dim,
        num_warps=config.warps,
        num_stages=config.stages,
        **rule,
    )
    chunk = min(dim, 8192 // config.max_splits)
    _merge_splits[(rows * query_heads, dim // chunk)](
        workspace.partial,
        workspace.peak,
        workspace.total,
        seq_lens,
        out,
        out.stride(0),
        query_heads=query_heads,
        dim=dim,
        chunk=chunk,
        num_warps=config.merge_warps,
        launch_pdl=config.overlap,
        **rule,
    )
