"""Pools of rows: what they look like, and that bent rows show what plain ones hide."""

import torch
from row_operations import forward, split, weight

from corun.certify.pool import linear_pool, plain_pool
from corun.certify.probe import POOL, RowProbe
from corun.certify.search import ClassSearch, find_classes
from corun.rows import Rows

CPU = torch.device("cpu")


def test_plain_rows_look_like_activations():
    pool = plain_pool(256, torch.bfloat16, CPU)
    assert pool.shape == (POOL, 256)
    assert pool.dtype == torch.bfloat16
    norms = pool.float().norm(dim=1)
    assert norms.max() / norms.min() > 50
    columns = pool.float().abs().mean(0)
    assert columns.max() > 5 * columns.median()
    assert torch.equal(pool, plain_pool(256, torch.bfloat16, CPU))
    assert len(torch.unique(pool, dim=0)) == POOL


def test_half_of_a_linear_pool_nearly_cancels():
    w = weight(64, 96, torch.bfloat16)
    plain = plain_pool(64, torch.bfloat16, CPU)
    pool = linear_pool(lambda x: forward(x, w), plain)
    bent = (pool != plain).any(dim=1)
    assert bent.sum() == POOL // 2
    before = (plain[bent].double() @ w.double()).abs()
    after = (pool[bent].double() @ w.double()).abs()
    small = (after < before / 50).double().mean()
    assert small > 0.2  # 32 of 96 outputs
    assert not pool.isnan().any()


def test_float32_rows_need_no_bending():
    plain = plain_pool(64, torch.float32, CPU)
    assert torch.equal(linear_pool(lambda x: forward(x, weight(64)), plain), plain)


def test_a_linear_pool_shows_an_order_that_plain_rows_hide():
    """Two halves of a sum against one whole: bf16 outputs hide it in all but a few values."""
    w = weight(96, 192, torch.bfloat16)

    def operation(x):
        return (split if len(x) <= 4 else forward)(x, w)

    plain = plain_pool(96, torch.bfloat16, CPU)
    linear = linear_pool(operation, plain)
    rates = []
    for pool in (plain, linear):
        checked = RowProbe(operation, pool)
        tally = checked.compare(checked.reference(8), [2, 3, 4])
        rates.append(sum(tally.wrong.values()) / tally.values)
    hidden, shown = rates
    assert hidden < 5e-4
    assert shown > 20 * hidden
    assert shown > 0.001
    search = ClassSearch("linear", RowProbe(operation, linear), 8)
    (found,) = find_classes([search], 8, budget_s=60)
    assert found.classes == (Rows.span(5, 8), Rows.span(1, 4))
