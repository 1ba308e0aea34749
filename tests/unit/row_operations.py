"""Row operations [M, K] -> [M, N] with known shape classes, for tests of the probes.

They sum in an order of their own, one product at a time, so that torch's kernels, which have
classes themselves, take no part.
"""

import torch

WIDTH, COLUMNS = 32, 512


def weight(width=WIDTH, columns=COLUMNS, dtype=torch.float32, seed=1):
    """[K, N], of a trained layer's magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(width, columns, generator=generator) * 0.02).to(dtype)


def in_order(x, w, order):
    """[M, N] of x's dtype: the products of `order` summed one after the other, in float32."""
    rows, matrix = x.float(), w.float()
    total = torch.zeros(len(x), matrix.shape[1])
    for k in order:
        total = total + rows[:, k : k + 1] * matrix[k]
    return total.to(x.dtype)


def forward(x, w):
    """From the first product to the last."""
    return in_order(x, w, range(len(w)))


def backward(x, w):
    """From the last product to the first."""
    return in_order(x, w, reversed(range(len(w))))


def split(x, w, parts=2):
    """As a GEMM with a split-K reduction: `parts` sums, added at the end."""
    size = len(w) // parts
    sums = [in_order(x.float(), w, range(i * size, (i + 1) * size)) for i in range(parts)]
    return sum(sums[1:], sums[0]).to(x.dtype)
