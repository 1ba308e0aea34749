"""corun.bench.metrics against numbers worked out by hand."""

import json
from pathlib import Path

import bench_files
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.bench import metrics, summary
from corun.bench.fields import Fields
from corun.bench.records import parse_run
from corun.bench.results import Results, group


def run(*args, **kwargs):
    path = Path("run.json")
    return parse_run(Fields(bench_files.run(*args, **kwargs), str(path)), path)


def quick(tokens, seconds, **more):
    """One request with so many tokens in so many seconds."""
    request = {
        "id": "0",
        "n_in": 1,
        "n_out": tokens,
        "arrival_s": 0.0,
        "first_token_s": 0.0,
        "finish_s": seconds,
        "digest": "d",
    }
    return run(count=1, requests=[request], wall_s=seconds, steps=None, **more)


def test_throughput():
    assert metrics.throughput(run()) == 6 / 4


def test_aggregate_is_weighted_by_time():
    """100 tokens/s for 1 s and 10 tokens/s for 9 s: 190 tokens in 10 s, not a mean of 55."""
    tasks = [quick(100, 1.0), quick(90, 9.0)]
    assert [metrics.throughput(task) for task in tasks] == [100, 10]
    assert metrics.aggregate_throughput(tasks) == pytest.approx(19.0)


def test_latency_of_requests():
    assert metrics.ttfts([run()]) == [1.0, 1.5]
    # Four tokens after the first, in two seconds; the other request has no second token.
    assert metrics.tpots([run()]) == [0.5]
    assert metrics.tpots([quick(1, 3.0)]) == []


def test_stats():
    found = metrics.stats([float(v) for v in range(1, 102)])
    assert (found.count, found.mean, found.p50, found.p90, found.p99) == (101, 51, 51, 91, 100)
    # Between the two nearest: 90% of the way from the first to the second.
    assert metrics.stats([0.0, 10.0]).p90 == pytest.approx(9.0)
    assert metrics.stats([]) is None


def test_cdf():
    assert metrics.cdf([3.0, 1.0, 2.0, 2.0]) == ([1.0, 2.0, 2.0, 3.0], [0.25, 0.5, 0.75, 1.0])
    assert metrics.cdf([]) == ([], [])


def test_over_time():
    found = metrics.over_time(run(), 2.0)
    assert (found.prefill, found.decode) == ((15.0, 0.0), (0.0, 2.0))
    # Half of a step's tokens lie in a bin that holds half of its time.
    found = metrics.over_time(run(), 1.5)
    np.testing.assert_allclose(found.prefill, [20 / 1.5, 10 / 1.5, 0])
    np.testing.assert_allclose(found.decode, [0, 2 / 1.5, 2 / 1.5])
    assert metrics.over_time(run(steps=None), 1.0) is None


@given(
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9000)), min_size=1, max_size=30),
    width=st.floats(0.01, 3),
)
def test_over_time_keeps_every_token(steps, width):
    spans, tokens = zip(*steps, strict=True)
    zeros = [0] * len(steps)
    columns = dict.fromkeys(("decode_rows", "running", "waiting", "kv_used"), zeros)
    columns |= {"end_s": np.cumsum(spans).tolist(), "prefill_tokens": list(tokens)}
    found = metrics.over_time(run(steps=columns), width)
    assert sum(found.prefill) * width == pytest.approx(sum(tokens))
    assert not any(found.decode)


def test_padding():
    assert metrics.padded_share(run()) == 4 / 38
    assert metrics.padded_share(run(), decode_only=True) == 4 / 8
    partly = {**bench_files.STEPS, "rows_run": [None, None, None, 8]}
    assert metrics.padded_share(run(steps=partly)) == 6 / 8
    unknown = {**bench_files.STEPS, "rows_run": None}
    assert metrics.padded_share(run(steps=unknown)) is None
    assert metrics.padded_share(run(steps=None)) is None


def test_kv_use_is_weighted_by_time():
    uneven = {**bench_files.STEPS, "end_s": [1.0, 2.0, 3.0, 8.0]}
    found = metrics.kv_use(run(steps=uneven, wall_s=8.0))
    assert found.mean == pytest.approx((0.1 + 0.3 + 0.4 + 5 * 0.2) / 8)
    assert found.peak == 0.4
    assert metrics.kv_use(run(steps=None)) is None


def test_determinism_counts_requests_equal_in_every_repeat():
    first, same = run(), run(repeat=1, order_seed=1)
    other = run(repeat=2, order_seed=2, digests=("a", "c"))
    assert metrics.determinism([first]) is None
    kept = metrics.determinism([first, same])
    assert (kept.equal, kept.requests, kept.repeats, kept.orders, kept.holds) == (2, 2, 2, 2, True)
    broken = metrics.determinism([first, same, other])
    assert (broken.equal, broken.requests, broken.repeats, broken.holds) == (1, 2, 3, False)


def test_determinism_finds_requests_by_their_ids():
    """A repeat answers in another order: its records may be in another order too."""
    record = bench_files.run(repeat=1, order_seed=1)
    record["requests"].reverse()
    again = parse_run(Fields(record, "run.json"), Path("run.json"))
    assert metrics.determinism([run(), again]).holds


def test_a_repeat_in_the_same_order_is_not_called_deterministic():
    found = metrics.determinism([run(), run(repeat=1)])
    assert summary.verdict(found) == "2 of 2 equal (same order)"
    assert summary.short_verdict(found) == "bits equal, same order only"


def test_mode_numbers_over_repeats():
    found = summary.mode_numbers([run(), run(repeat=1, order_seed=1, wall_s=8.0)])
    assert (found.output_tokens, found.seconds) == (12, 12.0)
    assert (found.lowest, found.throughput, found.highest) == (6 / 8, 12 / 12, 6 / 4)
    assert found.ttft.count == 4
    assert found.determinism.holds


def test_total_only_of_a_mode_that_ran_everything():
    (found,) = group([run("std", "burstgpt"), run("std", "1024/128"), run("bi", "1024/128")])
    assert summary.total(found, "std") == 1.5
    assert summary.total(found, "bi") is None
    assert summary.plain_total(found, "bi") == 1.5


def test_every_number_as_json():
    runs = (run("std"), run("bi", wall_s=8.0))
    found = summary.to_mapping(Results(runs, group(runs), (), (), ()))
    assert json.loads(json.dumps(found)) == found
    (load,) = found["groups"]
    assert load["aggregate_tokens_per_s"] == {"std": 1.5, "bi": 0.75}
    assert [mode["ttft"]["mean"] for mode in load["workloads"][0]["modes"]] == [1.25, 1.25]
