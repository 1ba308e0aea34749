"""RowProbe: does a row of an operation keep its bits at another row count, place, or company?

An operation is a function of rows, [M, K] -> [M, N]. A pool of P distinct rows is pushed through it
at many row counts; each time every place holds a row drawn at random from the pool, so places,
neighbors and row counts all change at once, and every output bit is compared with the one that the
same row had at the reference count. Torch only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from corun.certify import lockstep

Operation = Callable[[torch.Tensor], torch.Tensor]

POOL = 256
MIN_VALUES = 100_000  # per row count; a bf16 output differs in 0.2% of elements where it differs
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 128  # rows that are gathered and compared at a time on a CPU, so that they stay in caches


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits of a floating tensor, as integers of its size."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def mismatches(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | int:
    """How many bits tensors' values differ; on a GPU not read back yet."""
    if found.device.type == "cpu" and torch.equal(found, expected):
        return 0  # many times faster than counting
    return torch.count_nonzero(found != expected)


def unlike(found: torch.Tensor, reference: torch.Tensor, index: torch.Tensor) -> torch.Tensor | int:
    """``mismatches`` of `found` [M, N] and the rows `index` [M] of `reference` [P, N]."""
    if found.device.type == "cpu" and _equal(found, reference, index):
        return 0
    return mismatches(found, reference[index])


def _equal(found: torch.Tensor, reference: torch.Tensor, index: torch.Tensor) -> bool:
    """Whether no bit differs, three times faster than by gathering all of `reference[index]`."""
    whole = found[0].numel() * found.element_size() % 8 == 0
    one, other = (t.flatten(1).view(torch.int64) if whole else t for t in (found, reference))
    return all(
        torch.equal(rows, other.index_select(0, places))
        for rows, places in zip(one.split(_BLOCK), index.split(_BLOCK), strict=True)
    )


@dataclass
class Tally:
    """What was compared at some row counts.

    wrong: mismatching values per row count, of all ranks. values: values compared by this rank, all
    counts together.
    """

    wrong: dict[int, int] = field(default_factory=dict)
    values: int = 0


class RowProbe:
    """One operation, its pool of rows, and reference outputs.

    operation: [M, K] -> [M, N], the same function at every M. pool: [P, K] rows of realistic
    magnitude. seed: of the draws.
    """

    def __init__(self, operation: Operation, pool: torch.Tensor, seed: int = 0) -> None:
        self.operation = operation
        self.pool = pool
        self._generator = torch.Generator(device=pool.device).manual_seed(seed)

    def reference(self, rows: int) -> torch.Tensor:
        """The bits [P, N] that each row of the pool has at `rows` rows, each at one place."""
        size = len(self.pool)
        parts = []
        for start in range(0, size, rows):
            index = (torch.arange(rows, device=self.pool.device) + start) % size
            parts.append(bits(self.operation(self.pool[index]))[: size - start])
        return torch.cat(parts)

    def compare(self, reference: torch.Tensor, counts: Iterable[int]) -> Tally:
        """Compare every row count of `counts` with `reference` ([P, N] bits).

        Each count is drawn until ``MIN_VALUES`` values were compared, half of the further draws
        with one row at nearly every place (for experts: all tokens routed alike).
        """
        tally, width = Tally(), reference[0].numel()
        pending: dict[int, torch.Tensor | int] = {}
        for rows in counts:
            draws = max(2, -(-MIN_VALUES // (rows * width))) if rows < len(self.pool) else 1
            total: torch.Tensor | int = 0
            for draw in range(draws):
                index = self._draw(rows, skewed=draw % 2 == 1)
                found = bits(self.operation(self.pool[index]))
                total = total + unlike(found, reference, index)
            tally.values += draws * rows * width
            pending[rows] = total
        totals = lockstep.total([int(total) for total in pending.values()])
        tally.wrong = dict(zip(pending, totals, strict=True))
        return tally

    def _draw(self, rows: int, *, skewed: bool) -> torch.Tensor:
        size, device = len(self.pool), self.pool.device
        index = torch.randint(size, (rows,), generator=self._generator, device=device)
        if skewed:
            place = torch.rand(rows, generator=self._generator, device=device)
            index = torch.where(place < 0.9, index[0], index)
        return index
