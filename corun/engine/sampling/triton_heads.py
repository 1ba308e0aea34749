# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917 -- a kernel takes its pointers and sizes by position
"""Exact cuts through a row's order inside a Triton kernel: which head do the filters keep?

The order: logit descending, entry ascending. A row is read through a list of its groups of entries,
those whose maximum reaches a bound below the cut. Needs Triton.
"""

import triton
import triton.language as tl


@triton.jit
def sortable(x):
    """fp32 -> uint32 in the same order (no NaN; -0.0 must have been turned into 0.0)."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def bound_below(keys, weights, target):
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
def load_groups(row_ptr, listed_ptr, start, listed, vocab, rows: tl.constexpr, group: tl.constexpr):
    """A tile [rows, group] of listed groups: logits (-inf outside), numbers, entries, validity."""
    g = start + tl.arange(0, rows)
    number = tl.load(listed_ptr + g, mask=g < listed, other=0)
    entry = number[:, None] * group + tl.arange(0, group)[None, :]
    valid = (g < listed)[:, None] & (entry < vocab)
    logit = tl.load(row_ptr + entry, mask=valid, other=float("-inf")).to(tl.float32) + 0.0
    return logit, number, entry, valid


@triton.jit
def weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass):
    """What each entry counts: 0 outside the base set, else its mass (1 when counting)."""
    key = sortable(logit)
    weight = tl.where(by_mass, tl.exp2((logit - top) * scale), 1.0)
    member = (key > base_key) | ((key == base_key) & (entry <= base_cut))
    member = member & valid & ((logit - top) * scale >= floor)
    return key, tl.where(member, weight, 0.0)


@triton.jit
def find_cut(
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
            logit, _number, entry, valid = load_groups(
                row_ptr, listed_ptr, start, listed, vocab, rows, group
            )
            key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
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
        logit, _number, entry, valid = load_groups(
            row_ptr, listed_ptr, start, listed, vocab, rows, group
        )
        key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
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
                logit, _number, entry, valid = load_groups(
                    row_ptr, listed_ptr, start, listed, vocab, rows, group
                )
                key, weight = weigh(
                    logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass
                )
                tie = (key == low) & (weight > 0.0) & (entry <= middle)
                count += tl.sum(tie.to(tl.float32))
            enough = count >= needed
            last = tl.where(enough, middle, last)
            first = tl.where(enough, first, middle + 1)
    return low, last
