"""What a step may look like: StepShape (as executed) and Plan (as allowed). Pure Python.

The engine reports each executed step as a StepShape; ``Plan.violation`` says in words what is wrong
with it, or returns None.

* ``isolate`` (the paper, Sections IV-B to IV-D): a prefill step holds one request in a shape that
  its own length alone decides: its natural one, or the next of ``prefill_rows``, which have CUDA
  graphs. Every other step is a decode step of exactly ``decode_rows`` rows.
* ``pack``: a prefill step holds whole chunks of several requests, padded to ``max_prefill_tokens``
  rows; decode as under ``isolate``.
* ``certified``: any step that the grants allow, at a row count of the one shape class that every
  operation was measured to have (``step_rows``; ``sample_rows`` for LM head and sampler).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from corun.rows import Rows

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class StepShape:
    """One executed step.

    kind: PREFILL or DECODE. A step where every request brings one token is a DECODE step: a prompt
        chunk of one token has the decode shape too. Any other step is a PREFILL step, also with
        decode tokens in it.
    requests: requests scheduled. prefill_requests: of those, the ones still inside their prompt.
    tokens: tokens scheduled, all requests together.
    rows: rows that the model saw (tokens + padding).
    sample_rows: rows that the LM head and the sampler saw.
    graph: whether a captured CUDA graph of the whole model was replayed.
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
class Grants:
    """What a step may hold, each allowed or not by itself.

    mixed: decode tokens beside a prompt's chunk. batched_prefill: chunks of several prompts.
    free_chunks: a prompt may be cut anywhere (else in chunks of ``max_prefill_tokens`` from its own
    start). prefix_cache: a prompt may start behind cached KV. preemption: a request may lose its KV
    cache and have it recomputed (else its whole length is reserved before it starts).
    """

    mixed: bool = False
    batched_prefill: bool = False
    free_chunks: bool = False
    prefix_cache: bool = False
    preemption: bool = False

    @property
    def free(self) -> bool:
        """Everything is allowed: vLLM's own scheduler may run as it is."""
        return all(asdict(self).values())

    @classmethod
    def everything(cls) -> "Grants":
        """All of them."""
        return cls(True, True, True, True, True)


