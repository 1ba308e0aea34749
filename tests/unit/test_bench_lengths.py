"""corun.bench.lengths: how long the requests of a workload are."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.bench import lengths

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def request_survival(n):
    """P(prompt > n), written from the docstring of burstgpt_like: Zipf-Mandelbrot, cut."""
    tail = [(801 / (801 + x)) ** 2 for x in (n, 31407)]
    return (tail[0] - tail[1]) / (1 - tail[1])


def response_survival(n):
    """P(response > n), written from the docstring of burstgpt_like: two log-logistics, cut."""
    total = 0.0
    for share, median, shape in ((0.1, 20, 2), (0.9, 345, 4)):
        below = [1 - 1 / (1 + (x / median) ** shape) for x in (n, 12472)]
        total += share * (1 - below[0] / below[1])
    return total


def moments(survival, longest):
    tail = np.array([survival(k) for k in range(longest)])
    mean = tail.sum()
    return mean, math.sqrt(((2 * np.arange(longest) + 1) * tail).sum() - mean**2)


@pytest.mark.parametrize(
    ("column", "survival", "longest", "published"),
    [("n_in", request_survival, 31407, 763), ("n_out", response_survival, 12472, 348)],
)
def test_fit_has_the_published_mean_and_the_stated_distribution(
    column, survival, longest, published
):
    count = 200_000
    drawn = getattr(lengths.burstgpt_like(count, rng(1)), column)
    mean, deviation = moments(survival, longest)
    assert abs(mean - published) < 1
    assert abs(drawn.mean() - mean) < 4 * deviation / math.sqrt(count)
    assert drawn.min() == 1 and drawn.max() <= longest
    # Kolmogorov-Smirnov at every length that occurs; 1.95 / sqrt(n): one in a thousand.
    values, repeats = np.unique(drawn, return_counts=True)
    stated = np.array([1 - survival(int(v)) for v in values])
    assert np.abs(np.cumsum(repeats) / count - stated).max() < 1.95 / math.sqrt(count)


def test_fit_is_long_tailed_as_the_paper_says():
    over = (lengths.burstgpt_like(300_000, rng(2)).n_in > 8192).mean() * 300
    assert 1 < over < 4  # of 300 requests


def test_prompts_and_responses_are_independent():
    drawn = lengths.burstgpt_like(50_000, rng(3))
    ranks = [np.argsort(np.argsort(x)) for x in (drawn.n_in, drawn.n_out)]
    assert abs(np.corrcoef(*ranks)[0, 1]) < 0.02


def test_code_editing_is_long_in_and_long_out():
    drawn = lengths.code_editing(100_000, rng())
    assert drawn.n_in.min() >= 1400 and drawn.n_in.max() <= 3683
    assert drawn.n_out.min() >= 1125 and drawn.n_out.max() <= 3666
    assert abs(drawn.n_in.mean() - 2541.5) < 10
    assert abs(drawn.n_out.mean() - 2291) < 10
    assert np.corrcoef(drawn.n_in, drawn.n_out)[0, 1] > 0.9


@given(st.integers(0, 2**40), st.integers(1, 40), st.integers(0, 40))
@settings(deadline=None, max_examples=60)
def test_fewer_requests_are_the_beginning_of_more(seed, few, extra):
    for draw in (lengths.burstgpt_like, lengths.code_editing):
        short, long = draw(few, rng(seed)), draw(few + extra, rng(seed))
        assert short.n_in.tolist() == long.n_in[:few].tolist()
        assert short.n_out.tolist() == long.n_out[:few].tolist()


@given(
    st.lists(st.tuples(st.integers(1, 40_000), st.integers(1, 40_000)), min_size=1, max_size=30),
    st.integers(2, 20_000),
)
@settings(deadline=None)
def test_clipped_lengths_fit_and_others_stay(pairs, longest):
    n_in, n_out = (np.array(x, np.int64) for x in zip(*pairs, strict=True))
    fitting, cut = lengths.Lengths(n_in, n_out, "").clipped(longest)
    assert (fitting.n_in >= 1).all() and (fitting.n_out >= 1).all()
    assert (fitting.n_in + fitting.n_out <= longest).all()
    too_long = n_in + n_out > longest
    assert cut == too_long.sum()
    # A request that is cut fills the engine's length; the others are as they were.
    assert (fitting.n_in + fitting.n_out == np.where(too_long, longest, n_in + n_out)).all()
    assert (fitting.n_in[~too_long] == n_in[~too_long]).all()
    # The prompt gives way first.
    kept = too_long & (n_out <= longest - longest // 2)
    assert (fitting.n_out[kept] == n_out[kept]).all()


def trace(tmp_path, *rows, header=HEADER, name="t.csv"):
    path = tmp_path / name
    path.write_text(header + "".join(f"{row}\n" for row in rows))
    return path


ROWS = [
    f"{i},{'GPT-4' if i % 4 == 0 else 'ChatGPT'},{100 + i},{200 + i},0,API log" for i in range(40)
]
FAILED = ["50,ChatGPT,7,0,7,API log", "51,GPT-4,0,0,0,API log", "52,ChatGPT,0,9,9,API log"]


def test_trace_rows_are_drawn_once_each_and_failures_counted(tmp_path):
    path = trace(tmp_path, *ROWS, *FAILED)
    drawn = lengths.burstgpt_trace(path, None, 40, rng())
    assert sorted(zip(drawn.n_in, drawn.n_out, strict=True)) == [
        (100 + i, 200 + i) for i in range(40)
    ]
    assert "40 of 40 successful requests" in drawn.source
    assert "left out: 2 failed, 1 with an empty prompt" in drawn.source
    assert str(tmp_path) not in drawn.source
    few = lengths.burstgpt_trace(path, None, 5, rng())
    assert few.n_in.tolist() == drawn.n_in[:5].tolist()
    assert drawn.n_in.tolist() != sorted(drawn.n_in.tolist())


def test_trace_of_one_model(tmp_path):
    drawn = lengths.burstgpt_trace(trace(tmp_path, *ROWS, *FAILED), "GPT-4", 10, rng())
    assert sorted(drawn.n_in.tolist()) == list(range(100, 140, 4))
    assert "of GPT-4" in drawn.source and "1 failed, 0 with" in drawn.source


def test_columns_are_found_by_name(tmp_path):
    header = "Session ID,Response tokens,Elapsed time,Request tokens,Model\n"
    drawn = lengths.burstgpt_trace(trace(tmp_path, "s,20,1.5,10,X", header=header), None, 1, rng())
    assert (drawn.n_in.tolist(), drawn.n_out.tolist()) == ([10], [20])


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([], HEADER, "holds 0 successful requests .*too few for 3; ask for fewer"),
        (FAILED, HEADER, r"0 successful requests \(2 failed, 1 with an empty prompt\)"),
        (["1,X,5,5,10,API log"], HEADER, "holds 1 successful"),
        (["1,X,five,5,10,API log"], HEADER, "line 2: .* correct or remove"),
        (["1,X,5"], HEADER, "line 2: .* correct or remove"),
        (["1,X,5,-1,4,API log"], HEADER, "line 2: .* correct or remove"),
        (["1,X,5,99999999999999999999,4,API log"], HEADER, "line 2: .* correct or remove"),
        (["1,2,3"], "a,b,c\n", "no column 'Model' and no column 'Request tokens'"),
        ([], "", "no column"),
    ],
)
def test_bad_traces_are_refused(tmp_path, rows, header, message):
    with pytest.raises(ValueError, match=message):
        lengths.burstgpt_trace(trace(tmp_path, *rows, header=header), None, 3, rng())


def test_unreadable_traces_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the BurstGPT trace .* give the path"):
        lengths.burstgpt_trace(tmp_path / "absent.csv", None, 1, rng())
    with pytest.raises(ValueError, match="cannot read"):
        lengths.burstgpt_trace(tmp_path, None, 1, rng())
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="cannot read"):
        lengths.burstgpt_trace(binary, None, 1, rng())


def test_git_lfs_pointer_is_refused(tmp_path):
    path = trace(tmp_path, header="version https://git-lfs.github.com/spec/v1\noid sha256:4b\n")
    with pytest.raises(ValueError, match="has no column"):
        lengths.burstgpt_trace(path, None, 1, rng())
