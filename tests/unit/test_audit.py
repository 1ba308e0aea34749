import json

import pytest

from corun.engine.audit import PlanViolationError, StepAudit
from corun.plan import DECODE, PREFILL, Plan, StepShape

PLAN = Plan("isolate", decode_rows=8, max_prefill_tokens=512, decode_graph=False, reason="test")
DECODE_STEP = StepShape(DECODE, 3, 0, 3, 8, 8, False)
PREFILL_STEP = StepShape(PREFILL, 1, 1, 20, 20, 1, False)
BAD_STEP = StepShape(DECODE, 3, 0, 3, 3, 3, False)


def test_counts(tmp_path):
    log = tmp_path / "steps.jsonl"
    audit = StepAudit(PLAN, strict=True, step_log=str(log))
    for step in (PREFILL_STEP, DECODE_STEP, DECODE_STEP):
        audit.record(step)
    report = audit.report()
    assert report["steps"] == {"prefill": 1, "decode": 2}
    assert report["rows"] == {"prefill": {"20": 1}, "decode": {"8": 2}}
    assert report["violations"] == []
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["prefill", "decode", "decode"]


def test_strict_stops_and_names_the_step():
    audit = StepAudit(PLAN, strict=True, step_log=None)
    audit.record(DECODE_STEP)
    with pytest.raises(PlanViolationError, match=r"step 2 was a decode step of 3 rows"):
        audit.record(BAD_STEP)


def test_lenient_counts_every_one_and_keeps_some():
    audit = StepAudit(PLAN, strict=False, step_log=None)
    for _ in range(50):
        audit.record(BAD_STEP)
    report = audit.report()
    assert report["violation_count"] == 50
    assert len(report["violations"]) == 20
