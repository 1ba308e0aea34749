"""Trials with one long sequence: what breaks only far in is found, and nothing else is."""

import random
from dataclasses import replace

import pytest
import torch

from corun.certify.compositions import PROPERTIES, Limits, Piece
from corun.certify.full_steps import full_steps, fullest
from corun.certify.long_compositions import OTHERS, long_claims, long_sizes
from corun.certify.probe import MIN_VALUES

WIDTH = 64
LIMITS = Limits(step_tokens=512, requests=8, kv_tokens=10_000, sequence_tokens=3000)
FAR = 1400


def claims(broken=lambda step, piece, rows: rows, limits=LIMITS, longest=20_000):
    """The claims of an attention whose rows `broken` spoils; (by name, tokens)."""

    def made(sizes):
        generator = torch.Generator().manual_seed(5)
        right = [torch.randn(n, WIDTH, generator=generator) for n in sizes]

        def run(step, place):
            whole = len(step) == 1 and step[0].start == 0 and step[0].stop == sizes[0]
            assert whole or sum(p.tokens for p in step) <= limits.step_tokens
            assert len(step) <= limits.requests
            return [broken(step, p, right[p.sequence][p.start : p.stop]) for p in step]

        return run

    found, longest, _ = long_claims("attention, long", made, limits, longest, 60)
    return {claim.name: claim for claim in found}, longest


def test_everything_holds_where_nothing_is_broken():
    found, longest = claims()
    assert longest == LIMITS.sequence_tokens
    assert set(found) == set(PROPERTIES)
    for claim in found.values():
        assert claim.holds and claim.values >= MIN_VALUES and claim.operation == "attention, long"


def later(piece):
    return piece.start >= FAR


def decoding(step):
    """Rows of a step that only decodes."""
    return len(step) * all(p.tokens == 1 for p in step)


@pytest.mark.parametrize(
    ("broken", "names"),
    [
        (
            lambda step, p, rows: rows + 1 if later(p) and p.tokens > 1 else rows,
            {"chunks"},
        ),
        (
            lambda step, p, rows: rows + 1 if later(p) and p.tokens == 1 else rows,
            {"decode_is_prefill"},
        ),
        (
            lambda step, p, rows: rows + 1 if later(p) and decoding(step) == 3 else rows,
            {"decode_rows"},
        ),
        (
            lambda step, p, rows: (
                rows + 1 if later(p) and len(step) > 1 and step[-1].tokens == 65 else rows
            ),
            {"mixed", "batched_prefill"},
        ),
        # The short ones beside it count too.
        (
            lambda step, p, rows: (
                rows + 1 if p.stop == 9 and any(later(o) for o in step) and p.tokens == 1 else rows
            ),
            {"decode_rows"},
        ),
    ],
)
def test_what_breaks_far_in_is_found(broken, names):
    found, _ = claims(broken)
    assert {name for name, claim in found.items() if not claim.holds} == names


def long_beside(step, piece, tokens):
    """Whether another piece of so many tokens is in the step."""
    return any(other is not piece and other.tokens >= tokens for other in step)


@pytest.mark.parametrize(
    ("broken", "names"),
    [
        # As vLLM's CPU attention does: long prompts together, neither of them long for a request.
        (
            lambda step, p, rows: (
                rows + 1 if p.tokens >= 200 and long_beside(step, p, 200) else rows
            ),
            {"batched_prefill"},
        ),
        (
            lambda step, p, rows: rows + 1 if p.tokens == 1 and long_beside(step, p, 450) else rows,
            {"mixed", "batched_prefill"},
        ),
        (
            lambda step, p, rows: (
                rows + 1 if p.tokens >= 300 and sum(o.tokens == 1 for o in step) >= 5 else rows
            ),
            {"mixed", "batched_prefill"},
        ),
        # Only decode rows beside two chunks: one chunk may stay.
        (
            lambda step, p, rows: (
                rows + 1 if p.tokens == 1 and sum(o.tokens > 40 for o in step) > 1 else rows
            ),
            {"batched_prefill"},
        ),
    ],
)
def test_what_breaks_in_full_steps_is_found(broken, names):
    found, _ = claims(broken)
    assert {name for name, claim in found.items() if not claim.holds} == names


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize(("requests", "longest"), [(2, 300), (5, 3000), (64, 40)])
def test_full_steps_are_full_and_no_fuller(distinct, requests, longest):
    limits = Limits(step_tokens=512, requests=requests, kv_tokens=0, sequence_tokens=longest)
    sizes = long_sizes(limits, 20_000, distinct=distinct)
    most, seen = fullest(sizes, limits, distinct=distinct), {}
    for turn in range(60):
        for trial in full_steps(random.Random(turn), turn, sizes, limits, distinct=distinct):
            (step,) = trial.steps
            tokens = sum(p.tokens for p in step)
            assert 1 < len(step) <= requests and tokens <= most <= limits.step_tokens
            assert all(0 <= p.start < p.stop <= sizes[p.sequence] for p in step)
            assert not distinct or len({p.sequence for p in step}) == len(step)
            seen[trial.name] = max(seen.get(trial.name, 0), tokens)
    assert set(seen) == {"batched_prefill", "mixed"}
    if not distinct:
        assert min(seen.values()) >= min(most, longest + 1)
        assert seen["batched_prefill"] >= most - requests


def test_a_whole_model_has_two_prompts_that_fill_a_step():
    limits = replace(LIMITS, step_tokens=2048)
    sizes = long_sizes(limits, 20_000, distinct=True)
    assert sizes[:3] == [3000, 1024, 1024]
    assert fullest(sizes, limits, distinct=True) == 2048
    assert long_sizes(limits, 4000, distinct=True)[1:] == [*OTHERS]  # no room for them


def test_what_the_cache_cannot_hold_is_not_claimed():
    _, longest = claims(longest=2000)
    assert longest == 2000 - sum(OTHERS)
    assert long_sizes(LIMITS, 2000)[1:] == list(OTHERS)


def test_a_sequence_that_memory_does_not_hold_is_halved():
    def broken(step, piece, rows):
        if piece.tokens > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows

    found, longest = claims(broken)
    assert longest == 937  # a quarter of 3,750: a quarter longer is tried than asked for
    assert all(claim.holds for claim in found.values())
    with pytest.raises(torch.OutOfMemoryError):
        claims(lambda step, piece, rows: broken(step, Piece(0, 0, 2000), rows))


def test_small_engines():
    one = Limits(step_tokens=16, requests=1, kv_tokens=100, sequence_tokens=64)
    found, longest = claims(limits=one, longest=100)
    assert longest == 64 and "decode_rows" not in found  # nobody is ever beside it
    few = Limits(step_tokens=4, requests=2, kv_tokens=100, sequence_tokens=1)
    assert claims(limits=few, longest=700)[1] == 1
