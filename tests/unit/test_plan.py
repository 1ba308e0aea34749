import json
from dataclasses import replace

import pytest

from corun.plan import DECODE, PREFILL, Plan, StepShape

PLAN = Plan("isolate", decode_rows=8, max_prefill_tokens=512, decode_graph=True, reason="test")
GOOD_DECODE = StepShape(DECODE, 3, 0, 3, rows=8, sample_rows=8, graph=True)
GOOD_PREFILL = StepShape(PREFILL, 1, 1, 100, rows=100, sample_rows=1, graph=False)


@pytest.mark.parametrize(
    "step",
    [
        GOOD_DECODE,
        GOOD_PREFILL,
        replace(GOOD_DECODE, requests=8, tokens=8),
        # A one-token prompt has the decode shape, always.
        replace(GOOD_DECODE, requests=1, prefill_requests=1, tokens=1),
    ],
)
def test_allowed(step):
    assert PLAN.violation(step) is None


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (replace(GOOD_DECODE, rows=4), "4 rows"),
        (replace(GOOD_DECODE, sample_rows=3), "sampled 3"),
        (replace(GOOD_DECODE, graph=False), "replay"),
        (replace(GOOD_DECODE, prefill_requests=1), "mixed"),
        (replace(GOOD_PREFILL, requests=2), "2 requests"),
        (replace(GOOD_PREFILL, tokens=600, rows=600), "600"),
        (replace(GOOD_PREFILL, rows=128), "padded"),
        (replace(GOOD_PREFILL, graph=True), "graph"),
        (replace(GOOD_PREFILL, sample_rows=8), "sampled 8"),
    ],
)
def test_each_departure_is_named(step, word):
    assert word in PLAN.violation(step)


def test_a_graph_where_there_must_be_none():
    assert "without a graph" in replace(PLAN, decode_graph=False).violation(GOOD_DECODE)


def test_off_allows_everything():
    off = Plan("off", 0, 0, False, "test")
    assert off.violation(replace(GOOD_DECODE, rows=3)) is None


def test_a_prefill_is_padded_to_the_next_of_its_sizes():
    padded = replace(PLAN, prefill_rows=(8, 128, 256))
    assert padded.violation(replace(GOOD_PREFILL, rows=128)) is None
    assert "must be 128" in padded.violation(GOOD_PREFILL)
    assert "must be 128" in padded.violation(replace(GOOD_PREFILL, rows=256))
    longer = replace(GOOD_PREFILL, tokens=257, rows=257)
    assert padded.violation(longer) is None
    assert padded.violation(replace(longer, rows=512)) is not None


def test_the_mapping_is_json_and_comes_back():
    plan = replace(PLAN, prefill_rows=(8, 128), worker={"threads": 2})
    assert Plan.from_mapping(json.loads(json.dumps(plan.to_mapping()))) == plan
