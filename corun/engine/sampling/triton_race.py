# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0915, PLR0917 -- a kernel takes its pointers and sizes by position
"""The GPU sampler: two Triton kernels for the whole batch, one read of the logits. Needs Triton.

Rows race: entry i finishes at time E_i / p_i with E_i exponential noise from Philox, and the first
to finish is the draw (the Gumbel-max trick without its outer logarithm). What a row gets depends
on that row alone: kernels are addressed by row, every branch looks at one row's parameters, and
sums run over fixed columns.

1. ``_race_blocks`` (one program per row and block of the vocabulary). An unfiltered row: the
   block's winner. A row with top-k, top-p or min-p: only each group's maximum and mass.
2. ``_finish_rows`` (one program per row). An unfiltered row: the best of its blocks' winners. A
   filtered row: group maxima bound the cut from below (at least k entries reach the k-th largest
   group maximum; likewise for mass), so only the groups that reach the bound are read again: in
   a few passes to find the exact cut, in the last to hold the race among the survivors.

Filters keep the head of the order (logit descending, entry ascending): min-p, then top-k, then
top-p renormalised over what those two kept; top-p keeps an entry while the mass before it is
below p.
"""

import torch
import triton
import triton.language as tl

from corun.engine.sampling.params import GREEDY_BELOW, RowParams
from corun.engine.sampling.triton_cut import find_cut
from corun.engine.sampling.triton_heads import (
    base_mass,
    bound_below,
    load_groups,
    sortable,
    weigh,
)
from corun.engine.sampling.triton_noise import exponential, quad_words

