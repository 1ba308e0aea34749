"""The total order of a row's entries: value descending, entry ascending. No ties, anywhere."""

import torch


def highest(
    values: torch.Tensor,
    names: torch.Tensor,
    count: int,
    outside: torch.Tensor | None = None,
) -> torch.Tensor:
    """The names of the `count` highest values of each row: [N, count] int64, in order.

    values: [N, C] fp32, no NaN. names: [N, C] int64, all different within a row, below 2**32: lower
    ones first on equal values. outside: [N, C] bool, columns that come after all others. The keys
    (value, then name) are all different, so the answer does not hang on how a top-k breaks ties.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    if outside is not None:
        bits = bits.masked_fill(outside, -(1 << 31))
    keys = (bits.to(torch.int64) << 32) | (0xFFFFFFFF - names)
    return 0xFFFFFFFF - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
