"""Finds the shape classes of operations: sets of row counts whose rows are bit-identical."""

from collections.abc import Iterator, Sequence

from corun.certify import lockstep
from corun.certify.certificate import RowClaim
from corun.certify.probe import RowProbe
from corun.rows import Rows

MAX_CLASSES = 8
DENSE = 64  # counts from 1 up that are tried whatever the time
_BATCH, _BATCH_ROWS = 64, 8192  # counts, and their rows, between two looks at the clock


def first_counts(largest: int, dense: int) -> list[int]:
    """The counts tried whatever the time: `largest`, 1 to `dense`, and around powers of two."""
    powers = [2**i + d for i in range(largest.bit_length() + 1) for d in (-1, 0, 1)]
    chosen = dict.fromkeys([largest, *range(1, dense + 1), *powers])
    return [n for n in chosen if 1 <= n <= largest]


def in_order(largest: int, dense: int) -> list[int]:
    """Every count from 1 to `largest`, those that matter most first.

    After the ``first_counts`` eight between each power of two and the next, so that a step need not
    be padded by more than an eighth; then multiples of 64, of 8, and the rest.
    """
    between = [k << i for i in range(largest.bit_length()) for k in range(8, 16)]
    rest = [n for step in (64, 8, 1) for n in range(step, largest + 1, step)]
    chosen = dict.fromkeys([*first_counts(largest, dense), *between, *rest])
    return [n for n in chosen if n <= largest]


class ClassSearch:
    """The search for one operation's classes: first against the largest count, then what is left.

    name, sampled: the claim's.
    """

    def __init__(self, name: str, probe: RowProbe, largest: int, *, sampled: bool = False) -> None:
        started = lockstep.now()
        self.name, self.sampled = name, sampled
        self._probe, self._largest = probe, largest
        self._reference = probe.reference(largest)
        self._same: list[int] = []
        self._pending: list[int] = []
        self._values = 0
        self._tried = self._again = 0  # rows of all counts, and of those that are to be tried again
        self._seconds = lockstep.now() - started

    @property
    def seconds(self) -> float:
        """What ``claim`` will have taken, if nothing more is tried."""
        return self._seconds * (1 + self._again / max(1, self._tried))

    def compare(self, counts: Sequence[int]) -> None:
        """Compare `counts` with the largest."""
        started = lockstep.now()
        tally = self._probe.compare(self._reference, counts)
        self._values += tally.values
        other = [n for n in counts if tally.wrong[n]]
        self._same += [n for n in counts if not tally.wrong[n]]
        self._pending += other
        self._tried, self._again = self._tried + sum(counts), self._again + sum(other)
        self._seconds += lockstep.now() - started

    def claim(self) -> RowClaim:
        """The classes of all counts compared; those past MAX_CLASSES of them are variant."""
        started = lockstep.now()
        classes: list[Rows] = []
        variant: list[int] = []
        same, pending = self._same, self._pending
        if self._largest in pending:
            # Nothing can be said in relation to a reference that depends on place.
            variant.append(self._largest)
            pending = [n for n in (*pending, *same) if n != self._largest]
            same = []
        if same:
            classes.append(Rows.of(same))
        while pending and len(classes) < MAX_CLASSES:
            head = max(pending)
            reference = self._probe.reference(head)
            # By itself first: one that depends on place must not cost a pass over all the others.
            alone = self._probe.compare(reference, [head])
            self._values += alone.values
            if alone.wrong[head]:
                variant.append(head)
                pending.remove(head)
                continue
            tally = self._probe.compare(reference, [n for n in pending if n != head])
            tally.wrong[head] = 0
            self._values += tally.values
            classes.append(Rows.of(n for n in pending if not tally.wrong[n]))
            pending = [n for n in pending if tally.wrong[n]]
        return RowClaim(
            self.name,
            self.sampled,
            tuple(classes),
            Rows.of([*variant, *pending]),
            self._values,
            self._seconds + lockstep.now() - started,
        )


def find_classes(
    searches: Sequence[ClassSearch], largest: int, *, budget_s: float, dense: int = DENSE
) -> list[RowClaim]:
    """The classes of row counts 1 to `largest`, of several operations at the same counts.

    A plan has use only for counts at which every operation was tried. budget_s: about how many
    seconds to take for all; counts that were not reached then are in no class, so no plan allows
    them. The ``first_counts`` are tried whatever the time.
    """
    counts, sure = in_order(largest, dense), len(first_counts(largest, dense))
    for part in _parts(counts[:sure]):
        for search in searches:
            search.compare(part)
    for part in _parts(counts[sure:]):
        if sum(search.seconds for search in searches) > budget_s:
            break
        for search in searches:
            search.compare(part)
    return [search.claim() for search in searches]


def _parts(counts: Sequence[int]) -> Iterator[list[int]]:
    """`counts` in parts of at most _BATCH counts, and _BATCH_ROWS rows where that is several."""
    part: list[int] = []
    rows = 0
    for n in counts:
        if part and (len(part) == _BATCH or rows + n > _BATCH_ROWS):
            yield part
            part, rows = [], 0
        part.append(n)
        rows += n
    if part:
        yield part
