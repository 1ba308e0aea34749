"""Rows: a set of row counts, kept as sorted ranges. Pure Python."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """A set of row counts (positive integers).

    ranges: inclusive (first, last) pairs, sorted, apart from each other by at least one count.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, counts: Iterable[int]) -> "Rows":
        """The set of `counts`, in any order. ValueError for a count below 1."""
        ranges: list[tuple[int, int]] = []
        for n in sorted(set(counts)):
            if n < 1:
                raise ValueError(f"{n} is not a number of rows")
            if ranges and ranges[-1][1] == n - 1:
                ranges[-1] = (ranges[-1][0], n)
            else:
                ranges.append((n, n))
        return cls(tuple(ranges))

    @classmethod
    def span(cls, first: int, last: int) -> "Rows":
        """Every count from `first` to `last`, both included; empty where last < first."""
        return cls(((first, last),)) if last >= first else cls()

    @classmethod
    def from_lists(cls, given: Iterable[Sequence[int]]) -> "Rows":
        """The inverse of ``to_lists``. ValueError where ranges are out of order or overlap."""
        ranges = tuple((int(first), int(last)) for first, last in given)
        previous = -1
        for first, last in ranges:
            if first < 1 or last < first or first <= previous + 1:
                raise ValueError(f"{[first, last]} is not a range of rows after {previous}")
            previous = last
        return cls(ranges)

    def to_lists(self) -> list[list[int]]:
        """JSON form: [[first, last], ...]."""
        return [list(r) for r in self.ranges]

    def __contains__(self, n: int) -> bool:
        return any(first <= n <= last for first, last in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __and__(self, other: "Rows") -> "Rows":
        pairs = ((max(a, c), min(b, d)) for a, b in self.ranges for c, d in other.ranges)
        return Rows(tuple(sorted((a, b) for a, b in pairs if a <= b)))

    def __str__(self) -> str:
        """As people write it: ``1-8, 16, 32-64``."""
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges) or "none"

    @property
    def largest(self) -> int:
        """The largest count; 0 for the empty set."""
        return self.ranges[-1][1] if self.ranges else 0

    def at_least(self, n: int) -> int | None:
        """The smallest count of the set that is n or more; None if there is none."""
        for first, last in self.ranges:
            if last >= n:
                return max(first, n)
        return None
