"""Which rows are split: by the row's own facts, whatever step it is in."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corun.engine.split_rows import StepRows, split_tokens, unsplit

BEYOND = 8

requests = st.lists(
    st.tuples(st.integers(1, 14), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6
)


def rows_of(asked):
    """StepRows of (prompt, positions computed before, positions of this step)."""
    return StepRows.of([p for p, _, _ in asked], [(begin, begin + n) for _, begin, n in asked])


@given(requests)
def test_a_row_is_split_by_its_length_and_its_prompt_alone(asked):
    rows = rows_of(asked)
    found = split_tokens(rows, BEYOND)
    expected, token = [], 0
    for request, (prompt, begin, n) in enumerate(asked):
        for position in range(begin, begin + n):
            length = position + 1
            if length > max(prompt, BEYOND):
                expected.append((token, request, length))
            token += 1
    assert list(zip(*(a.tolist() for a in found[1:]), strict=True)) == expected
    assert rows.any_split(BEYOND) == bool(expected)
    assert all(array.dtype == np.int32 for array in found)


@given(requests)
def test_the_first_call_sees_every_length_but_those_of_single_split_rows(asked):
    left = split_tokens(rows_of(asked), BEYOND).left.tolist()
    for seen, (prompt, begin, n) in zip(left, asked, strict=True):
        end = begin + n
        assert seen == (0 if n == 1 and end > unsplit(prompt, BEYOND) else end)


@given(requests, st.data())
def test_a_cut_moves_no_row(asked, data):
    """The same positions in one step and in two: the same rows are split."""
    prompt, begin, n = asked[0]
    cut = data.draw(st.integers(0, n))

    def lengths(*parts):
        steps = [split_tokens(rows_of([part, *asked[1:]]), BEYOND) for part in parts]
        return [int(k) for s in steps for k, r in zip(s.lengths, s.requests, strict=True) if r == 0]

    whole = lengths((prompt, begin, n))
    parts = [(prompt, begin, cut), (prompt, begin + cut, n - cut)]
    assert lengths(*(part for part in parts if part[2])) == whole


def test_no_prompt_row_is_split():
    for prompt in range(1, 20):
        assert not StepRows.of([prompt], [(0, prompt)]).any_split(BEYOND)
        assert StepRows.of([prompt], [(prompt, prompt + 1)]).any_split(BEYOND) == (prompt >= BEYOND)
