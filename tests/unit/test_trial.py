"""TrialBench over a fake attention: each property breaks where it is broken, and nowhere else."""

import re

import pytest
import torch

from corun.certify import lockstep
from corun.certify.compositions import PROPERTIES, Limits, lengths, trials
from corun.certify.probe import MIN_VALUES
from corun.certify.trial import TrialBench

WIDTH = 128
LIMITS = Limits(step_tokens=200, requests=32, kv_tokens=10_000, sequence_tokens=200)
SIZES = lengths(LIMITS, thorough=False)


class Attention:
    """Sums over what came before, the same in any step; `broken` spoils rows.

    broken: (step, piece, rows) -> rows. spoils: (step, piece) -> whether it leaves a wrong cache
    behind. Rows that look at what is not in the cache are NaN.
    """

    def __init__(
        self,
        broken=lambda step, piece, rows: rows,
        width=WIDTH,
        spoils=lambda step, piece: False,
    ):
        generator = torch.Generator().manual_seed(5)
        self.right = [torch.randn(n, width, generator=generator).cumsum(0) for n in SIZES]
        self.written, self.spoiled = {}, set()
        self.broken, self.spoils = broken, spoils

    def run(self, step, place):
        found = []
        for piece in step:
            written = self.written.setdefault((piece.sequence, place), set())
            written |= set(range(piece.start, piece.stop))
            rows = self.right[piece.sequence][piece.start : piece.stop]
            if piece.start == 0 and piece.stop == SIZES[piece.sequence] and len(step) == 1:
                self.spoiled.discard((piece.sequence, place))  # all of its cache is new
            if len(written) < piece.stop:
                rows = torch.full_like(rows, torch.nan)
            if piece.start > 0 and (piece.sequence, place) in self.spoiled:
                rows = rows + 1
            found.append(self.broken(step, piece, rows))
            if self.spoils(step, piece):
                self.spoiled.add((piece.sequence, place))
        return found


def is_decode(piece):
    return piece.tokens == 1 and piece.start > 0


def prompts(step):
    return [piece for piece in step if not is_decode(piece)]


def two_decode_rows(step, piece, rows):
    """Another kernel for exactly two requests."""
    return rows + 1 if len(step) == 2 and not prompts(step) else rows


def decode_kernel(step, piece, rows):
    """Decode has a kernel of its own, which sums in another order, whoever is beside it."""
    return rows + 1 if is_decode(piece) else rows


def continued_prompt(step, piece, rows):
    """A chunk that finds its beginning in the cache."""
    return rows + 1 if piece.start > 0 and piece.tokens > 1 else rows


def continued_alone(step, piece, rows):
    """The same, in a kernel that is taken for one request only."""
    return continued_prompt(step, piece, rows) if len(step) == 1 else rows


def several_prompts(step, piece, rows):
    return rows + 1 if len(prompts(step)) > 1 else rows


def long_neighbor(step, piece, rows):
    """FlashAttention 3 with head_dim 64: beside 10 tokens or more, decode takes another tile."""
    longest = max(other.tokens for other in step)
    return rows + 1 if is_decode(piece) and longest >= 10 else rows


def crowd(step, piece, rows):
    """Splits chosen from the batch: a decode row depends on how many there are."""
    return rows + 1 if is_decode(piece) and len(step) > 4 else rows


def claims(attention, budget_s=60):
    bench = TrialBench("fake", attention.run, SIZES)
    return {c.name: c for c in bench.work(trials(SIZES, LIMITS, thorough=False), budget_s)}


def test_everything_holds_where_nothing_is_broken():
    found = claims(Attention())
    assert set(found) == set(PROPERTIES)
    for claim in found.values():
        assert claim.holds and claim.example is None
        assert claim.values >= MIN_VALUES
        assert claim.operation == "fake"


@pytest.mark.parametrize(
    ("broken", "properties"),
    [
        (two_decode_rows, {"decode_rows"}),
        (decode_kernel, {"decode_is_prefill"}),
        (continued_alone, {"chunks", "batched_prefill", "mixed"}),
        (continued_prompt, {"chunks"}),  # company changes nothing
        (several_prompts, {"batched_prefill"}),
        (long_neighbor, {"mixed"}),
        (crowd, {"decode_rows", "decode_is_prefill", "mixed"}),
    ],
)
def test_what_is_broken_is_what_does_not_hold(broken, properties):
    found = claims(Attention(broken))
    assert {name for name, claim in found.items() if not claim.holds} == properties
    for name in properties:
        assert "values of" in found[name].example


