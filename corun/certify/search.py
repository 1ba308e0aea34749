"""Finds the shape classes of one operation: sets of row counts whose rows are bit-identical."""

import time
from collections.abc import Iterator

from corun.certify.certificate import RowClaim
from corun.certify.probe import RowProbe
from corun.rows import Rows

MAX_CLASSES = 8
_BATCH = 64  # counts between two looks at the clock


def in_order(largest: int, dense: int) -> Iterator[int]:
    """Every count from 1 to `largest`, those that matter most first.

    The largest; then 1 to `dense`; then the powers of two with their neighbors, multiples of 256,
    of 64, of 8, and the rest.
    """
    seen: set[int] = set()
    powers = [2**i + d for i in range(largest.bit_length() + 1) for d in (-1, 0, 1)]
    orders = [[largest], range(1, dense + 1), powers]
    orders += [range(step, largest + 1, step) for step in (256, 64, 8, 1)]
    for order in orders:
        for n in order:
            if 1 <= n <= largest and n not in seen:
                seen.add(n)
                yield n


def find_classes(
    name: str,
    probe: RowProbe,
    largest: int,
    *,
    budget_s: float,
    dense: int = 64,
    sampled: bool = False,
) -> RowClaim:
    """Search the classes of row counts 1 to `largest`; counts past MAX_CLASSES of them are variant.

    name, sampled: the claim's. budget_s: after so many seconds no further counts are begun; counts
    that were not reached are in no class, so no plan allows them. `dense` counts from 1 up are
    tried whatever the time.
    """
    started = time.perf_counter()
    counts = list(in_order(largest, min(dense, largest)))
    sure = 1 + min(dense, largest)
    classes: list[Rows] = []
    values, variant = 0, []
    reference = probe.reference(largest)
    pending: list[int] = []
    same: list[int] = []
    for start in range(0, len(counts), _BATCH):
        if start >= sure and time.perf_counter() - started > budget_s:
            break
        part = counts[start : start + _BATCH]
        tally = probe.compare(reference, part)
        values += tally.values
        same += [n for n in part if not tally.wrong[n]]
        pending += [n for n in part if tally.wrong[n]]
    if largest in pending:
        # Nothing can be said in relation to a reference that depends on place.
        pending.remove(largest)
        variant.append(largest)
        pending += same
        same = []
    if same:
        classes.append(Rows.of(same))
    while pending and len(classes) < MAX_CLASSES:
        head = max(pending)
        reference = probe.reference(head)
        # By itself first: one that depends on place must not cost a pass over all the others.
        alone = probe.compare(reference, [head])
        values += alone.values
        if alone.wrong[head]:
            variant.append(head)
            pending.remove(head)
            continue
        tally = probe.compare(reference, [n for n in pending if n != head])
        tally.wrong[head] = 0
        values += tally.values
        classes.append(Rows.of(n for n in pending if not tally.wrong[n]))
        pending = [n for n in pending if tally.wrong[n]]
    return RowClaim(
        name,
        sampled,
        tuple(classes),
        Rows.of([*variant, *pending]),
        values,
        time.perf_counter() - started,
    )