BLOCK = 4096
GROUP = 32
MAX_GROUPS = 8192
TILE = 4096  # entries that a program of _finish_rows reads at once
BRACKET = 4096  # entries among which it ends its search for a cut
FINISH_WARPS = 8
FINISH_REGISTERS = 128  # per thread; two programs then share a multiprocessor
STAGES = 1  # of its software pipeline of loads; 1: none

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LOG2E = tl.constexpr(1.4426950408889634)
_NO_ENTRY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _race_blocks(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    block_max_ptr,
    block_time_ptr,
    block_token_ptr,
    group_max_ptr,
    group_mass_ptr,
    row_stride: tl.constexpr,
    vocab: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
):
    index = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    entry = index * block + tl.arange(0, block)
    logit = tl.load(
        logits_ptr + row * row_stride + entry, mask=entry < vocab, other=float("-inf")
    ).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < _GREEDY_BELOW
    filtered = (tl.load(top_k_ptr + row) < vocab) | (tl.load(top_p_ptr + row) < 1.0)
    filtered = (filtered | (tl.load(min_p_ptr + row) > 0.0)) & (not greedy)
    scale = _LOG2E / tl.where(greedy, 1.0, temperature)
    if filtered:
        tile = tl.reshape(logit, (block // group, group))
        leader = tl.max(tile, axis=1)
        level = tl.where(leader == float("-inf"), 0.0, leader)
        mass = tl.sum(tl.exp2((tile - level[:, None]) * scale), axis=1)
        g = index * (block // group) + tl.arange(0, block // group)
        tl.store(group_max_ptr + row * groups + g, leader, mask=g < groups)
        tl.store(group_mass_ptr + row * groups + g, mass, mask=g < groups)
    else:
        top = tl.max(logit)
        time = tl.where(logit == top, 0.0, float("inf"))
        if not greedy:
            base = tl.where(top == float("-inf"), 0.0, top)
            quads = index * (block // 4) + tl.arange(0, block // 4)
            words = quad_words(tl.load(seeds_ptr + row), quads, tl.load(positions_ptr + row))
            noise = exponential(tl.reshape(words, (block,)))
            time = noise * tl.exp2((base - logit) * scale)
        best = tl.min(time)
        token = tl.min(tl.where(time == best, entry, _NO_ENTRY))
        tl.store(block_max_ptr + row * blocks + index, top)
        tl.store(block_time_ptr + row * blocks + index, best)
        tl.store(block_token_ptr + row * blocks + index, token)


@triton.jit
def _finish_rows(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    block_max_ptr,
    block_time_ptr,
    block_token_ptr,
    group_max_ptr,
    group_mass_ptr,
    listed_ptr,
    bracket_ptr,
    token_ptr,
    cut_logit_ptr,
    cut_entry_ptr,
    row_stride: tl.constexpr,
    vocab: tl.constexpr,
    blocks: tl.constexpr,
    padded_blocks: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    padded_groups: tl.constexpr,
    rows: tl.constexpr,
    room: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    greedy = temperature < _GREEDY_BELOW
    filtered = ((top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)) & (not greedy)
    scale = _LOG2E / tl.where(greedy, 1.0, temperature)
    if not filtered:
        b = tl.arange(0, padded_blocks)
        inside = b < blocks
        maxima = tl.load(block_max_ptr + row * blocks + b, mask=inside, other=float("-inf"))
        time = tl.load(block_time_ptr + row * blocks + b, mask=inside, other=float("inf"))
        token = tl.load(block_token_ptr + row * blocks + b, mask=inside, other=_NO_ENTRY)
        top = tl.max(maxima)
        base = tl.where(top == float("-inf"), 0.0, top)
        if greedy:
            time = tl.where(maxima == top, 0.0, float("inf"))
        else:
            time = time * tl.exp2((base - maxima) * scale)
        winner = tl.min(tl.where(time == tl.min(time), token, _NO_ENTRY))
        tl.store(token_ptr + row, tl.minimum(winner, vocab - 1).to(tl.int64))
        tl.store(cut_logit_ptr + row, float("-inf"))
        tl.store(cut_entry_ptr + row, vocab)
        return

    row_ptr = logits_ptr + row * row_stride
    row_listed_ptr = listed_ptr + row * groups
    row_bracket_ptr = bracket_ptr + row * room
    g = tl.arange(0, padded_groups)
    inside = g < groups
    maxima = tl.load(group_max_ptr + row * groups + g, mask=inside, other=float("-inf")) + 0.0
    top = tl.max(maxima)
    top = tl.where(top == float("-inf"), 0.0, top)
    floor = tl.where(min_p > 0.0, tl.log2(min_p), float("-inf"))
    keys = sortable(maxima)
    high = tl.max(keys)
    by_mass = (top_k >= vocab) & (min_p == 0.0)
    mass = tl.load(group_mass_ptr + row * groups + g, mask=inside, other=0.0)
    leader = tl.exp2((maxima - top) * scale)
    total = tl.sum(mass * leader)
    weights = tl.where(inside, tl.where(by_mass, leader, 1.0), 0.0)
    # Entries this far below the top weigh less than 1 - p together, however many there are.
    depth = (tl.log2(vocab * 1.0) - tl.log2(tl.maximum(1.0 - top_p, 1e-30))) / scale
    deep = sortable(tl.where(top_p < 1.0, top - depth, float("-inf")) + 0.0)
    deep = tl.minimum(deep, high)  # in a row of -inf alone the top is below any depth
    bound = tl.zeros((), dtype=tl.uint32)
    if by_mass | (top_k < vocab):
        bound = bound_below(keys, weights, tl.where(by_mass, top_p * total, top_k.to(tl.float32)))
    bound = tl.minimum(tl.where(by_mass, tl.maximum(bound, deep), bound), high)
    reach = inside & (keys >= bound) & ((maxima - top) * scale >= floor)
    place = tl.cumsum(reach.to(tl.int32), axis=0) - 1
    listed = tl.sum(reach.to(tl.int32))
    tl.store(row_listed_ptr + place, g, mask=reach)
    tl.debug_barrier()  # the list is read back by other threads of this program

    lowest_leader = tl.min(tl.where(maxima > float("-inf"), maxima, top))
    reach = tl.where(lowest_leader < top, (top - lowest_leader) * 0.5, 1.0)
    cut_key = tl.zeros((), dtype=tl.uint32)
    cut_entry = tl.zeros((), dtype=tl.int32) + vocab
    if top_k < vocab:
        cut_key, cut_entry = find_cut(
            row_ptr, row_listed_ptr, row_bracket_ptr, listed, vocab, top, scale, float("-inf"),
            cut_key, cut_entry, False, top_k.to(tl.float32), bound, high, reach, rows, group, room,
            stages,
        )  # fmt: skip
    if top_p < 1.0:
        if not by_mass:
            total = base_mass(
                row_ptr, row_listed_ptr, listed, vocab, top, scale, floor, cut_key, cut_entry,
                rows, group, stages,
            )  # fmt: skip
        cut_key, cut_entry = find_cut(
            row_ptr, row_listed_ptr, row_bracket_ptr, listed, vocab, top, scale, floor,
            cut_key, cut_entry, True, top_p * total,
            tl.maximum(tl.maximum(bound, cut_key), deep), high, reach, rows, group, room, stages,
        )  # fmt: skip

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    best = tl.full((rows, group), float("inf"), dtype=tl.float32)
    first = tl.full((rows, group), _NO_ENTRY, dtype=tl.int32)
    lowest = tl.full((rows, group), float("inf"), dtype=tl.float32)
    for start in tl.range(0, listed, rows, num_stages=stages):
        logit, number, entry, valid = load_groups(
            row_ptr, row_listed_ptr, start, listed, vocab, rows, group
        )
        _key, weight = weigh(logit, entry, valid, top, scale, floor, cut_key, cut_entry, False)
        quads = number[:, None] * (group // 4) + tl.arange(0, group // 4)[None, :]
        noise = exponential(tl.reshape(quad_words(seed, quads, position), (rows, group)))
        time = tl.where(weight > 0.0, noise * tl.exp2((top - logit) * scale), float("inf"))
        # Entries rise from tile to tile, so the first of equal times is the lowest entry.
        earlier = (weight > 0.0) & ((time < best) | (first == _NO_ENTRY))
        first = tl.where(earlier, entry, first)
        best = tl.where(earlier, time, best)
        lowest = tl.minimum(lowest, tl.where(weight > 0.0, logit, float("inf")))
    last_logit = tl.min(lowest)
    winner = tl.min(tl.where(best == tl.min(best), first, _NO_ENTRY))
    tl.store(token_ptr + row, tl.minimum(winner, vocab - 1).to(tl.int64))
    tl.store(cut_logit_ptr + row, last_logit)
    tl.store(cut_entry_ptr + row, tl.where(sortable(last_logit) == cut_key, cut_entry, vocab))


def race(
    logits: torch.Tensor, params: RowParams, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row on the GPU.

    logits: [N, V], any floating dtype, entries contiguous. params, positions: see ``core``.
    Returns tokens [N] int64 and the head that the filters kept: the last kept logit [N] fp32 and,
    among entries equal to it, the last kept entry [N] int32 (-inf and V for an unfiltered row).
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or logits.data_ptr() % 16:
        # One alignment, one compiled kernel: the order of its sums must never vary.
        logits = logits.contiguous().clone()
    group = max(GROUP, triton.next_power_of_2(triton.cdiv(vocab, MAX_GROUPS)))
    blocks, groups = triton.cdiv(vocab, BLOCK), triton.cdiv(vocab, group)
    f32, i32 = torch.float32, torch.int32
    # Each in a tensor of its own: see triton_scores.
    block_max = logits.new_empty((rows, blocks), dtype=f32)
    block_time = torch.empty_like(block_max)
    group_max = logits.new_empty((rows, groups), dtype=f32)
    group_mass = torch.empty_like(group_max)
    block_token = logits.new_empty((rows, blocks), dtype=i32)
    listed = logits.new_empty((rows, groups), dtype=i32)
    bracket = logits.new_empty((rows, BRACKET), dtype=i32)
    token = logits.new_empty(rows, dtype=torch.int64)
    cut_logit, cut_entry = logits.new_empty(rows, dtype=f32), logits.new_empty(rows, dtype=i32)
    given = (
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seeds,
        positions,
        block_max,
        block_time,
        block_token,
        group_max,
        group_mass,
    )
    sizes = {"row_stride": logits.stride(0), "vocab": vocab, "blocks": blocks, "group": group}
    _race_blocks[(rows * blocks,)](*given, block=BLOCK, groups=groups, num_warps=8, **sizes)
    _finish_rows[(rows,)](
        *given,
        listed,
        bracket,
        token,
        cut_logit,
        cut_entry,
        padded_blocks=triton.next_power_of_2(blocks),
        groups=groups,
        padded_groups=triton.next_power_of_2(groups),
        rows=TILE // group,
        room=BRACKET,
        stages=STAGES,
        num_warps=FINISH_WARPS,
        maxnreg=FINISH_REGISTERS,
        **sizes,
    )
    return token, cut_logit, cut_entry
