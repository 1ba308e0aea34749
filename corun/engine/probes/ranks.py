"""Seam: the ranks of a tensor-parallel engine, in lockstep while they measure it."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from corun.certify.lockstep import OneRank, Ranks

SEAMS: tuple[tuple, ...] = (
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.distributed.parallel_state", "GroupCoordinator.all_reduce", ("input_",)),
)


PATIENCE = timedelta(minutes=5)
"""What a rank waits for the others: one that failed answers no more, and then all shall fail."""


class GroupRanks:
    """``Ranks`` of a vLLM group, through its process group on the CPU.

    RuntimeError where another rank does not answer.
    """

    several = True

    def __init__(self, group: Any) -> None:
        self._first, self._group = group.ranks[0], group.cpu_group

    def now(self) -> float:
        """The first rank's clock."""
        clock = torch.tensor([time.perf_counter()], dtype=torch.float64)
        self._wait(
            torch.distributed.broadcast(clock, self._first, group=self._group, async_op=True)
        )
        return clock.item()

    def total(self, counts: Sequence[int]) -> list[int]:
        """`counts` (int64), each added up over the ranks."""
        added = torch.tensor(counts, dtype=torch.int64)
        self._wait(torch.distributed.all_reduce(added, group=self._group, async_op=True))
        return added.tolist()

    @staticmethod
    def _wait(work: Any) -> None:
        try:
            work.wait(PATIENCE)
        except RuntimeError as e:
            raise RuntimeError(
                f"CoRun: another rank gave no answer ({e}); its own message is in the log"
            ) from e


def ranks_of(group: Any) -> Ranks:
    """The ranks of vLLM's tensor-parallel `group`."""
    return OneRank() if group.world_size == 1 else GroupRanks(group)
