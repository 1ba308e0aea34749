"""Which engines ``corun bench run`` starts, which of them at once, and the order of their runs."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from corun.bench.cells import Cell
from corun.bench.turns import rotated


@dataclass(frozen=True, slots=True)
class Process:
    """One engine start: a mode, and the repeats that it makes.

    rows: its max_num_seqs where a benchmark has several, else None.
    """

    mode: str
    repeats: tuple[int, ...]
    rows: int | None = None

    @property
    def name(self) -> str:
        """What tells its engine from the others of a benchmark."""
        return self.mode if self.rows is None else f"{self.mode} with {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Slot:
    """One run of a process."""

    process: Process
    cell: Cell
    repeat: int


def add_together(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--together [N]``, 0 where no number is given. what: what it does, in words."""
    parser.add_argument(
        "--together",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help=f"{what}. All must fit: on a GPU each takes its weights and --engine-arg "
        "kv_cache_memory_bytes=BYTES, which must be given",
    )


def group_size(together: int | None, engines: int) -> int:
    """How many of `engines` start at once. together: as ``--together`` gives it, 0 for all.

    ValueError where it is negative.
    """
    if together is None:
        return 1
    if together < 0:
        raise ValueError(f"--together takes a number of engines, not {together}")
    return min(together or engines, engines)


def groups(
    modes: Sequence[str],
    repeats: int,
    *,
    one_engine: bool,
    together: int | None,
    sweep: Sequence[int | None] = (None,),
) -> list[list[Process]]:
    """Engine starts in order, of every mode with every value of `sweep`; one group starts at once.

    together: see ``group_size``. Where it is None, and not `one_engine`, each repeat starts engines
    of its own, and begins with another mode.
    """
    engines = list(product(modes, sweep))
    size = group_size(together, len(engines))
    if together is None and not one_engine:
        return [
            [Process(mode, (repeat,), rows)]
            for repeat in range(repeats)
            for mode, rows in rotated(engines, repeat)
        ]
    every = [Process(mode, tuple(range(repeats)), rows) for mode, rows in engines]
    return [every[start : start + size] for start in range(0, len(every), size)]


def slots(group: Sequence[Process], cells: Sequence[Cell]) -> Iterator[Slot]:
    """The runs of a group in order: cell by cell and repeat by repeat, engines side by side.

    Each of these rounds begins with another engine.
    """
    rounds = [
        (cell, repeat) for cell in cells for repeat in group[0].repeats if repeat < cell.repeats
    ]
    for number, (cell, repeat) in enumerate(rounds):
        for process in rotated(group, number):
            yield Slot(process, cell, repeat)
