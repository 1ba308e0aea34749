"""Trials with one long sequence: what breaks only far in is found, and nothing else is."""

import pytest
import torch

from corun.certify.compositions import PROPERTIES, Limits, Piece
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

    found, longest = long_claims("attention, long", made, limits, longest, 60)
    return {claim.name: claim for claim in found}, longest


def test_everything_holds_where_nothing_is_broken():
    found, longest = claims()
    assert longest == LIMITS.sequence_tokens
    assert set(found) == set(PROPERTIES)
    for claim in found.values():
        assert claim.holds and claim.values >= MIN_VALUES and claim.operation == "attention, long"


def later(piece):
    return piece.start >= FAR


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
            lambda step, p, rows: rows + 1 if later(p) and len(step) == 3 else rows,
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
    assert longest == LIMITS.sequence_tokens // 4
    assert all(claim.holds for claim in found.values())
    with pytest.raises(torch.OutOfMemoryError):
        claims(lambda step, piece, rows: broken(step, Piece(0, 0, 2000), rows))


def test_small_engines():
    one = Limits(step_tokens=16, requests=1, kv_tokens=100, sequence_tokens=64)
    found, longest = claims(limits=one, longest=100)
    assert longest == 64 and "decode_rows" not in found  # nobody is ever beside it
    few = Limits(step_tokens=4, requests=2, kv_tokens=100, sequence_tokens=1)
    assert claims(limits=few, longest=700)[1] == 1
