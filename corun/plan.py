"""What a step may look like: StepShape (as executed) and Plan (as allowed). Pure Python.

The engine reports each executed step as a StepShape; ``Plan.violation`` says in words what is wrong
with it, or returns None. ``isolate`` (the paper, Sections IV-B to IV-D): a prefill step holds one
request in its own natural shape; every other step is a decode step of exactly ``decode_rows`` rows.
"""

from dataclasses import asdict, dataclass
from typing import Any

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class StepShape:
    """One executed step.

    kind: PREFILL or DECODE. A step where every request brings one token is a DECODE step: a prompt
        chunk of one token has the decode shape too, always, so its bits depend on nothing else.
    requests: requests scheduled. prefill_requests: of those, the ones still inside their prompt.
    tokens: tokens scheduled, all requests together.
    rows: rows that the model saw (tokens + padding).
    sample_rows: rows that the LM head and the sampler saw.
    graph: whether a captured CUDA graph was replayed.
    """

    kind: str
    requests: int
    prefill_requests: int
    tokens: int
    rows: int
    sample_rows: int
    graph: bool

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """The shapes that a policy allows.

    policy: the policy in force (never ``auto``).
    decode_rows: rows of every decode step (``max_num_seqs``); 0 where the policy fixes none.
    max_prefill_tokens: longest prompt chunk in tokens (``max_num_batched_tokens``).
    decode_graph: whether decode steps must replay a graph (False: must not).
    reason: why this policy, in one sentence, for people.
    """

    policy: str
    decode_rows: int
    max_prefill_tokens: int
    decode_graph: bool
    reason: str

    def violation(self, step: StepShape) -> str | None:
        """What breaks the plan in this step, or None."""
        if self.policy != "isolate":
            return None
        if step.kind == PREFILL:
            return self._prefill_violation(step)
        return self._decode_violation(step)

    def _prefill_violation(self, step: StepShape) -> str | None:
        if step.requests != 1:
            return f"a prefill step with {step.requests} requests (isolate allows 1)"
        if step.tokens > self.max_prefill_tokens:
            return f"a prefill chunk of {step.tokens} tokens (at most {self.max_prefill_tokens})"
        if step.rows != step.tokens:
            return f"a prefill of {step.tokens} tokens padded to {step.rows} rows"
        if step.graph:
            return "a prefill step that replayed a CUDA graph"
        if step.sample_rows != 1:
            return f"a prefill step that sampled {step.sample_rows} rows (must be 1)"
        return None

    def _decode_violation(self, step: StepShape) -> str | None:
        if step.prefill_requests and step.requests != 1:
            return f"a prefill mixed into a step of {step.requests} requests"
        if step.rows != self.decode_rows:
            return f"a decode step of {step.rows} rows (must be {self.decode_rows})"
        if step.sample_rows != self.decode_rows:
            return (
                f"a decode step that sampled {step.sample_rows} rows (must be {self.decode_rows})"
            )
        if step.graph != self.decode_graph:
            want = "replay its CUDA graph" if self.decode_graph else "run without a graph"
            return f"a decode step that did not {want}"
        return None

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)
