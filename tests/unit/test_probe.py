"""RowProbe and find_classes: they must see every way in which a row's bits can depend on others."""

import itertools
import time

import pytest
import torch
from row_operations import WIDTH, backward, forward, split, weight

from corun.certify import lockstep, search
from corun.certify import probe as probe_module
from corun.certify.pool import linear_pool, plain_pool
from corun.certify.probe import MIN_VALUES, RowProbe, bits, mismatches
from corun.certify.search import ClassSearch, find_classes, first_counts, in_order
from corun.rows import Rows

CPU = torch.device("cpu")
W = weight()


def search_one(probe, largest, budget_s=60, **kwargs):
    """The claim about one operation."""
    return find_classes([ClassSearch("op", probe, largest)], largest, budget_s=budget_s, **kwargs)[
        0
    ]


def classes_of(operation, largest, dtype=torch.float32, width=WIDTH, **kwargs):
    return search_one(RowProbe(operation, plain_pool(width, dtype, CPU)), largest, **kwargs)


def covered(found):
    """Every row count that was tried."""
    return Rows.of([n for c in (*found.classes, found.variant) for n in c])


def test_an_invariant_operation_has_one_class_and_says_how_much_was_compared():
    found = classes_of(lambda x: forward(x, W), 40)
    assert found.classes == (Rows.span(1, 40),)
    assert not found.variant.ranges
    assert covered(found) == Rows.span(1, 40)
    assert found.values >= 40 * MIN_VALUES
    assert found.seconds > 0


@pytest.mark.parametrize("small", [backward, split])
@pytest.mark.parametrize("most", [1, 6])
def test_another_order_of_sums_at_few_rows_is_another_class(small, most):
    found = classes_of(lambda x: (small if len(x) <= most else forward)(x, W), 20)
    assert found.classes == (Rows.span(most + 1, 20), Rows.span(1, most))
    assert not found.variant.ranges


