"""Seeds as integers: drawing, folding, deriving."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corun.seeds import DRAWN_SEED_BITS, child_seed, draw_seed, fold_seed, session_seed

ANY_SEED = st.integers(-(2**63), 2**64 - 1)


def test_drawn_seeds_differ_and_fit_a_double():
    seeds = [draw_seed() for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= s < 2**DRAWN_SEED_BITS for s in seeds)
    assert all(int(float(s)) == s for s in seeds)
    assert max(seeds) >= 2**50  # the top bits are used


MINUS_ONE = 6159043798729602  # recorded seeds must replay under every later version


@given(ANY_SEED)
@example(-1)
@example(2**64 - 1)
def test_fold_is_twos_complement_but_for_minus_one(seed):
    folded = fold_seed(seed)
    assert -(2**63) <= folded < 2**63
    assert fold_seed(folded) == folded != -1  # vLLM reads -1 as no seed
    assert folded == MINUS_ONE if seed % 2**64 == 2**64 - 1 else (folded - seed) % 2**64 == 0


@pytest.mark.parametrize(
    ("seed", "folded"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 2, -2),
        (2**64 - 1, MINUS_ONE),
        (-1, MINUS_ONE),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 2), -2),
    ],
)
def test_fold_by_hand(seed, folded):
    assert fold_seed(seed) == folded
    assert type(fold_seed(seed)) is int  # NumPy's would not reach another process


@pytest.mark.parametrize("seed", [1.0, "1", float("nan"), [1]])
def test_fold_refuses_what_is_no_integer(seed):
    with pytest.raises(ValueError, match="a seed is an integer, not"):
        fold_seed(seed)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**40])
def test_fold_refuses_more_than_64_bits(seed):
    with pytest.raises(ValueError, match=str(seed)):
        fold_seed(seed)


@given(ANY_SEED, st.integers(1, 10**6))
def test_children_fit_63_bits_and_repeat(seed, index):
    assert 0 <= child_seed(seed, index) < 2**63
    assert child_seed(seed, index) == child_seed(seed, index)
    assert child_seed(fold_seed(seed), index) == child_seed(seed, index)


@given(ANY_SEED)
def test_sample_zero_keeps_the_seed(seed):
    assert child_seed(seed, 0) == seed


def test_no_two_samples_of_neighbouring_seeds_share_a_seed():
    """``seed + index`` would: sample 1 of seed 7 would be sample 0 of seed 8."""
    seen = {child_seed(seed, index) for seed in range(-50, 50) for index in range(100)}
    assert len(seen) == 100 * 100


def test_child_seed_is_pinned():
    """Recorded seeds must replay under every later version."""
    assert child_seed(42, 1) == 7686140507421151036
    assert child_seed(-2, 3) == child_seed(2**64 - 2, 3) == 1743418979847623328
    assert child_seed(-1, 3) == child_seed(2**64 - 1, 3) == child_seed(MINUS_ONE, 3)


def test_child_seed_refuses_a_negative_index():
    with pytest.raises(ValueError, match="-1"):
        child_seed(1, -1)


def test_session_seed_hangs_on_the_id_alone():
    assert session_seed("a") == session_seed("a") != session_seed("b")
    assert 0 <= session_seed("a") < 2**DRAWN_SEED_BITS
