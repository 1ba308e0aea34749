# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917 -- a kernel takes its pointers and sizes by position
"""Exact cuts through a row's order inside a Triton kernel: which head do the filters keep?

A bracket of keys around the cut is narrowed by a few passes over the row; the entries that are left
inside are searched on their own. Needs Triton.
"""

import triton
import triton.language as tl

from corun.engine.sampling.triton_heads import (
    LANE,
    add_lanes,
    load_groups,
    logit_of,
    sortable,
    weigh,
)

_PLAIN_PASSES = tl.constexpr(4)
_LINEAR_PASSES = tl.constexpr(16)


@triton.jit
def _pivots(low, high, reach, passes):
    """Three rising keys in (low, high]: where the next pass over the row cuts the bracket.

    A quarter of the logits' interval apart; while that is infinite, `reach` and more below the
    high end; after _LINEAR_PASSES a quarter of the keys' interval, so that the search ends. A
    bracket still crowded after _PLAIN_PASSES may hold a plateau at its low end: the first pivot
    moves next to it.
    """
    below, above = logit_of(low), logit_of(high)
    width = (above - below) * 0.25
    step = (high - low) // 4 + 1
    early = passes < _LINEAR_PASSES
    linear = early & (below > float("-inf"))
    falling = early & (below == float("-inf")) & (above > float("-inf"))
    at_1 = tl.where(falling, above - 16.0 * reach, below + width)
    at_2 = tl.where(falling, above - 4.0 * reach, below + 2.0 * width)
    at_3 = tl.where(falling, above - reach, below + 3.0 * width)
    key_1 = tl.where(linear | falling, sortable(at_1 + 0.0), low + step)
    key_2 = tl.where(linear | falling, sortable(at_2 + 0.0), low + 2 * step)
    key_3 = tl.where(linear | falling, sortable(at_3 + 0.0), low + 3 * step)
    key_1 = tl.minimum(tl.maximum(tl.where(passes < _PLAIN_PASSES, key_1, low), low + 1), high)
    key_2 = tl.minimum(tl.maximum(key_2, key_1), high)
    key_3 = tl.minimum(tl.maximum(key_3, key_2), high)
    return key_1, key_2, key_3


@triton.jit
def _ties_needed(key, ties, missing, top, scale, by_mass):
    """How many of the `ties` entries at `key` it takes for the `missing` weight: 1 to `ties`."""
    each = tl.where(by_mass, tl.exp2((logit_of(key) - top) * scale), 1.0)
    most = tl.maximum(ties.to(tl.float32), 1.0)
    needed = tl.where(each > 0.0, tl.ceil(missing / each), most)
    return tl.minimum(tl.maximum(needed, 1.0), most).to(tl.int32)


@triton.jit
def _cut_in_bracket(
    row_ptr,
    listed_ptr,
    bracket_ptr,
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
    above,
    rows: tl.constexpr,
    group: tl.constexpr,
    room: tl.constexpr,
    stages: tl.constexpr,
):
    """``find_cut`` where at most `room` entries lie in [low, high], under a weight of `above`.

    The last entry is -1 if there is none at the last key.
    """
    count = tl.zeros((), dtype=tl.int32)
    for start in tl.range(0, listed, rows, num_stages=stages):
        logit, _number, entry, valid = load_groups(
            row_ptr, listed_ptr, start, listed, vocab, rows, group
        )
        key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
        chosen = (weight > 0.0) & (key >= low) & (key <= high)
        chosen = tl.reshape(chosen.to(tl.int32), (rows * group,))
        place = count + tl.cumsum(chosen, axis=0) - 1
        tl.store(bracket_ptr + place, tl.reshape(entry, (rows * group,)), mask=chosen > 0)
        count += tl.sum(chosen)
    tl.debug_barrier()  # read back by other threads of this program
    index = tl.arange(0, room)
    valid = index < count
    entry = tl.load(bracket_ptr + index, mask=valid, other=0)
    logit = tl.load(row_ptr + entry, mask=valid, other=float("-inf")).to(tl.float32) + 0.0
    key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
    while low < high:
        middle = high - (high - low) // 2
        reached = above + tl.sum(tl.where(key >= middle, weight, 0.0)) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    above += tl.sum(tl.where(key > low, weight, 0.0))
    tie = ((key == low) & (weight > 0.0)).to(tl.int32)
    needed = _ties_needed(low, tl.sum(tie), target - above, top, scale, by_mass)
    chosen = (tie > 0) & (tl.cumsum(tie, axis=0) <= needed)
    return low, tl.max(tl.where(chosen, entry, -1))