def test_classes_that_are_no_ranges():
    def operation(x):
        kernels = {1: backward, 2: backward, 8: backward, 3: split, 9: split}
        return kernels.get(len(x), forward)(x, W)

    found = classes_of(operation, 12)
    assert found.classes == (Rows.of([4, 5, 6, 7, 10, 11, 12]), Rows.of([3, 9]), Rows.of([1, 2, 8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_in_500_is_caught(dtype):
    wrong_at = {3, 9}
    seen = []

    def operation(x):
        out = forward(x, W.to(dtype))
        if len(x) in wrong_at:
            raw = bits(out)
            bad = (raw % 500 == 7).to(raw.dtype)
            seen.append(bad.float().mean().item())
            out = (raw + bad).view(dtype)
        return out

    found = classes_of(operation, 12, dtype)
    assert 0 < sum(seen) / len(seen) < 1 / 100  # it is as rare as it is meant to be
    assert found.classes[0] == Rows.of(set(range(1, 13)) - wrong_at)
    assert found.classes[1] == Rows.of(wrong_at)


def test_rows_that_depend_on_their_place():
    def operation(x):
        out = forward(x, W)
        if len(x) in (5, 7):
            out[-1] = backward(x[-1:], W)  # a tail loop, as in float32 GEMMs of CPUs
        return out

    found = classes_of(operation, 12)
    assert found.variant == Rows.of([5, 7])
    assert found.classes == (Rows.of([1, 2, 3, 4, 6, 8, 9, 10, 11, 12]),)


def test_where_the_largest_count_depends_on_place_the_others_still_get_classes():
    def operation(x):
        out = forward(x, W)
        if len(x) in (11, 12):
            out[-1] = backward(x[-1:], W)
        return out

    found = classes_of(operation, 12)
    assert found.variant == Rows.of([11, 12])
    assert found.classes == (Rows.span(1, 10),)


def test_rows_that_depend_on_their_neighbors_values():
    def operation(x):
        scale = x.abs().max()  # quantized dynamically, one scale for the whole batch
        return forward((x / scale * 127).round(), W) * scale

    found = classes_of(operation, 10)
    assert found.variant == Rows.span(2, 10)
    assert found.classes == (Rows.span(1, 1),)


def test_a_neighbor_that_is_the_same_row_matters_too():
    """Half of the draws put one row at nearly every place, as when all tokens choose one expert."""

    def operation(x):
        most = torch.unique(x, dim=0, return_counts=True)[1].max()
        return (backward if most > len(x) / 2 and len(x) > 8 else forward)(x, W)

    assert classes_of(operation, 16).variant == Rows.span(9, 16)


def test_an_operation_that_always_differs_takes_no_longer_than_one_that_never_does(monkeypatch):
    """It is settled count by count: comparing all with each other would take hours."""
    monkeypatch.setattr(probe_module, "MIN_VALUES", 100)
    calls = itertools.count()

    def operation(x):
        next(calls)
        return x + x.sum()

    pool = plain_pool(WIDTH, torch.float32, CPU)
    found = search_one(RowProbe(operation, pool), 150)
    assert found.variant == Rows.span(2, 150)
    assert next(calls) < 150 * 40


def test_classes_beyond_the_limit_are_not_allowed(monkeypatch):
    monkeypatch.setattr(probe_module, "MIN_VALUES", 5_000)
    found = classes_of(lambda x: forward(x, W) + len(x), search.MAX_CLASSES + 4)
    assert found.classes == tuple(Rows.span(n, n) for n in range(12, 4, -1))
    assert found.variant == Rows.span(1, 4)


def test_counts_that_were_not_reached_are_in_no_class(monkeypatch):
    monkeypatch.setattr(probe_module, "MIN_VALUES", 1_000)
    tried = set()

    def operation(x):
        tried.add(len(x))
        return forward(x, W)

    pool = plain_pool(WIDTH, torch.float32, CPU)
    largest, dense = 1000, 70
    found = search_one(RowProbe(operation, pool), largest, 0, dense=dense)
    assert covered(found) == Rows.of(tried)
    assert {*range(1, dense + 1), largest} <= tried
    assert len(covered(found)) < largest / 4
    assert found.classes == (covered(found),)
    assert 999 not in covered(found)


def test_every_count_has_its_turn():
    order = in_order(300, dense=16)
    assert sorted(order) == list(range(1, 301))
    first = first_counts(300, dense=16)
    assert order[: len(first)] == first and {127, 128, 129, 255, 256, 257} <= set(first)
    assert order[:17] == [300, *range(1, 17)]
    assert order.index(255) < order.index(64 * 3) < order.index(299)


@pytest.mark.parametrize("rows", [1, 7, 255, 256, 300])
def test_a_reference_holds_each_row_of_the_pool_once(rows):
    pool = plain_pool(WIDTH, torch.float32, CPU)
    assert torch.equal(RowProbe(lambda x: x, pool).reference(rows), bits(pool))


def test_compare_counts_values():
    pool = plain_pool(WIDTH, torch.float32, CPU)
    checked = RowProbe(lambda x: x * 2, pool)
    tally = checked.compare(bits(pool * 2), [1, 100, 300])
    assert tally.wrong == {1: 0, 100: 0, 300: 0}
    at_one, at_hundred = -(-MIN_VALUES // WIDTH), -(-MIN_VALUES // (100 * WIDTH))
    assert tally.values == WIDTH * (at_one + 100 * at_hundred + 300)


def test_bits_tell_zeros_and_kinds_of_nan_apart():
    a = torch.tensor([0.0, float("nan"), 1.0])
    b = torch.tensor([-0.0, float("nan"), 1.0])
    assert int(mismatches(bits(a), bits(b))) == 1
    assert mismatches(bits(a), bits(a)) == 0


# What torch's own kernels do on this CPU. The oracle is a direct comparison of raw bits that uses
# nothing of the probe; where it finds no difference there is nothing to be found here.


def linear(width, columns, dtype):
    w = weight(columns, width, dtype)
    return lambda x: torch.nn.functional.linear(x, w)


def directly_variant(operation, x, counts):
    """Counts at which one row, repeated at every place, does not give the same bits everywhere."""
    found = set()
    for n in counts:
        for row in x:
            out = bits(operation(row.repeat(n, 1)))
            if not torch.equal(out, out[:1].expand_as(out)):
                found.add(n)
                break
    return found


def directly_apart(operation, x, one, other):
    """Whether the first row has other bits in a batch of `one` than of `other` equal rows."""
    return any(
        not torch.equal(
            bits(operation(row.repeat(one, 1)))[0], bits(operation(row.repeat(other, 1)))[0]
        )
        for row in x
    )


@pytest.mark.parametrize(("width", "columns"), [(96, 3), (576, 576)])
def test_float32_linear_that_depends_on_place_on_this_cpu(width, columns, monkeypatch):
    operation = linear(width, columns, torch.float32)
    pool = plain_pool(width, torch.float32, CPU)
    direct = directly_variant(operation, pool[:8], range(2, 13))
    if not direct:
        pytest.skip(f"float32 {width} x {columns} is position-invariant on this CPU")
    monkeypatch.setattr(probe_module, "MIN_VALUES", 5_000)
    found = search_one(RowProbe(operation, pool), 12)
    assert direct <= set(found.variant)


@pytest.mark.parametrize(
    ("width", "columns", "dtype", "one", "other"),
    [
        (576, 576, torch.float32, 1, 2),
        (576, 576, torch.float32, 3, 40),
        (576, 576, torch.bfloat16, 1, 5),
        (576, 576, torch.bfloat16, 32, 33),
        (1536, 576, torch.bfloat16, 1, 2),
        (1536, 576, torch.bfloat16, 32, 33),
        (64, 64, torch.bfloat16, 1, 2),
    ],
)
def test_linear_with_classes_on_this_cpu(width, columns, dtype, one, other):
    operation = linear(width, columns, dtype)
    pool = linear_pool(operation, plain_pool(width, dtype, CPU))
    if not directly_apart(operation, pool, one, other):
        pytest.skip(f"{dtype} {width} x {columns} has {one} and {other} rows in one class here")
    checked = RowProbe(operation, pool)
    tally = checked.compare(checked.reference(other), [one, other])
    assert tally.wrong[one] > 0
    found = search_one(checked, 40, dense=40)
    assert not any(one in c and other in c for c in found.classes)


def test_the_search_keeps_to_its_time():
    slow = 0.001

    def operation(x):
        time.sleep(slow)
        return x

    pool = plain_pool(4096, torch.float32, CPU)
    started = time.perf_counter()
    found = search_one(RowProbe(operation, pool), 5000, 0.3, dense=8)
    assert time.perf_counter() - started < 10
    assert 8 < len(covered(found)) < 5000


@pytest.mark.parametrize("width", [3, 4, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_is_unlike_at_any_width(width, dtype):
    """Rows are compared as words of 64 bits where they are made of whole ones."""
    reference = bits(plain_pool(width, dtype, CPU))
    index = torch.randint(len(reference), (300,))
    found = reference[index]
    assert probe_module.unlike(found, reference, index) == 0
    for place in (0, 127, 128, 299):
        wrong = found.clone()
        wrong[place, -1] ^= 1
        assert int(probe_module.unlike(wrong, reference, index)) == 1


def test_operations_are_searched_at_the_same_counts(monkeypatch):
    """Counts at which one of them was not tried would be of no use to a plan."""
    monkeypatch.setattr(probe_module, "MIN_VALUES", 100)
    clock = itertools.count()
    monkeypatch.setattr(lockstep, "now", lambda: next(clock))
    pool = plain_pool(WIDTH, torch.float32, CPU)
    operations = [lambda x: x * 2, lambda x: x + (len(x) < 40)]
    searches = [ClassSearch(str(i), RowProbe(f, pool), 3000) for i, f in enumerate(operations)]
    one, other = find_classes(searches, 3000, budget_s=50)
    assert covered(one) == covered(other)
    assert set(first_counts(3000, search.DENSE)) < set(covered(one)) < set(range(1, 3001))
    assert [c.largest for c in one.classes] == [3000]
    assert [c.largest for c in other.classes] == [3000, 39]


def test_what_is_to_be_tried_again_counts_as_time_taken(monkeypatch):
    monkeypatch.setattr(probe_module, "MIN_VALUES", 100)
    clock = itertools.count()
    monkeypatch.setattr(lockstep, "now", lambda: next(clock))
    pool = plain_pool(WIDTH, torch.float32, CPU)
    made = ClassSearch("op", RowProbe(lambda x: x + (len(x) < 100), pool), 100)
    before = made.seconds
    made.compare([100])
    assert made.seconds == before + 1
    made.compare([50, 50])  # half of all rows
    assert made.seconds == (before + 2) * 1.5
