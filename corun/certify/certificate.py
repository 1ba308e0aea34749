"""The certificate: what was measured on this machine, for one model's shapes. Pure Python."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from corun.rows import Rows

VERSION = 1


class CertificateError(ValueError):
    """A certificate that cannot be used: damaged, of another version, or of another domain."""


def _typed(value: Any, kind: type) -> Any:
    """`value`, of exactly this type (``True`` is no number). ValueError."""
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


def _count(value: Any) -> int:
    """A number of things. ValueError."""
    if _typed(value, int) < 0:
        raise ValueError(f"{value} is not a number of things")
    return value


def _seconds(value: Any) -> float:
    """A finite time. ValueError."""
    seconds = float(value) if type(value) in (int, float) else math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is not a number of seconds")
    return seconds


def _rows(given: Any) -> Rows:
    for pair in given:
        for n in pair:
            _typed(n, int)
    return Rows.from_lists(given)


def _example(given: Mapping[str, Any]) -> str | None:
    example = given.get("example")
    return None if example is None else _typed(example, str)


@dataclass(frozen=True, slots=True)
class RowClaim:
    """One row-wise operation.

    name: module class and shape. sampled: it sees the rows that sample (LM head), not a step's.
    classes: sets of row counts within which a row keeps its bits at any place and beside any rows;
        the first holds the largest count tried. variant: counts that depend on place or neighbors.
    values: values compared. seconds: time it took.
    """

    name: str
    sampled: bool
    classes: tuple[Rows, ...]
    variant: Rows
    values: int
    seconds: float

    def same(self) -> Rows:
        """The class that holds the largest count, or the empty set."""
        return self.classes[0] if self.classes else Rows()

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "sampled": self.sampled,
            "classes": [c.to_lists() for c in self.classes],
            "variant": self.variant.to_lists(),
            "values": self.values,
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "RowClaim":
        """The inverse of ``to_mapping``. KeyError, TypeError or ValueError where it is damaged."""
        return cls(
            _typed(given["name"], str),
            _typed(given["sampled"], bool),
            tuple(_rows(c) for c in given["classes"]),
            _rows(given["variant"]),
            _count(given["values"]),
            _seconds(given["seconds"]),
        )


@dataclass(frozen=True, slots=True)
class StepClaim:
    """One property of steps (see ``compositions.PROPERTIES``), of one operation.

    operation: an attention layer's class and shape, or "model" for the whole network.
    holds: no bit differed. trials, values: step compositions run, and values compared in them.
    example: the first difference, in words; None where it holds.
    """

    operation: str
    name: str
    holds: bool
    trials: int
    values: int
    example: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "StepClaim":
        """The inverse of ``to_mapping``. KeyError, TypeError or ValueError where it is damaged."""
        return cls(
            _typed(given["operation"], str),
            _typed(given["name"], str),
            _typed(given["holds"], bool),
            _count(given["trials"]),
            _count(given["values"]),
            _example(given),
        )


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The loaded engine under the plan, once: requests alone against the same in company.

    equal: no bit differed. tokens, logprobs: values compared. example: the first difference.
    """

    equal: bool
    tokens: int
    logprobs: int
    example: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "EngineCheck":
        """The inverse of ``to_mapping``. KeyError, TypeError or ValueError where it is damaged."""
        return cls(
            _typed(given["equal"], bool),
            _count(given["tokens"]),
            _count(given["logprobs"]),
            _example(given),
        )


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was measured, and for what.

    domain: what the claims hold for (model shape, dtype, device, software, settings), JSON values.
    rows, steps: the claims. engine: the end-to-end check, None before it ran.
    largest: the largest row count a step was tried with. seconds: time that all of it took.
    worker: what the worker that measured said of itself (``corun.engine.worker_facts``).
    sequence: tokens of the longest sequence that attention was tried with; 0 where nobody looked.
    together: tokens of the fullest step of several requests that it was tried with; likewise.
    """

    domain: Mapping[str, Any]
    rows: tuple[RowClaim, ...]
    steps: tuple[StepClaim, ...]
    largest: int
    seconds: float
    engine: EngineCheck | None = None
    worker: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 0
    together: int = 0

    def holds(self, name: str) -> bool:
        """Whether a property holds for every operation that it was tried with (at least one)."""
        claims = [claim for claim in self.steps if claim.name == name]
        return bool(claims) and all(claim.holds for claim in claims)

    def step_rows(self) -> Rows:
        """Row counts in the class of the largest count, for every operation of a step."""
        return self._together(sampled=False)

    def sample_rows(self) -> Rows:
        """The same for the rows that sample."""
        return self._together(sampled=True)

    def _together(self, *, sampled: bool) -> Rows:
        claims = [claim for claim in self.rows if claim.sampled == sampled]
        if not claims:
            return Rows()
        common = claims[0].same()
        for claim in claims[1:]:
            common &= claim.same()
        return common

    @property
    def digest(self) -> str:
        """16 hex digits that name these very claims."""
        body = json.dumps(self.to_mapping(), sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        mapping = {
            "version": VERSION,
            "domain": dict(self.domain),
            "rows": [claim.to_mapping() for claim in self.rows],
            "steps": [claim.to_mapping() for claim in self.steps],
            "largest": self.largest,
            "seconds": round(self.seconds, 3),
            "engine": self.engine.to_mapping() if self.engine else None,
        }
        # Certificates of CoRun's first days have none of these, and keep their digests.
        if self.worker:
            mapping["worker"] = dict(self.worker)
        if self.sequence:
            mapping["sequence"] = self.sequence
        if self.together:
            mapping["together"] = self.together
        return mapping

    @classmethod
    def from_mapping(cls, given: Any) -> "Certificate":
        """The inverse of ``to_mapping``, also from a report that holds it under "certificate".

        CertificateError where it is none.
        """
        if isinstance(given, Mapping) and isinstance(given.get("certificate"), Mapping):
            given = given["certificate"]
        if not isinstance(given, Mapping) or "version" not in given:
            raise CertificateError("this is no CoRun certificate; make one with 'corun certify'")
        if type(given["version"]) is not int or given["version"] != VERSION:
            raise CertificateError(
                f"this certificate has format {given['version']!r}, not {VERSION}; make a new one "
                "with 'corun certify'"
            )
        try:
            made = cls(
                dict(given["domain"]),
                tuple(RowClaim.from_mapping(claim) for claim in given["rows"]),
                tuple(StepClaim.from_mapping(claim) for claim in given["steps"]),
                _count(given["largest"]),
                _seconds(given["seconds"]),
                None if given["engine"] is None else EngineCheck.from_mapping(given["engine"]),
                dict(given.get("worker", {})),
                _count(given.get("sequence", 0)),
                _count(given.get("together", 0)),
            )
            if given.get("digest", made.digest) != made.digest:
                raise ValueError("its contents were changed")
            made._check_largest()
        except (KeyError, TypeError, ValueError) as e:
            raise CertificateError(
                f"this certificate is damaged ({e!r}); make a new one with 'corun certify'"
            ) from e
        return made

    def _check_largest(self) -> None:
        """ValueError unless `largest` is what every operation of a step was tried with first."""
        for claim in self.rows:
            tried = (*claim.classes, claim.variant)
            if not claim.sampled and max(rows.largest for rows in tried) != self.largest:
                raise ValueError(f"{claim.name} was not tried with {self.largest} rows")
