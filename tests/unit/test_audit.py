import json

import pytest
from plans import certified

from corun.engine import violation_note
from corun.engine.audit import PlanViolationError, StepAudit
from corun.plan import DECODE, PREFILL, Grants, Plan, StepShape
from corun.rows import Rows

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


def test_certified_steps(tmp_path):
    plan = certified(Rows.span(5, 32), Rows.span(1, 8))
    audit = StepAudit(plan, strict=True, step_log=None)
    audit.record(StepShape(PREFILL, 3, 1, 20, 20, 3, False))
    audit.record(StepShape(DECODE, 3, 0, 3, 5, 3, False))
    audit.record(StepShape(DECODE, 3, 0, 3, 5, 3, False))
    report = audit.report()
    assert report["mixed_steps"] == 1
    assert report["most_requests"] == 3
    assert report["rows"] == {"prefill": {"20": 1}, "decode": {"5": 2}}
    with pytest.raises(PlanViolationError, match=r"step 4 was a step of 4 rows.*plan 'certified'"):
        audit.record(StepShape(DECODE, 3, 0, 3, 4, 3, False))


def test_what_is_not_granted_is_a_violation():
    plan = certified(Rows.span(5, 32), Rows.span(1, 8), Grants())
    audit = StepAudit(plan, strict=False, step_log=None)
    audit.record(StepShape(PREFILL, 3, 1, 20, 20, 3, False))
    audit.record(StepShape(PREFILL, 2, 2, 20, 20, 2, False))
    assert audit.report()["violation_count"] == 2


def test_reuse_is_counted():
    audit = StepAudit(PLAN, strict=True, step_log=None)
    assert (audit.report()["preempted"], audit.report()["cached_tokens"]) == (0, 0)
    audit.note_reuse(2, 0)
    audit.note_reuse(1, 48)
    audit.note_reuse(0, 16)
    assert (audit.report()["preempted"], audit.report()["cached_tokens"]) == (3, 64)
    assert audit.report()["split_rows"] == 0
    audit.note_reuse(0, 0, 5)
    assert audit.report()["split_rows"] == 5


def test_a_strict_violation_leaves_a_note_for_the_front_end():
    with violation_note.expected() as read:
        assert read() is None
        audit = StepAudit(PLAN, strict=False, step_log=None)
        audit.record(BAD_STEP)
        assert read() is None  # only counted
        audit = StepAudit(PLAN, strict=True, step_log=None)
        with pytest.raises(PlanViolationError) as stopped:
            audit.record(BAD_STEP)
        assert read() == str(stopped.value)
