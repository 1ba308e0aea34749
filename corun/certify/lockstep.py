"""One clock and one count of differences for all ranks that measure an engine together.

Under tensor parallelism every rank runs the same probes on its own shard, and some of them hold
collectives: a rank that tried something else than the others would wait for them forever. So what
is decided by time is decided by the first rank's clock, and what is decided by a difference by the
differences of all ranks: a row that differs on one of them differs.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Ranks(Protocol):
    """The ranks that measure together; each calls the same in the same order."""

    several: bool

    def now(self) -> float:
        """Seconds on a clock that all of them read alike."""

    def total(self, counts: Sequence[int]) -> list[int]:
        """`counts`, each added up over all of them."""


class OneRank:
    """A rank by itself."""

    several = False

    def now(self) -> float:
        """This process's own clock."""
        return time.perf_counter()

    def total(self, counts: Sequence[int]) -> list[int]:
        """`counts` as they are."""
        return list(counts)


_RANKS: ContextVar[Ranks] = ContextVar("ranks", default=OneRank())  # noqa: B039 -- has no state


@contextmanager
def among(ranks: Ranks) -> Iterator[None]:
    """Measure together with `ranks` while the block runs."""
    before = _RANKS.set(ranks)
    try:
        yield
    finally:
        _RANKS.reset(before)


def several() -> bool:
    """Whether there are other ranks."""
    return _RANKS.get().several


def now() -> float:
    """See ``Ranks``."""
    return _RANKS.get().now()


def total(counts: Sequence[int]) -> list[int]:
    """See ``Ranks``."""
    return _RANKS.get().total(counts)