@dataclass(frozen=True, slots=True)
class Plan:
    """The shapes that a policy allows.

    policy: the policy in force (never ``auto``).
    decode_rows: isolate, pack: rows of every decode step; certified: the most requests in a step
        (``max_num_seqs`` in all three).
    max_prefill_tokens: the longest step in tokens (``max_num_batched_tokens``).
    decode_graph: isolate, pack: whether decode steps must replay a graph (False: must not).
    prefill_rows: isolate: row counts, ascending, that a prefill is padded up to, each with
        piecewise CUDA graphs. A longer prefill, and every one without graphs, keeps its own shape.
    reason: why this policy, in one sentence, for people.
    grants: what a step may hold.
    step_rows, sample_rows: certified: row counts that the model, and LM head and sampler, may see.
    certificate: certified: the digest of the certificate that the plan rests on.
    class_of: certified: the row counts that name the classes, of a step and of what samples. Other
        classes of the same engine give other bits.
    split_beyond: certified: decoded rows of more KV than this, and than their prompt, are split by
        ``corun.engine.split_steps``; 0: none is.
    worker: what the worker that measured the certificate said of itself; empty without one.
    """

    policy: str
    decode_rows: int
    max_prefill_tokens: int
    decode_graph: bool
    reason: str
    grants: Grants = field(default_factory=Grants)
    step_rows: Rows = field(default_factory=Rows)
    sample_rows: Rows = field(default_factory=Rows)
    certificate: str | None = None
    class_of: tuple[int, int] = (0, 0)
    prefill_rows: tuple[int, ...] = ()
    split_beyond: int = 0
    worker: Mapping[str, Any] = field(default_factory=dict)

    @property
    def certified(self) -> bool:
        """Whether row counts follow a certificate rather than one fixed decode shape."""
        return self.policy == "certified"

    @property
    def constrained(self) -> bool:
        """Whether kernels must be held to what a certificate was measured under."""
        return self.policy in ("certified", "pack")

    def rows_for(self, tokens: int, *, decode: bool) -> int:
        """Rows of a step of `tokens` tokens (certified: of one that no CUDA graph pads)."""
        if self.certified:
            return self._at_least(self.step_rows, tokens, "step")
        if decode:
            return self.decode_rows
        if self.policy == "pack":
            return self.max_prefill_tokens
        return next((rows for rows in self.prefill_rows if rows >= tokens), tokens)

    def sample_rows_for(self, rows: int, *, decode: bool) -> int:
        """Rows that LM head and sampler see where `rows` requests sample."""
        if self.certified:
            return self._at_least(self.sample_rows, rows, "LM head")
        return self.decode_rows if decode or self.policy == "pack" else rows

    def violation(self, step: StepShape) -> str | None:
        """What breaks the plan in this step, or None."""
        if self.certified:
            return self._held_violation(step) or self._certified_rows(step)
        if self.policy not in ("isolate", "pack"):
            return None
        if step.kind == DECODE:
            return self._decode_violation(step)
        return self._held_violation(step) or self._prefill_rows(step)

    def _held_violation(self, step: StepShape) -> str | None:
        grants = self.grants
        mixed = step.prefill_requests and step.requests > step.prefill_requests
        if mixed and not grants.mixed:
            return f"a prefill mixed into a step of {step.requests} requests"
        if step.prefill_requests > 1 and not grants.batched_prefill:
            return f"a prefill step with {step.prefill_requests} requests ({self.policy} allows 1)"
        if step.tokens > self.max_prefill_tokens:
            return f"a step of {step.tokens} tokens (at most {self.max_prefill_tokens})"
        return None

    def _certified_rows(self, step: StepShape) -> str | None:
        if step.rows < step.tokens or step.rows not in self.step_rows:
            return f"a step of {step.rows} rows (certified: {self.step_rows})"
        if step.sample_rows and step.sample_rows not in self.sample_rows:
            return f"a step that sampled {step.sample_rows} rows (certified: {self.sample_rows})"
        return None

    def _prefill_rows(self, step: StepShape) -> str | None:
        rows = self.rows_for(step.tokens, decode=False)
        if step.rows != rows:
            return f"a prefill of {step.tokens} tokens padded to {step.rows} rows (must be {rows})"
        if step.graph:
            return "a prefill step that replayed a whole CUDA graph"
        sampled = self.sample_rows_for(1, decode=False)
        if step.sample_rows != sampled:
            return f"a prefill step that sampled {step.sample_rows} rows (must be {sampled})"
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

    @staticmethod
    def _at_least(rows: Rows, n: int, what: str) -> int:
        found = rows.at_least(n)
        if found is None:
            raise ValueError(f"no certified {what} shape holds {n} rows (certified: {rows})")
        return found

    def summary(self) -> str:
        """The shapes in a few words, for people."""
        if self.certified:
            split = f", decode split beyond {self.split_beyond} tokens" * bool(self.split_beyond)
            return (
                f"steps of at most {self.max_prefill_tokens} tokens, at certified row counts{split}"
            )
        prefill = "one prompt's chunk" if self.policy == "isolate" else "whole chunks of prompts"
        return (
            f"decode steps of {self.decode_rows} rows, {prefill} of at most "
            f"{self.max_prefill_tokens} tokens"
        )

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        mapping = asdict(self)
        mapping["step_rows"] = self.step_rows.to_lists()
        mapping["sample_rows"] = self.sample_rows.to_lists()
        for name in ("class_of", "prefill_rows"):
            mapping[name] = list(getattr(self, name))
        return mapping

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "Plan":
        """The inverse of ``to_mapping``."""
        fields = dict(given)
        fields["grants"] = Grants(**fields.get("grants", {}))
        for name in ("step_rows", "sample_rows"):
            fields[name] = Rows.from_lists(fields.get(name, []))
        fields["class_of"] = tuple(fields.get("class_of", (0, 0)))
        fields["prefill_rows"] = tuple(fields.get("prefill_rows", ()))
        return cls(**fields)
