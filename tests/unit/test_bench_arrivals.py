"""corun.bench.arrivals: when the requests of a benchmark arrive."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.bench.arrivals import Arrivals
from corun.bench.workload import parse_arrivals


def test_all_at_once():
    assert Arrivals("all").times(3, 7) == [0.0, 0.0, 0.0]


def test_poisson_gaps_are_exponential_at_the_rate():
    times = np.array(Arrivals("poisson", 4.0).times(20_001, 5))
    gaps = np.diff(times)
    assert abs(gaps.mean() - 0.25) < 4 * 0.25 / math.sqrt(len(gaps))
    # Kolmogorov-Smirnov; 1.95 / sqrt(n): one in a thousand.
    stated = 1 - np.exp(-4.0 * np.sort(gaps))
    ranks = np.arange(len(gaps) + 1) / len(gaps)
    apart = max((ranks[1:] - stated).max(), (stated - ranks[:-1]).max())
    assert apart < 1.95 / math.sqrt(len(gaps))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**63), st.floats(1e-3, 1e6))
@settings(deadline=None)
def test_poisson_times_begin_at_zero_and_grow(few, extra, seed, rate):
    arrivals = Arrivals("poisson", rate)
    long = arrivals.times(few + extra, seed)
    assert len(long) == few + extra
    assert long[:1] in ([], [0.0])
    assert long == sorted(long)
    assert arrivals.times(few, seed) == long[:few]


def test_the_seed_decides():
    arrivals = Arrivals("poisson", 1.0)
    assert arrivals.times(9, 1) == arrivals.times(9, 1) != arrivals.times(9, 2)


def test_closed_loop():
    assert Arrivals("closed", 32).concurrency == 32
    assert isinstance(parse_arrivals("closed:32").concurrency, int)


@pytest.mark.parametrize("name", ["all", "closed:32", "closed:1", "poisson:4.0", "poisson:0.25"])
def test_names_come_back(name):
    assert parse_arrivals(name).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "choose all, closed:N or poisson:RATE"),
        ("uniform:3", "choose all"),
        ("all:3", "take no number"),
        ("closed", "closed:32"),
        ("closed:", "closed:32"),
        ("closed:0", "closed:32"),
        ("closed:-4", "closed:32"),
        ("closed:2.5", "closed:32"),
        ("closed:many", "closed:32"),
        ("closed:inf", "closed:32"),
        ("poisson", "poisson:4.0"),
        ("poisson:0", "poisson:4.0"),
        ("poisson:-1", "poisson:4.0"),
        ("poisson:nan", "poisson:4.0"),
        ("poisson:inf", "poisson:4.0"),
    ],
)
def test_senseless_arrivals_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_arrivals(name)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown arrivals 'later'"):
        Arrivals("later")
