"""Cells of a benchmark: the product of flags, and single ones with counts of their own."""

import pytest

from corun.bench.cells import cells


def names(workloads, arrivals, count, singles):
    return [(cell.name, cell.count) for cell in cells(workloads, arrivals, count, 2, singles)]


def test_every_workload_under_every_arrivals():
    assert names("8/4,burstgpt", "all,closed:2", 5, []) == [
        ("8/4 all", 5),
        ("8/4 closed:2", 5),
        ("burstgpt all", 5),
        ("burstgpt closed:2", 5),
    ]
    assert names(None, "all", 300, []) == [("1024/128 all", 300)]


def test_single_cells_replace_the_default_and_join_what_was_asked_for():
    singles = ["8/4 closed:1 6", " burstgpt:a file.csv  poisson:2 7 "]
    assert names(None, "all", 300, singles) == [
        ("8/4 closed:1", 6),
        ("burstgpt:a file.csv poisson:2.0", 7),
    ]
    assert names("8/4", "all", 300, ["8/4 closed:1 6"]) == [("8/4 all", 300), ("8/4 closed:1", 6)]


@pytest.mark.parametrize(
    ("workloads", "singles", "words"),
    [
        ("8/4", ["8/4 all 6"], "'8/4 all' is asked for twice"),
        (None, ["8/4 closed:1 6", "8/4 closed:1 7"], "twice"),
        (None, ["8/4 all"], "WORKLOAD ARRIVALS COUNT"),
        (None, ["8/4 all none"], "must be 1 or more, not 'none'"),
        (None, ["8/4 all 0"], "1 or more"),
        (None, ["8/4 all ²"], "1 or more"),
        (None, ["8/4 all " + "9" * 5000], "1 or more"),
        (None, ["8/4 sometimes 3"], "unknown arrivals"),
        (None, ["eight all 3"], "unknown workload"),
    ],
)
def test_what_is_not_understood_is_one_error(workloads, singles, words):
    with pytest.raises(ValueError, match=words):
        cells(workloads, "all", 300, 2, singles)


def test_repeats_are_the_common_ones_or_a_cells_own():
    found = cells("8/4", "all", 300, 2, ["8/4 closed:1 6x1", "8/4 closed:2 6", "8/4 closed:3 6x3"])
    assert [(cell.count, cell.repeats) for cell in found] == [(300, 2), (6, 1), (6, 2), (6, 3)]
    for text in ("6x", "6x0", "x2", "6x2x2"):
        with pytest.raises(ValueError, match="must be 1 or more"):
            cells(None, "all", 300, 2, [f"8/4 all {text}"])
    with pytest.raises(ValueError, match="repeats must be 1 or more, not '0'"):
        cells("8/4", "all", 300, 0, [])
