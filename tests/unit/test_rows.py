"""Rows against Python's own sets, which it must agree with everywhere."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.rows import Rows

COUNTS = st.sets(st.integers(1, 60), max_size=40)


@given(COUNTS, COUNTS, st.integers(0, 70))
@settings(deadline=None)
def test_it_is_a_set(one, other, n):
    a, b = Rows.of(one), Rows.of(other)
    assert list(a) == sorted(one)
    assert len(a) == len(one)
    assert (n in a) == (n in one)
    assert set(a & b) == one & other
    assert a & b == Rows.of(one & other)  # one form for each set, so == compares sets
    assert a.largest == max(one, default=0)
    assert a.at_least(n) == min((m for m in one if m >= n), default=None)


@given(COUNTS)
@settings(deadline=None)
def test_json_round_trip(counts):
    rows = Rows.of(counts)
    assert Rows.from_lists(json.loads(json.dumps(rows.to_lists()))) == rows


@given(COUNTS)
@settings(deadline=None)
def test_ranges_are_sorted_and_apart(counts):
    flat = [n for r in Rows.of(counts).ranges for n in r]
    assert flat == sorted(flat)
    ranges = Rows.of(counts).ranges
    assert all(b + 1 < c for (_, b), (c, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (Rows.of([8, 1, 2, 3, 16]), "1-3, 8, 16"),
        (Rows.span(5, 5), "5"),
        (Rows.span(6, 5), "none"),
        (Rows(), "none"),
    ],
)
def test_as_people_write_it(rows, text):
    assert str(rows) == text


@pytest.mark.parametrize(
    "lists",
    [
        [[0, 4]],
        [[4, 3]],
        [[1, 4], [4, 6]],
        [[1, 4], [5, 6]],  # these are one range
        [[5, 6], [1, 2]],
        [[1]],
        [["a", "b"]],
    ],
)
def test_damaged_lists_are_refused(lists):
    with pytest.raises(ValueError):
        Rows.from_lists(lists)


@pytest.mark.parametrize("counts", [[0], [3, -1]])
def test_a_count_is_positive(counts):
    with pytest.raises(ValueError, match="is not a number of rows"):
        Rows.of(counts)
