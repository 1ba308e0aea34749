"""Pools of input rows for probes: realistic ones, and ones that show the order of a sum.

A GEMM's sum in another order differs by about an ulp of float32, which a bf16 output hides in all
but one of ten thousand values or fewer: too rare for a test to rely on. Half of the rows of a
linear operation's pool are therefore bent so that some outputs nearly cancel. There the rounding
grid is hundreds of times finer, and another order shows in most values. Torch only.
"""

import torch

from corun.certify.probe import POOL, Operation

GROUPS = 8
CANCELLED = 512  # outputs that nearly cancel in each group of rows


def plain_pool(width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[P, width] normal rows, scaled row by row from 0.1 to 10, a few columns ten times larger.

    So do activations look: rows of unlike norms, and outlier channels.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(POOL, width, generator=generator)
    rows *= torch.logspace(-1, 1, POOL)[torch.randperm(POOL, generator=generator), None]
    outliers = torch.randperm(width, generator=generator)[: max(1, width // 128)]
    rows[:, outliers] *= 10
    return rows.to(dtype).to(device)


def linear_pool(operation: Operation, plain: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """[P, K] rows for an operation that is linear in its rows: half of `plain`, half cancelling.

    operation: [M, K] -> [M, N]; its matrix is read by pushing unit rows through it. plain: [P, K].
    """
    pool, (width, dtype, device) = plain.clone(), (plain.shape[1], plain.dtype, plain.device)
    if dtype == torch.float32:
        return pool  # its outputs hide nothing
    generator = torch.Generator(device=device).manual_seed(seed)
    identity = torch.eye(width, dtype=dtype, device=device)
    columns = operation(identity[:1]).shape[-1]
    count = min(CANCELLED, columns, width // 2)
    groups = [
        torch.randperm(columns, generator=generator, device=device)[:count] for _ in range(GROUPS)
    ]
    every = torch.cat(groups)  # all at once: an LM head's whole matrix takes long to read
    part = torch.cat([operation(block)[:, every] for block in identity.split(2048)])
    share = POOL // 2 // GROUPS
    for group, chosen in enumerate(part.split(count, dim=1)):
        matrix = chosen.double().T  # [count, width]
        rows = slice(2 * group * share, (2 * group + 1) * share)
        bent = pool[rows].double()
        gram = matrix @ matrix.T
        gram += torch.eye(count, dtype=torch.float64, device=device) * gram.diagonal().mean() * 1e-9
        bent -= torch.linalg.solve(gram, matrix @ bent.T).T @ matrix
        pool[rows] = bent.to(dtype)
    return pool
