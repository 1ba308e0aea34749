"""Bitwise comparison of two records of the same request. Pure Python, no tolerance anywhere.

A comparison counts what it compared, so that "equal" always says over how much. Positions that only
one side has count as compared and unequal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import isfinite
from typing import Any

from corun.verify.record import Entry, Record, Sample, Step

TOKEN, LENGTH, FINISH, SEED = "token", "length", "finish_reason", "seed"
PROMPT_LOGPROB, LOGPROB, TOP_LOGPROB = "prompt_logprob", "logprob", "top_logprob"
MISSING, COMPLETIONS = "missing_logprobs", "completions"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two records of a request first differ.

    request: its name. sample: index of the completion. step: output position (prompt position for
    PROMPT_LOGPROB). kind: TOKEN, LOGPROB (the sampled token's), TOP_LOGPROB, PROMPT_LOGPROB,
    LENGTH, FINISH, SEED, MISSING or COMPLETIONS. reference, observed: both values, with their bits
    where they are floats. tokens_before: the reference's output tokens before this step.
    """

    request: str
    sample: int
    step: int
    kind: str
    reference: Mapping[str, Any]
    observed: Mapping[str, Any]
    tokens_before: tuple[int, ...]

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared and how much of it was equal. Comparisons add up.

    requests: requests compared; of those, tokens_equal had every token id equal and logprobs_equal
        every returned logprob (token, rank and bits).
    token_values, logprob_values: single values compared; *_equal of them were equal.
    differing: requests that differ in anything at all (also length, finish reason or seed).
    first: the first difference (least step); first_token: the first different token, if any.
    """

    requests: int = 0
    tokens_equal: int = 0
    logprobs_equal: int = 0
    token_values: int = 0
    token_values_equal: int = 0
    logprob_values: int = 0
    logprob_values_equal: int = 0
    differing: int = 0
    first: Divergence | None = None
    first_token: Divergence | None = None

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            self.requests + other.requests,
            self.tokens_equal + other.tokens_equal,
            self.logprobs_equal + other.logprobs_equal,
            self.token_values + other.token_values,
            self.token_values_equal + other.token_values_equal,
            self.logprob_values + other.logprob_values,
            self.logprob_values_equal + other.logprob_values_equal,
            self.differing + other.differing,
            _earlier(self.first, other.first),
            _earlier(self.first_token, other.first_token),
        )

    @property
    def identical(self) -> bool:
        """Whether nothing at all differed."""
        return self.differing == 0

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def compare(reference: Record, observed: Record) -> Comparison:
    """Compare two records of one request, bit by bit."""
    of = [(record.name, record.prompt_tokens) for record in (reference, observed)]
    if of[0] != of[1]:
        raise ValueError(f"these are records of two requests, not of one: {of[0]} and {of[1]}")
    token_counts, logprob_counts = _Count(), _Count()
    found: list[Divergence] = []
    if reference.seed != observed.seed:
        values = {"seed": reference.seed}, {"seed": observed.seed}
        found.append(Divergence(reference.name, 0, 0, SEED, *values, ()))
    found += _prompt(reference, observed, logprob_counts)
    ours, theirs = ({s.index: s for s in record.samples} for record in (reference, observed))
    if ours.keys() != theirs.keys():
        indices = {"completions": sorted(ours)}, {"completions": sorted(theirs)}
        found.append(Divergence(reference.name, 0, 0, COMPLETIONS, *indices, ()))
    for index in sorted(ours.keys() | theirs.keys()):
        nothing = Sample(index, (), None, None, None)
        walk = _Walk(reference.name, ours.get(index, nothing), theirs.get(index, nothing))
        walk.compare(token_counts, logprob_counts)
        found += walk.found
    tokens = [d for d in found if d.kind in (TOKEN, LENGTH)]
    return Comparison(
        requests=1,
        tokens_equal=int(token_counts.all_equal),
        logprobs_equal=int(logprob_counts.all_equal),
        token_values=token_counts.compared,
        token_values_equal=token_counts.equal,
        logprob_values=logprob_counts.compared,
        logprob_values_equal=logprob_counts.equal,
        differing=int(bool(found)),
        first=_earliest(found),
        first_token=_earliest(tokens),
    )


def total(comparisons: Iterable[Comparison]) -> Comparison:
    """The sum of comparisons."""
    return sum(comparisons, Comparison())


@dataclass(slots=True)
class _Count:
    compared: int = 0
    equal: int = 0
    sides_differ: bool = False  # one side has values that the other lacks altogether

    def add(self, compared: int, equal: int) -> None:
        self.compared += compared
        self.equal += equal

    @property
    def all_equal(self) -> bool:
        return self.compared == self.equal and not self.sides_differ


class _Walk:
    """Walks two completions step by step; keeps the first difference of each kind that matters."""

    def __init__(self, request: str, ours: Sample, theirs: Sample) -> None:
        self.request, self.ours, self.theirs = request, ours, theirs
        self.found: list[Divergence] = []

    def compare(self, tokens: _Count, logprobs: _Count) -> None:
        self._logprobs(logprobs)
        self._tokens(tokens)
        shared = min(len(self.ours.token_ids), len(self.theirs.token_ids))
        if len(self.ours.token_ids) != len(self.theirs.token_ids):
            lengths = ({"tokens": len(s.token_ids)} for s in (self.ours, self.theirs))
            self._note(shared, LENGTH, *lengths)
        ends = [
            {"finish_reason": s.finish_reason, "stop_reason": s.stop_reason}
            for s in (self.ours, self.theirs)
        ]
        if ends[0] != ends[1]:
            self._note(shared, FINISH, *ends)

    def _tokens(self, count: _Count) -> None:
        ours, theirs = self.ours.token_ids, self.theirs.token_ids
        equal = [a == b for a, b in zip(ours, theirs, strict=False)]
        count.add(max(len(ours), len(theirs)), sum(equal))
        if not all(equal):
            at = equal.index(False)
            self._note(at, TOKEN, {"token_id": ours[at]}, {"token_id": theirs[at]})

    def _logprobs(self, count: _Count) -> None:
        ours, theirs = self.ours.logprobs, self.theirs.logprobs
        if (ours is None) != (theirs is None):
            count.sides_differ = True
            self._note(0, MISSING, {"logprobs": ours is not None}, {"logprobs": theirs is not None})
        for step, (a, b) in enumerate(zip_longest(ours or (), theirs or (), fillvalue=())):
            count.add(*_step_counts(a, b))
            at = _first_unequal(a, b)
            if at is not None:
                kind = LOGPROB if at == 0 else TOP_LOGPROB
                self._note(step, kind, _shown(a, at), _shown(b, at))

    def _note(
        self, step: int, kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
    ) -> None:
        if any(d.kind == kind for d in self.found):
            return
        before = self.ours.token_ids[:step]
        index = self.ours.index
        self.found.append(Divergence(self.request, index, step, kind, ours, theirs, before))


def _prompt(reference: Record, observed: Record, count: _Count) -> list[Divergence]:
    ours, theirs = reference.prompt_logprobs, observed.prompt_logprobs
    found: list[Divergence] = []
    if (ours is None) != (theirs is None):
        count.sides_differ = True
        values = {"prompt_logprobs": ours is not None}, {"prompt_logprobs": theirs is not None}
        found.append(Divergence(reference.name, 0, 0, MISSING, *values, ()))
    for position, (a, b) in enumerate(zip_longest(ours or (), theirs or (), fillvalue=None)):
        count.add(*_step_counts(a or (), b or ()))
        at = _first_unequal(a or (), b or ())
        if at is not None and not found:
            values = _shown(a or (), at), _shown(b or (), at)
            found.append(Divergence(reference.name, 0, position, PROMPT_LOGPROB, *values, ()))
    return found


def _step_counts(a: Step, b: Step) -> tuple[int, int]:
    return max(len(a), len(b)), sum(x == y for x, y in zip(a, b, strict=False))


def _first_unequal(a: Step, b: Step) -> int | None:
    for at, (x, y) in enumerate(zip_longest(a, b)):
        if x != y:
            return at
    return None


def _shown(step: Step, at: int) -> dict[str, Any]:
    entry: Entry | None = step[at] if at < len(step) else None
    if entry is None:
        return {"logprob": None}
    return {
        "token_id": entry.token_id,
        "rank": entry.rank,
        # JSON has no infinities.
        "logprob": entry.logprob if isfinite(entry.logprob) else str(entry.logprob),
        "bits": f"0x{entry.bits:08x}",
    }


_ORDER = (
    SEED,
    COMPLETIONS,
    MISSING,
    PROMPT_LOGPROB,
    TOKEN,
    LOGPROB,
    TOP_LOGPROB,
    LENGTH,
    FINISH,
)


def _when(found: Divergence) -> tuple[bool, int, int]:
    # A prompt's logprobs are computed before any output token.
    return found.kind != PROMPT_LOGPROB, found.step, _ORDER.index(found.kind)


def _earliest(found: list[Divergence]) -> Divergence | None:
    return min(found, key=_when, default=None)


def _earlier(a: Divergence | None, b: Divergence | None) -> Divergence | None:
    return _earliest([d for d in (a, b) if d is not None])
