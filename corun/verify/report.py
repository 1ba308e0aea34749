"""What a verification found: counts, crossings, the engine's audit, the verdict. Pure Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corun.verify.compare import Comparison, Divergence, total
from corun.verify.workload import ROW_THRESHOLDS, Limits

KEPT, BROKE, CANNOT_RUN = 0, 1, 2
REUSE = ("mixed_steps", "preempted", "cached_tokens", "split_rows")
VERDICTS = {KEPT: "kept", BROKE: "broke", CANNOT_RUN: "could not run"}


@dataclass(slots=True)
class ScenarioResult:
    """One scenario on one engine, all its plays together.

    engine: 1 for the first engine, 2 for the one after the first restart, and so on. plays: how
    often it was played. steps, most_rows, least_rows, aborted: as in drive.Played. longest: most
    tokens of prompt and output in one compared request.
    """

    suite: str
    name: str
    engine: int
    comparison: Comparison = field(default_factory=Comparison)
    plays: int = 0
    steps: int = 0
    most_rows: int = 0
    least_rows: int = 0
    aborted: int = 0
    longest: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "suite": self.suite,
            "scenario": self.name,
            "engine": self.engine,
            "plays": self.plays,
            "steps": self.steps,
            "most_rows": self.most_rows,
            "least_rows": self.least_rows,
            "aborted": self.aborted,
            "longest_request_tokens": self.longest,
            **self.comparison.to_mapping(),
        }


@dataclass(frozen=True, slots=True)
class EngineAudit:
    """What CoRun's step audit said of one engine, over all its workers.

    steps: executed steps by kind (of one worker). violations: in words. domain: its fingerprint.
    reuse: of REUSE, how often (mixed steps, requests preempted, prompt tokens found in the cache,
        rows whose KV was split).
    """

    engine: int
    steps: dict[str, int]
    violations: tuple[str, ...]
    domain: str
    reuse: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class VerifyReport:
    """A whole verification. `exit_status` and `verdict` follow from what it holds.

    model, asked: the model and the policy as asked for; policy: the one in force. settings: what
    the workload was made with. versions: of the software. limits: what the engine could hold.
    alone: requests run alone for reference. results: one for each scenario and engine. audits: one
    for each engine (none for plain vLLM). left_out: what was not exercised, and why. failures:
    what went wrong that is no difference in values, such as a changed domain. error: why it could
    not run to the end, or None. words: token ids to text.
    """

    model: str
    asked: str
    policy: str
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    limits: Limits | None = None
    alone: int = 0
    results: list[ScenarioResult] = field(default_factory=list)
    audits: list[EngineAudit] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    words: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens))

    def result(self, suite: str, name: str, engine: int) -> ScenarioResult:
        """The result to add to; a new one on first use."""
        for known in self.results:
            if (known.suite, known.name, known.engine) == (suite, name, engine):
                return known
        self.results.append(ScenarioResult(suite, name, engine))
        return self.results[-1]

    @property
    def comparison(self) -> Comparison:
        """Everything that was compared."""
        return total(result.comparison for result in self.results)

    @property
    def violations(self) -> list[str]:
        """Steps outside the plan, in words."""
        return [violation for audit in self.audits for violation in audit.violations]

    @property
    def exit_status(self) -> int:
        """KEPT, BROKE or CANNOT_RUN. A difference outweighs an error that came after it."""
        everything = self.comparison
        if not everything.identical or self.violations or self.failures:
            return BROKE
        if self.error is not None or not (everything.token_values and everything.logprob_values):
            return CANNOT_RUN
        return KEPT

    @property
    def verdict(self) -> str:
        """The exit status in words."""
        return VERDICTS[self.exit_status]

    @property
    def domain(self) -> str | None:
        """The first engine's domain fingerprint; None for plain vLLM."""
        return self.audits[0].domain if self.audits else None

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output in one compared request."""
        return max((result.longest for result in self.results), default=0)

    def crossings(self) -> dict[int, str | None]:
        """For each row threshold: None where concurrent rows went from below it to at least it in
        one scenario, else why not.
        """
        most = max((result.most_rows for result in self.results), default=0)
        found: dict[int, str | None] = {}
        for rows in ROW_THRESHOLDS:
            if any(r.least_rows < rows <= r.most_rows for r in self.results):
                found[rows] = None
            elif self.limits is not None and self.limits.rows < rows:
                found[rows] = f"max_num_seqs is {self.limits.rows}; give --rows {rows} or more"
            else:
                found[rows] = f"at most {most} rows ran together in the scenarios chosen"
        return found

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        everything = self.comparison
        return {
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "error": self.error,
            "failures": self.failures,
            "model": self.model,
            "policy_asked": self.asked,
            "policy": self.policy,
            "domain": self.domain,
            "device": self.device,
            "versions": self.versions,
            "settings": self.settings,
            "seconds": round(self.seconds, 3),
            "reference_requests": self.alone,
            "total": {
                **everything.to_mapping(),
                "first": self._told(everything.first),
                "first_token": self._told(everything.first_token),
            },
            "longest_request_tokens": self.longest,
            "row_crossings": {
                str(rows): {"exercised": why is None, "why_not": why}
                for rows, why in self.crossings().items()
            },
            "left_out": self.left_out,
            "audit": [
                {
                    "engine": audit.engine,
                    "steps": audit.steps,
                    "violations": list(audit.violations),
                    "domain": audit.domain,
                    **audit.reuse,
                }
                for audit in self.audits
            ],
            "scenarios": [result.to_mapping() for result in self.results],
        }

    def _told(self, found: Divergence | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {**found.to_mapping(), "text_before": self.words(found.tokens_before)}
