"""Seam: an all-reduce with one summation order for every row, whatever its position.

Ring all-reduce, and two-stage custom all-reduce, start the sum of each chunk at a different rank,
so a row's bits depend on where in the tensor it lies (paper, Table I). For steps of at most
`most_rows` rows this gathers all ranks' tensors and adds them in rank order, in float32, rounding
once: data movement may be of any kind, since the sum is local and elementwise. Under ``isolate``
longer tensors are isolated prefills, whose rows always lie at the same place; they keep vLLM's own
all-reduce. Other policies hold steps of every length.
"""

from typing import Any

import torch

SEAMS = (
    ("vllm.distributed.parallel_state", "GroupCoordinator._all_reduce_out_place", ("input_",)),
    (
        "vllm.distributed.device_communicators.base_device_communicator",
        "DeviceCommunicatorBase.all_gather",
        ("input_", "dim"),
    ),
    ("vllm.distributed.parallel_state", "get_tp_group"),
)


def sum_in_rank_order(gathered: torch.Tensor) -> torch.Tensor:
    """The sum over dim 0 of `gathered` [ranks, ...], rank 0 first, in float32, rounded once."""
    total = gathered[0].float()
    for rank in range(1, gathered.shape[0]):
        total = total + gathered[rank].float()
    return total.to(gathered.dtype)


def install(group: Any, most_rows: int) -> bool:
    """Hold the all-reduce of a tensor-parallel `group` up to `most_rows` rows.

    False where it has one rank.
    """
    if group.world_size == 1:
        return False
    communicator = group.device_communicator
    all_reduce = communicator.all_reduce

    def fixed_order(input_: torch.Tensor) -> torch.Tensor:
        rows = input_.numel() // input_.shape[-1]
        if rows > most_rows:
            return all_reduce(input_)
        flat = input_.reshape(1, -1).contiguous()
        gathered = communicator.all_gather(flat, 0)
        return sum_in_rank_order(gathered).view(input_.shape)

    communicator.all_reduce = fixed_order
    return True
