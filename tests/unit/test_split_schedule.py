"""Splits by a request's own length, and their place in FlashAttention 3's schedule."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corun.engine import split_schedule
from corun.engine.split_schedule import SplitRule, write_splits

RULES = st.builds(
    SplitRule, st.sampled_from([16, 64, 80, 128]), st.integers(1, 16), st.integers(2, 255)
)


def plain_count(length, rule):
    """The rule, one request at a time."""
    tiles = -(-length // rule.tile)
    per_split = max(rule.least, -(-tiles // rule.most))
    return max(1, -(-tiles // per_split))


@given(RULES, st.lists(st.integers(0, 1_000_000), min_size=1, max_size=20))
def test_counts(rule, lengths):
    counts = rule.counts(np.array(lengths, dtype=np.int32))
    assert counts.dtype == np.int32
    assert counts.tolist() == [plain_count(length, rule) for length in lengths]
    assert counts.min() >= 1 and counts.max() <= rule.most


@given(RULES, st.integers(1, 1_000_000))
def test_splits_cover_a_request(rule, length):
    """FlashAttention makes s splits of ceil(n / s) tiles: no longer than the rule's."""
    tiles = -(-length // rule.tile)
    count = int(rule.counts(np.array([length])))
    size = -(-tiles // count)
    assert size * count >= tiles
    assert size <= max(rule.least, -(-tiles // rule.most))


@given(st.lists(st.integers(1, 32), min_size=1, max_size=40), st.sampled_from([2, 3]))
def test_write_splits(counts, vectors):
    """Only the second vector changes, and what lies past the batch in it does not."""
    rows = len(counts)
    padded = (rows + 3) // 4 * 4
    schedule = torch.arange(-vectors * padded - 1, 0, dtype=torch.int32)
    expected = schedule.tolist()
    expected[padded : padded + rows] = counts
    write_splits(schedule, torch.tensor(counts, dtype=torch.int32))
    assert schedule.tolist() == expected


@pytest.mark.parametrize(
    ("rows", "size"), [(5, 9), (5, 16), (5, 18), (5, 4 * 8 + 1), (993, 2 * 996 + 1)], ids=str
)
def test_a_schedule_without_splits_or_of_another_layout_is_refused(rows, size):
    with pytest.raises(ValueError, match="holds no splits"):
        write_splits(torch.zeros(size, dtype=torch.int32), torch.ones(rows, dtype=torch.int32))


@pytest.mark.parametrize("rule", [(8, 1, 32), (40, 1, 32), (64, 0, 32), (64, 1, 1), (64, 1, 256)])
def test_impossible_rules(rule):
    with pytest.raises(ValueError, match="SplitRule"):
        SplitRule(*rule)


def test_rows_that_are_split_have_several_splits():
    """Past SPLIT_BEYOND no rule says one split, so that a split row is never computed as others."""
    past = np.arange(split_schedule.SPLIT_BEYOND + 1, 70_000)
    for rule in (*split_schedule.RULES.values(), split_schedule.LATENT_RULE):
        assert rule.counts(past).min() > 1
