# mypy: disable-error-code="no-untyped-def"
"""The GPU sampler: two Triton kernels for the whole batch, one read of the logits. Needs Triton.

Rows race: entry i finishes at time E_i / p_i with E_i exponential noise from Philox, and the first
to finish is the draw (the Gumbel-max trick without its outer logarithm). What a row gets depends on
that row alone: kernels are addressed by row, every branch looks at one row's parameters, and sums run
over fixed columns.

1. ``_race_blocks`` (one program per row and block of the vocabulary). An unfiltered row: the block's
   winner. A row with top-k, top-p or min-p: only the maximum and the mass of each group of entries.
2. ``_finish_rows`` (one program per row). An unfiltered row: the best of its blocks' winners. A
   filtered row: group maxima bound the cut from below (at least k entries reach the k-th largest
   group maximum; likewise for mass), so only the few groups that reach the bound are read again to
   find the exact cut and to hold the race among the survivors.

Filters keep the head of the order (logit descending, entry ascending): min-p, then top-k, then top-p
renormalised over what those two kept; top-p keeps an entry while the mass before it is below p.
"""

import torch
import triton
import triton.language as tl

from corun.engine.sampling.params import GREEDY_BELOW, RowParams
from corun.engine.sampling.philox import STREAM

BLOCK = 4096
GROUP = 32
MAX_GROUPS = 8192
TILE = 2048

_STREAM = tl.constexpr(STREAM)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_PER_STEP = tl.constexpr(0.6931471805599453 / (1 << 23))
_NO_ENTRY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def exponential(word):
    """Exponential noise (fp32, > 0) from 32-bit words: -log1p(-u) with u = (word + 0.5) / 2**32.

    The winning tail is u -> 0, where fp32 keeps all 32 bits (smallest value 2**-33); u is held below
    1, so the value is finite. 1 - u = 2**e * (1 + f) with f in [-1/3, 1/3], where f is -u itself
    while e is 0; then a degree-9 polynomial for log(1 + f), relative error 2e-7.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # e << 23, for a mantissa in [2/3, 4/3)
    f = tl.where(exponent == 0, -u, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
    q = f * 0.1342574954032898 - 0.15040764212608337
    q = q * f + 0.14118309319019318
    q = q * f - 0.16483017802238464
    q = q * f + 0.20003780722618103
    q = q * f - 0.2500414550304413
    q = q * f + 0.33333319425582886
    q = q * f - 0.49999985098838806
    return -(exponent.to(tl.float32) * _LN2_PER_STEP + (f * f * q + f))


@triton.jit
def quad_words(seed, quads, position):
    """Philox words of quads (int32, any shape [..., Q]): shape [..., Q, 2, 2], in entry order."""
    low = tl.zeros_like(quads) + (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = tl.zeros_like(quads) + (position >> 32).to(tl.int32)
    stream = tl.zeros_like(quads) + _STREAM
    w0, w1, w2, w3 = tl.philox(seed, quads, low, high, stream)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def sortable(x):
    """fp32 -> uint32 in the same order (no NaN; -0.0 must have been turned into 0.0)."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


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
    index = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
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
def _load_groups(row_ptr, listed_ptr, start, listed, vocab, rows: tl.constexpr, group: tl.constexpr):
    """Tile [rows, group] of listed groups: logits (-inf outside), group numbers, entries, validity."""
    g = start + tl.arange(0, rows)
    number = tl.load(listed_ptr + g, mask=g < listed, other=0)
    entry = number[:, None] * group + tl.arange(0, group)[None, :]
    valid = (g < listed)[:, None] & (entry < vocab)
    logit = tl.load(row_ptr + entry, mask=valid, other=float("-inf")).to(tl.float32) + 0.0
    return logit, number, entry, valid


@triton.jit
def _weights(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass):
    """What each entry counts: 0 outside the base set, else its mass (1 when counting)."""
    key = sortable(logit)
    weight = tl.where(by_mass, tl.exp2((logit - top) * scale), 1.0)
    member = (key > base_key) | ((key == base_key) & (entry <= base_cut))
    member = member & valid & ((logit - top) * scale >= floor)
    return key, tl.where(member, weight, 0.0)


