# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917 -- a kernel takes its pointers and sizes by position
"""Pieces of a row's order inside a Triton kernel: its keys, its groups of entries, their weights.

The order: logit descending, entry ascending. A row is read through a list of its groups of entries,
those whose maximum reaches a bound below the cut. Every sum runs over one row in a fixed order.
Needs Triton.
"""

import triton
import triton.language as tl

LANE = tl.constexpr(4)  # neighbours that one thread loads at once and may add up on its own


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
def add_lanes(x, rows: tl.constexpr, group: tl.constexpr):
    """Sums of neighbours, [rows, group] -> [rows, group / LANE]: a fourth of the registers."""
    return tl.sum(tl.reshape(x, (rows, group // LANE, LANE)), axis=2)


@triton.jit
def base_mass(
    row_ptr,
    listed_ptr,
    listed,
    vocab,
    top,
    scale,
    floor,
    base_key,
    base_cut,
    rows: tl.constexpr,
    group: tl.constexpr,
    stages: tl.constexpr,
):
    """The mass of the whole base set."""
    masses = tl.zeros((rows, group // LANE), dtype=tl.float32)
    for start in tl.range(0, listed, rows, num_stages=stages):
        logit, _number, entry, valid = load_groups(
            row_ptr, listed_ptr, start, listed, vocab, rows, group
        )
        _key, weight = weigh(logit, entry, valid, top, scale, floor, base_key, base_cut, True)
        masses += add_lanes(weight, rows, group)
    return tl.sum(masses)
