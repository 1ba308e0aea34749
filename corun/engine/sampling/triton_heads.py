# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917 -- a kernel takes its pointers and sizes by position
"""Exact cuts through a row's order inside a Triton kernel: which head do the filters keep?

The order: logit descending, entry ascending. A row is read through a list of its groups of entries,
those whose maximum reaches a bound below the cut. Needs Triton.
"""

import triton
import triton.language as tl

_LINEAR_PASSES = tl.constexpr(16)


@triton.jit
def sortable(x):
    """fp32 -> uint32 in the same order (no NaN; -0.0 must have been turned into 0.0)."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def logit_of(key):
    """The fp32 value of a ``sortable`` key; -inf for keys below that of -inf."""
    key = tl.maximum(key, 0x007FFFFF)
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


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

    Searches keys in [low, high]; `low` is known to reach the target. Each pass over the listed
    groups tries three pivots: a quarter of the logits' interval apart while that is finite, later
    a quarter of the keys', so that the search ends at a key. Ties are kept in entry order.
    """
    passes = 0
    while low < high:
        below, above = logit_of(low), logit_of(high)
        width = (above - below) * 0.25
        step = (high - low) // 4 + 1
        linear = (passes < _LINEAR_PASSES) & (below > float("-inf"))
        key_1 = tl.where(linear, sortable(below + width + 0.0), low + step)
        key_2 = tl.where(linear, sortable(below + 2.0 * width + 0.0), low + 2 * step)
        key_3 = tl.where(linear, sortable(below + 3.0 * width + 0.0), low + 3 * step)
        key_1 = tl.minimum(tl.maximum(key_1, low + 1), high)
        key_2 = tl.minimum(tl.maximum(key_2, key_1), high)
        key_3 = tl.minimum(tl.maximum(key_3, key_2), high)
        at_1 = tl.zeros((rows, group), dtype=tl.float32)
        at_2 = tl.zeros((rows, group), dtype=tl.float32)
        at_3 = tl.zeros((rows, group), dtype=tl.float32)
        for start in range(0, listed, rows):
            logit, _number, entry, valid = load_groups(
                row_ptr, listed_ptr, start, listed, vocab, rows, group
            )
            key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
            at_1 += tl.where(key >= key_1, weight, 0.0)
            at_2 += tl.where(key >= key_2, weight, 0.0)
            at_3 += tl.where(key >= key_3, weight, 0.0)
        by_1, by_2, by_3 = tl.sum(at_1) >= target, tl.sum(at_2) >= target, tl.sum(at_3) >= target
        high = tl.where(by_3, high, tl.where(by_2, key_3, tl.where(by_1, key_2, key_1)) - 1)
        low = tl.where(by_3, key_3, tl.where(by_2, key_2, tl.where(by_1, key_1, low)))
        passes += 1
    above_low = tl.zeros((rows, group), dtype=tl.float32)
    at_low = tl.zeros((rows, group), dtype=tl.float32)
    tie_weight = 0.0
    for start in range(0, listed, rows):
        logit, _number, entry, valid = load_groups(
            row_ptr, listed_ptr, start, listed, vocab, rows, group
        )
        key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass)
        above_low += tl.where(key > low, weight, 0.0)
        at_low += ((key == low) & (weight > 0.0)).to(tl.float32)
        tie_weight = tl.maximum(tie_weight, tl.max(tl.where(key == low, weight, 0.0)))
    above = tl.sum(above_low)
    ties = tl.sum(at_low)
    needed = tl.where(tie_weight > 0.0, tl.ceil((target - above) / tie_weight), ties)
    needed = tl.minimum(tl.maximum(needed, 1.0), tl.maximum(ties, 1.0))
    first = tl.zeros((), dtype=tl.int32)
    # Among ties with the base set's last entry, those after it never belonged.
    last = tl.where(low == base_key, tl.minimum(base_cut, vocab - 1), first + (vocab - 1))
    if needed < ties:
        while first < last:
            middle = (first + last) // 2
            found = tl.zeros((rows, group), dtype=tl.float32)
            for start in range(0, listed, rows):
                logit, _number, entry, valid = load_groups(
                    row_ptr, listed_ptr, start, listed, vocab, rows, group
                )
                key, weight = weigh(
                    logit, entry, valid, top, scale, floor, base_key, base_cut, by_mass
                )
                tie = (key == low) & (weight > 0.0) & (entry <= middle)
                found += tie.to(tl.float32)
            enough = tl.sum(found) >= needed
            last = tl.where(enough, middle, last)
            first = tl.where(enough, first, middle + 1)
    return low, last