@triton.jit
def _find_cut(
    row_ptr,
    listed_ptr,
    listed,
    vocab,
    top,
    scale,
    floor,
    base_key,
    base_cut,
    by_mass,
    target,
    low,
    high,
    rows: tl.constexpr,
    group: tl.constexpr,
):
    """The shortest head of the base set whose weight reaches `target`: (last key, last entry).

    Searches keys in [low, high]; `low` is known to reach the target. The search takes a quarter of
    the interval a time. Ties at the last key are kept in entry order.
    """
    while low < high:
        step = (high - low) // 4 + 1
        at_1 = 0.0
        at_2 = 0.0
        at_3 = 0.0
        for start in range(0, listed, rows):
            logit, _number, entry, valid = _load_groups(
                row_ptr, listed_ptr, start, listed, vocab, rows, group
            )
            key, weight = _weights(
                logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass
            )
            at_1 += tl.sum(tl.where(key >= low + step, weight, 0.0))
            at_2 += tl.sum(tl.where(key >= low + 2 * step, weight, 0.0))
            at_3 += tl.sum(tl.where(key >= low + 3 * step, weight, 0.0))
        reached = (at_1 >= target).to(tl.uint32) + (at_2 >= target).to(tl.uint32)
        reached += (at_3 >= target).to(tl.uint32)
        next_low = low + reached * step
        high = tl.where(reached == 3, high, tl.minimum(high, next_low + step - 1))
        low = tl.minimum(next_low, high)
    above = 0.0
    ties = 0.0
    tie_weight = 0.0
    for start in range(0, listed, rows):
        logit, _number, entry, valid = _load_groups(
            row_ptr, listed_ptr, start, listed, vocab, rows, group
        )
        key, weight = _weights(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
        above += tl.sum(tl.where(key > low, weight, 0.0))
        ties += tl.sum(((key == low) & (weight > 0.0)).to(tl.float32))
        tie_weight = tl.maximum(tie_weight, tl.max(tl.where(key == low, weight, 0.0)))
    needed = tl.where(tie_weight > 0.0, tl.ceil((target - above) / tie_weight), ties)
    needed = tl.minimum(tl.maximum(needed, 1.0), tl.maximum(ties, 1.0))
    first = tl.zeros((), dtype=tl.int32)
    last = first + (vocab - 1)
    if needed < ties:
        while first < last:
            middle = (first + last) // 2
            count = 0.0
            for start in range(0, listed, rows):
                logit, _number, entry, valid = _load_groups(
                    row_ptr, listed_ptr, start, listed, vocab, rows, group
                )
                key, weight = _weights(
                    logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass
                )
                tie = (key == low) & (weight > 0.0) & (entry <= middle)
                count += tl.sum(tie.to(tl.float32))
            enough = count >= needed
            last = tl.where(enough, middle, last)
            first = tl.where(enough, first, middle + 1)
    return low, last


@triton.jit
def _bound(keys, weights, target):
    """The largest key that keys of total weight `target` or more reach; 0 if all fall short."""
    bound = tl.zeros((), dtype=tl.uint32)
    bit = bound + 0x80000000
    for _ in range(32):
        tried = bound | bit
        reached = tl.sum(tl.where(keys >= tried, weights, 0.0)) >= target
        bound = tl.where(reached, tried, bound)
        bit = bit >> 1
    return bound


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
    bound = tl.zeros((), dtype=tl.uint32)
    if by_mass | (top_k < vocab):
        bound = _bound(keys, weights, tl.where(by_mass, top_p * total, top_k.to(tl.float32)))
    reach = inside & (keys >= bound) & ((maxima - top) * scale >= floor)
    place = tl.cumsum(reach.to(tl.int32), axis=0) - 1
    listed = tl.sum(reach.to(tl.int32))
    tl.store(row_listed_ptr + place, g, mask=reach)
    tl.debug_barrier()  # the list is read back by other threads of this program

    cut_key = tl.zeros((), dtype=tl.uint32)
    cut_entry = tl.zeros((), dtype=tl.int32) + vocab
    if top_k < vocab:
        cut_key, cut_entry = _find_cut(
            row_ptr, row_listed_ptr, listed, vocab, top, scale, float("-inf"), cut_key, cut_entry,
            False, top_k.to(tl.float32), bound, high, rows, group,
        )  # fmt: skip
    if top_p < 1.0:
        if not by_mass:
            total = 0.0
            for start in range(0, listed, rows):
                logit, _number, entry, valid = _load_groups(
                    row_ptr, row_listed_ptr, start, listed, vocab, rows, group
                )
                _key, weight = _weights(
                    logit, entry, valid, top, scale, floor, cut_key, cut_entry, True
                )
                total += tl.sum(weight)
        cut_key, cut_entry = _find_cut(
            row_ptr, row_listed_ptr, listed, vocab, top, scale, floor, cut_key, cut_entry,
            True, top_p * total, tl.maximum(bound, cut_key), high, rows, group,
        )  # fmt: skip

    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    best = float("inf")
    winner = tl.zeros((), dtype=tl.int32) + _NO_ENTRY
    lowest = float("inf")
    for start in range(0, listed, rows):
        logit, number, entry, valid = _load_groups(
            row_ptr, row_listed_ptr, start, listed, vocab, rows, group
        )
        _key, weight = _weights(logit, entry, valid, top, scale, floor, cut_key, cut_entry, False)
        quads = number[:, None] * (group // 4) + tl.arange(0, group // 4)[None, :]
        noise = exponential(tl.reshape(quad_words(seed, quads, position), (rows, group)))
        time = tl.where(weight > 0.0, noise * tl.exp2((top - logit) * scale), float("inf"))
        tile_best = tl.min(time)
        tile_winner = tl.min(tl.where((time == tile_best) & (weight > 0.0), entry, _NO_ENTRY))
        earlier = (tile_best < best) | ((tile_best == best) & (tile_winner < winner))
        winner = tl.where(earlier, tile_winner, winner)
        best = tl.minimum(best, tile_best)
        lowest = tl.minimum(lowest, tl.min(tl.where(weight > 0.0, logit, float("inf"))))
    tl.store(token_ptr + row, tl.minimum(winner, vocab - 1).to(tl.int64))
    tl.store(cut_logit_ptr + row, lowest)
    tl.store(cut_entry_ptr + row, tl.where(sortable(lowest) == cut_key, cut_entry, vocab))


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
    f32 = {"dtype": torch.float32, "device": logits.device}
    i32 = {"dtype": torch.int32, "device": logits.device}
    block_max, block_time = torch.empty((2, rows, blocks), **f32)
    group_max, group_mass = torch.empty((2, rows, groups), **f32)
    block_token = torch.empty((rows, blocks), **i32)
    listed = torch.empty((rows, groups), **i32)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    cut_logit, cut_entry = torch.empty(rows, **f32), torch.empty(rows, **i32)
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
    _race_blocks[(blocks, rows)](*given, block=BLOCK, groups=groups, num_warps=8, **sizes)
    _finish_rows[(rows,)](
        *given,
        listed,
        token,
        cut_logit,
        cut_entry,
        padded_blocks=triton.next_power_of_2(blocks),
        groups=groups,
        padded_groups=triton.next_power_of_2(groups),
        rows=TILE // group,
        num_warps=8,
        **sizes,
    )
    return token, cut_logit, cut_entry