def test_a_chunk_that_leaves_a_wrong_cache_behind():
    """Its own rows are right; the next chunk's are not, and nobody else's cache is touched."""

    def spoils(step, piece):
        cut = piece.start == 0 and piece.stop < SIZES[piece.sequence]
        return len(step) == 1 and piece.tokens > 1 and cut

    found = claims(Attention(spoils=spoils))
    assert {name for name, claim in found.items() if not claim.holds} == {"chunks"}


def test_a_decode_kernel_of_its_own_does_not_speak_against_other_properties():
    """It leaves other KV behind, which a later row would find."""

    def spoils(step, piece):
        return is_decode(piece) and piece.stop < SIZES[piece.sequence]

    attention = Attention(decode_kernel, spoils=spoils)
    found = claims(attention)
    assert {name for name, claim in found.items() if not claim.holds} == {"decode_is_prefill"}
    assert found["decode_is_prefill"].trials == 1  # refuted by the first
    assert not attention.spoiled


def test_one_wrong_bit_of_one_row_is_enough():
    spoiled = []

    def broken(step, piece, rows):
        last = is_decode(piece) and piece.stop == SIZES[piece.sequence]
        if len(step) == 9 and last and not prompts(step) and not spoiled:
            spoiled.append(piece)
            rows = rows.clone()
            rows.view(torch.int32)[0, 77] ^= 1
        return rows

    found = claims(Attention(broken))
    claim = found["decode_rows"]
    assert not claim.holds
    at = spoiled[0].start
    assert claim.example.startswith(f"1 values of the row decoded at position {at}, beside 8 ")


def test_the_example_names_prompt_and_company():
    claim = claims(Attention(several_prompts))["batched_prefill"]
    words = r"values of tokens 0 to (\d+) of a prompt of (\d+), beside \d+ others, the longest of"
    last, size = re.search(words, claim.example).groups()
    assert int(size) == int(last) + 1
    assert int(size) in SIZES


def test_too_few_values_show_nothing():
    for name, claim in claims(Attention(width=1)).items():
        assert not claim.holds, name
        assert claim.example == f"only {claim.values} values could be compared, not {MIN_VALUES}"


def test_a_difference_is_told_even_where_values_are_too_few():
    example = claims(Attention(several_prompts, width=1))["batched_prefill"].example
    assert "beside" in example


def test_what_was_not_tried_is_not_claimed():
    bench = TrialBench("fake", Attention().run, SIZES)
    chosen = [t for t in trials(SIZES, LIMITS, thorough=False) if t.name in ("mixed", "chunks")]
    assert [claim.name for claim in bench.work(chosen, 60)] == ["chunks", "mixed"]


def test_without_time_it_goes_on_until_enough_was_compared():
    all_of_it, no_time = claims(Attention()), claims(Attention(), budget_s=0)
    assert set(no_time) == set(PROPERTIES)
    for name, claim in no_time.items():
        assert claim.holds and claim.values >= MIN_VALUES
        assert claim.trials <= all_of_it[name].trials
    assert sum(c.trials for c in no_time.values()) < sum(c.trials for c in all_of_it.values())


def test_as_many_trials_as_asked_for_whatever_the_time():
    bench = TrialBench("fake", Attention().run, SIZES)
    found = bench.work(trials(SIZES, LIMITS, thorough=False), 0, least=30)
    assert {claim.name for claim in found} == set(PROPERTIES)
    assert all(claim.trials >= 30 and claim.values >= MIN_VALUES for claim in found)
    assert max(claim.trials for claim in found) < 60


def test_without_time_no_property_is_tried_more_than_it_needs():
    """One that has many values in each trial does not take the time of the others."""
    for claim in claims(Attention(), budget_s=0).values():
        if claim.trials > 1:
            assert claim.values * (claim.trials - 1) / claim.trials < 2 * MIN_VALUES


def test_a_clock_that_stands_still_changes_nothing(monkeypatch):
    monkeypatch.setattr(lockstep, "now", lambda: 0.0)
    one, other = claims(Attention(), budget_s=1), claims(Attention())
    assert one == other


def test_nothing_is_prefilled_anew_where_keys_and_values_are_given():
    """There a kernel that differs leaves no other KV behind."""
    counts = {}
    for given in (False, True):
        attention, runs = Attention(decode_kernel), []

        def run(step, place, attention=attention, runs=runs):
            runs.append(step)
            return attention.run(step, place)

        bench = TrialBench("fake", run, SIZES, given_kv=given)
        only = [t for t in trials(SIZES, LIMITS, thorough=False) if t.name == "decode_is_prefill"]
        assert not bench.work(only, 60)[0].holds
        counts[given] = len(runs)
    assert counts[True] == counts[False] - 1  # the one sequence that the first trial touched
