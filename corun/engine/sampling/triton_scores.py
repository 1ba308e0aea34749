# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917 -- a kernel takes its pointers and sizes by position
"""Log-sum-exp, rank and group maxima of every row in one read of the logits. Needs Triton.

torch's log_softmax on a GPU splits a row among threads by the row's alignment in memory, so with an
odd vocabulary its last bits depend on the row's place in the batch. These kernels split by column.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _score_blocks(
    logits_ptr,
    tokens_ptr,
    block_max_ptr,
    block_sum_ptr,
    block_count_ptr,
    group_max_ptr,
    row_stride: tl.constexpr,
    vocab: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
):
    index = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    entry = index * block + tl.arange(0, block)
    logit = tl.load(row_ptr + entry, mask=entry < vocab, other=float("-inf")).to(tl.float32)
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    top = tl.max(logit)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(block_max_ptr + row * blocks + index, top)
    tl.store(block_sum_ptr + row * blocks + index, tl.sum(tl.exp(logit - base)))
    at_least = ((logit >= chosen) & (entry < vocab)).to(tl.int32)
    tl.store(block_count_ptr + row * blocks + index, tl.sum(at_least))
    leader = tl.max(tl.reshape(logit, (block // group, group)), axis=1)
    g = index * (block // group) + tl.arange(0, block // group)
    tl.store(group_max_ptr + row * groups + g, leader, mask=g < groups)


@triton.jit
def _score_rows(
    block_max_ptr,
    block_sum_ptr,
    block_count_ptr,
    top_ptr,
    log_sum_ptr,
    rank_ptr,
    blocks: tl.constexpr,
    padded_blocks: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, padded_blocks)
    inside = b < blocks
    maxima = tl.load(block_max_ptr + row * blocks + b, mask=inside, other=float("-inf"))
    sums = tl.load(block_sum_ptr + row * blocks + b, mask=inside, other=0.0)
    counts = tl.load(block_count_ptr + row * blocks + b, mask=inside, other=0)
    top = tl.max(maxima)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + row, top)
    tl.store(log_sum_ptr + row, tl.log(tl.sum(sums * tl.exp(maxima - base))))
    tl.store(rank_ptr + row, tl.sum(counts).to(tl.int64))


def row_scores(
    logits: torch.Tensor, tokens: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass over logits [N, V] (any floating dtype); tokens [N] int64, one per row.

    Returns, per row: the highest logit [N] fp32; log of the sum of exp(logit - highest) [N] fp32;
    the rank of the token [N] int64 (entries with a logit at least as high, itself included); and
    the maximum of every `group` neighbouring entries [N, ceil(V / group)] fp32.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or logits.data_ptr() % 16:
        logits = logits.contiguous().clone()  # one alignment, one compiled kernel
    blocks, groups = triton.cdiv(vocab, BLOCK), triton.cdiv(vocab, group)
    f32 = torch.float32
    # Each in a tensor of its own: a slice's alignment would follow the rows, and Triton compiles
    # kernels anew for another alignment.
    block_max = logits.new_empty((rows, blocks), dtype=f32)
    block_sum = torch.empty_like(block_max)
    block_count = logits.new_empty((rows, blocks), dtype=torch.int32)
    group_max = logits.new_empty((rows, groups), dtype=f32)
    top, log_sum = logits.new_empty(rows, dtype=f32), logits.new_empty(rows, dtype=f32)
    rank = logits.new_empty(rows, dtype=torch.int64)
    _score_blocks[(rows * blocks,)](
        logits, tokens, block_max, block_sum, block_count, group_max,
        row_stride=logits.stride(0), vocab=vocab, block=BLOCK, blocks=blocks, group=group,
        groups=groups, num_warps=8,
    )  # fmt: skip
    _score_rows[(rows,)](
        block_max, block_sum, block_count, top, log_sum, rank,
        blocks=blocks, padded_blocks=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return top, log_sum, rank, group_max
