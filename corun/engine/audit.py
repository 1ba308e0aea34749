"""The step audit: every executed step is counted by shape and checked against the plan."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from corun.engine import violation_note
from corun.plan import DECODE, PREFILL, Plan, StepShape

MAX_KEPT = 20  # violations kept in full when not strict


class PlanViolationError(RuntimeError):
    """A step ran outside the plan: outputs since then may depend on co-runners."""


class StepAudit:
    """Counts steps by shape and checks each against `plan`.

    strict: raise PlanViolationError at the first violation. step_log: a file that gets one JSON
    line a step, or None.
    """

    def __init__(self, plan: Plan, strict: bool, step_log: str | None) -> None:
        self.plan = plan
        self.strict = strict
        self.steps = 0
        self.violations: list[str] = []
        self.violation_count = 0
        self.shapes: Counter[StepShape] = Counter()
        self.preempted = 0
        self.cached_tokens = 0
        self.split_rows = 0
        self._log: TextIO | None = None
        if step_log:  # open for as long as the engine lives
            self._log = Path(step_log).open("a")  # noqa: SIM115

    def record(self, step: StepShape) -> None:
        """Take one executed step."""
        self.steps += 1
        self.shapes[step] += 1
        if self._log:
            self._log.write(json.dumps({"step": self.steps, **step.to_mapping()}) + "\n")
            self._log.flush()
        wrong = self.plan.violation(step)
        if wrong is None:
            return
        self.violation_count += 1
        message = f"CoRun: step {self.steps} was {wrong}, outside the plan '{self.plan.policy}'"
        if len(self.violations) < MAX_KEPT:
            self.violations.append(message)
        if self.strict:
            message += ". The engine stops: outputs from here on could depend on co-runners"
            violation_note.leave(message)
            raise PlanViolationError(message)

    def note_reuse(self, preempted: int, cached_tokens: int, split_rows: int = 0) -> None:
        """Count requests preempted by a step, tokens that new requests found in the cache, and rows
        whose KV was split (``Plan.split_beyond``).
        """
        self.preempted += preempted
        self.cached_tokens += cached_tokens
        self.split_rows += split_rows

    def report(self) -> dict[str, Any]:
        """JSON-able counts: steps of each kind, distinct shapes, violations."""
        kinds: Counter[str] = Counter()
        rows: dict[str, dict[str, int]] = {PREFILL: {}, DECODE: {}}
        for shape, count in self.shapes.items():
            kinds[shape.kind] += count
            by_rows = rows[shape.kind]
            by_rows[str(shape.rows)] = by_rows.get(str(shape.rows), 0) + count
        graphs = sum(count for shape, count in self.shapes.items() if shape.graph)
        active = max((s.requests for s in self.shapes), default=0)
        return {
            "steps": {PREFILL: kinds[PREFILL], DECODE: kinds[DECODE]},
            "graph_steps": graphs,
            "most_requests": active,
            "mixed_steps": sum(
                count for s, count in self.shapes.items() if 0 < s.prefill_requests < s.requests
            ),
            "preempted": self.preempted,
            "cached_tokens": self.cached_tokens,
            "split_rows": self.split_rows,
            "rows": rows,
            "violations": self.violations,
            "violation_count": self.violation_count,
        }