@triton.jit
def _cut_in_plateau(
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
    ties,
    above,
    rows: tl.constexpr,
    group: tl.constexpr,
):
    """The last entry of ``find_cut`` among many `ties` at the key `low`, else as in a bracket."""
    last = tl.zeros((), dtype=tl.int32) - 1
    needed = _ties_needed(low, ties, target - above, top, scale, by_mass)
    seen = tl.zeros((), dtype=tl.int32)
    start = tl.zeros((), dtype=tl.int32)
    while (seen < needed) & (start < listed):
        logit, _number, entry, valid = load_groups(
            row_ptr, listed_ptr, start, listed, vocab, rows, group
        )
        key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
        tie = tl.reshape(((key == low) & (weight > 0.0)).to(tl.int32), (rows * group,))
        chosen = (tie > 0) & (seen + tl.cumsum(tie, axis=0) <= needed)
        found = tl.where(chosen, tl.reshape(entry, (rows * group,)), -1)
        last = tl.maximum(last, tl.max(found))
        seen += tl.sum(tie)
        start += rows
    return last


@triton.jit
def find_cut(
    row_ptr,
    listed_ptr,
    bracket_ptr,
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
    reach,
    rows: tl.constexpr,
    group: tl.constexpr,
    room: tl.constexpr,
    stages: tl.constexpr,
):
    """The shortest head of the base set whose weight reaches `target`: (last key, last entry).

    Searches keys in [low, high]; `low` is known to reach the target, no entry lies above `high`.
    Passes over the listed groups narrow this bracket at three pivots each until at most `room`
    entries lie inside; those move to bracket_ptr [room] int32, and the search ends among them. A
    bracket that still holds more at a single key is a plateau of ties; they are kept in entry
    order, as all ties are. reach: see ``_pivots``.
    """
    above = 0.0  # the weight above the bracket
    over = tl.zeros((), dtype=tl.int32)  # how many entries that is
    at_least = listed * group  # those from `low` up; before the first pass, at most so many
    passes = 0
    while (low < high) & (at_least - over > room):
        key_1, key_2, key_3 = _pivots(low, high, reach, passes)
        sums_1 = tl.zeros((rows, group // LANE), dtype=tl.float32)
        sums_2 = tl.zeros((rows, group // LANE), dtype=tl.float32)
        sums_3 = tl.zeros((rows, group // LANE), dtype=tl.float32)
        counts_1 = tl.zeros((rows, group // LANE), dtype=tl.int32)
        counts_2 = tl.zeros((rows, group // LANE), dtype=tl.int32)
        counts_3 = tl.zeros((rows, group // LANE), dtype=tl.int32)
        least = tl.full((rows, group), 0xFFFFFFFF, dtype=tl.uint32)
        for start in tl.range(0, listed, rows, num_stages=stages):
            logit, _number, entry, valid = load_groups(
                row_ptr, listed_ptr, start, listed, vocab, rows, group
            )
            key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
            counted = weight > 0.0
            sums_1 += add_lanes(tl.where(key >= key_1, weight, 0.0), rows, group)
            sums_2 += add_lanes(tl.where(key >= key_2, weight, 0.0), rows, group)
            sums_3 += add_lanes(tl.where(key >= key_3, weight, 0.0), rows, group)
            counts_1 += add_lanes((counted & (key >= key_1)).to(tl.int32), rows, group)
            counts_2 += add_lanes((counted & (key >= key_2)).to(tl.int32), rows, group)
            counts_3 += add_lanes((counted & (key >= key_3)).to(tl.int32), rows, group)
            least = tl.minimum(least, tl.where(counted & (key >= low), key, 0xFFFFFFFF))
        sum_1, sum_2, sum_3 = tl.sum(sums_1), tl.sum(sums_2), tl.sum(sums_3)
        count_1, count_2, count_3 = tl.sum(counts_1), tl.sum(counts_2), tl.sum(counts_3)
        by_1, by_2, by_3 = sum_1 >= target, sum_2 >= target, sum_3 >= target
        above = tl.where(by_3, above, tl.where(by_2, sum_3, tl.where(by_1, sum_2, sum_1)))
        over = tl.where(by_3, over, tl.where(by_2, count_3, tl.where(by_1, count_2, count_1)))
        high = tl.where(by_3, high, tl.where(by_2, key_3, tl.where(by_1, key_2, key_1)) - 1)
        at_least = tl.where(by_1, count_1, at_least)
        at_least = tl.where(by_3, count_3, tl.where(by_2, count_2, at_least))
        low = tl.where(by_3, key_3, tl.where(by_2, key_2, tl.where(by_1, key_1, low)))
        low = tl.maximum(low, tl.minimum(tl.min(least), high))  # no entry lies in between
        reach *= 64.0
        passes += 1

    if at_least - over <= room:
        low, last = _cut_in_bracket(
            row_ptr, listed_ptr, bracket_ptr, listed, vocab, top, scale, floor, base_key, base_cut,
            by_mass, target, low, high, above, rows, group, room, stages,
        )  # fmt: skip
    else:
        last = _cut_in_plateau(
            row_ptr, listed_ptr, listed, vocab, top, scale, floor, base_key, base_cut, by_mass,
            target, low, at_least - over, above, rows, group,
        )  # fmt: skip
    return low, tl.where(last < 0, vocab - 1, last)
