"""Trials of split decode: they fit the engine, and each fault of the combined operation shows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.certify.compositions import PROPERTIES, Limits
from corun.certify.split_compositions import (
    PAST,
    decoded_trials,
    split_claims,
    split_lengths,
    split_prompts,
    split_trials,
)
from corun.engine.split_schedule import SPLIT_BEYOND

BEYOND, WIDTH = 64, 1024
LARGE = Limits(step_tokens=8192, requests=256, kv_tokens=1_000_000, sequence_tokens=40_960)
SMALL = Limits(step_tokens=1024, requests=8, kv_tokens=20_000, sequence_tokens=2048)


@st.composite
def limits(draw):
    step = draw(st.sampled_from([2, 64, 257, 2048, 2049, 2100, 8192]))
    return Limits(
        step_tokens=step,
        requests=draw(st.integers(1, min(step, 256))),
        kv_tokens=draw(st.sampled_from([4096, 16_000, 40_000, 1_000_000])),
        sequence_tokens=draw(st.sampled_from([256, 2113, 40_960])),
    )


@given(limits(), st.sampled_from([64, SPLIT_BEYOND]))
@settings(deadline=None, max_examples=60)
def test_every_step_can_run(held, beyond):
    sizes = split_lengths(held, beyond)
    if not sizes:
        return
    assert sum(sizes) <= held.kv_tokens // 2
    assert all(1 <= n <= min(held.step_tokens, held.sequence_tokens) for n in sizes)
    prompts = split_prompts(sizes, beyond)
    assert all(1 <= p <= n for p, n in zip(prompts, sizes, strict=True))
    names = set()
    for trial in split_trials(sizes, prompts, held, beyond):
        names.add(trial.name)
        split = 0
        for step in trial.steps:
            assert 1 <= len(step) <= held.requests
            assert sum(piece.tokens for piece in step) <= held.step_tokens
            assert len({piece.sequence for piece in step}) == len(step), "a sequence twice"
            assert all(0 <= p.start < p.stop <= sizes[p.sequence] for p in step)
            split += sum(p.stop > max(prompts[p.sequence], beyond) for p in step)
        assert split or trial.name == "decode_is_prefill", "nothing in it is split"
    assert names == set(PROPERTIES) - (set() if held.requests > 1 else {"mixed"})


def test_a_large_engine_tries_every_kind_of_row():
    sizes = split_lengths(LARGE, SPLIT_BEYOND)
    prompts = split_prompts(sizes, SPLIT_BEYOND)
    long = [i for i, n in enumerate(sizes) if n > SPLIT_BEYOND]
    assert len(long) == len(PAST)
    assert {prompts[i] < SPLIT_BEYOND for i in long} == {True, False}
    assert any(prompts[i] > SPLIT_BEYOND for i in long)
    found = list(split_trials(sizes, prompts, LARGE, SPLIT_BEYOND))
    alone = {(p.sequence, p.start) for t in found for s in t.steps if len(s) == 1 for p in s}
    for i in long:
        first = max(prompts[i], SPLIT_BEYOND)
        assert {(i, first - 1), (i, first), (i, sizes[i] - 1)} <= alone, "both sides of the edge"
    crowds = {len(t.steps[0]) for t in found if t.name == "decode_rows"}
    assert min(crowds) == 1 and max(crowds) > 30
    beside = [p for t in found if t.name == "mixed" for p in t.steps[0] if p.tokens > 1]
    assert {p.sequence in long for p in beside} == {True, False}
    assert {trial.name for trial in found[:5]} == set(PROPERTIES)


@given(limits(), st.sampled_from([64, SPLIT_BEYOND]))
@settings(deadline=None, max_examples=60)
def test_every_step_in_which_rows_are_only_decoded_can_run(held, beyond):
    sizes = split_lengths(held, beyond, decoded=True)
    assert bool(sizes) == bool(split_lengths(held, beyond))
    if not sizes:
        return
    assert sum(sizes) <= held.kv_tokens // 2
    prompts = split_prompts(sizes, beyond)
    names = set()
    for trial in decoded_trials(sizes, prompts, held, beyond):
        names.add(trial.name)
        assert trial.decode
        (step,) = trial.steps
        assert len(step) <= held.requests
        assert sum(piece.tokens for piece in step) <= held.step_tokens
        assert len({piece.sequence for piece in step}) == len(step), "a sequence twice"
        pieces = [p for p in step if p.tokens > 1]
        rows = [p for p in step if p.tokens == 1]
        assert all(p.stop == sizes[p.sequence] for p in rows), "other rows have no reference"
        assert any(p.stop > max(prompts[p.sequence], beyond) for p in rows), "nothing is split"
        assert all(p.stop <= max(prompts[p.sequence], beyond) for p in pieces), "recomputed"
        assert (trial.name == "decode_rows") == (not pieces)
        assert not pieces or all(p.start > 0 for p in rows), "a prompt of one token"
        assert trial.name != "mixed" or len(pieces) == 1
    beside = ["mixed", "batched_prefill"][: held.requests - 1]
    assert names == {"decode_rows", *beside}


def test_rows_that_are_only_decoded_stand_beside_short_and_long_prompts():
    sizes = split_lengths(LARGE, SPLIT_BEYOND, decoded=True)
    assert sizes[0] == LARGE.step_tokens
    prompts = split_prompts(sizes, SPLIT_BEYOND)
    found = list(decoded_trials(sizes, prompts, LARGE, SPLIT_BEYOND))
    for name in ("mixed", "batched_prefill"):
        beside = [p for t in found if t.name == name for p in t.steps[0] if p.tokens > 1]
        assert min(p.tokens for p in beside) == 2 and max(p.tokens for p in beside) == 1500
        assert {p.tokens > 512 for p in beside} == {True, False}
        assert {p.start > 0 for p in beside} == ({True, False} if name == "mixed" else {False})
    split = {p.sequence for t in found for p in t.steps[0] if p.tokens == 1}
    assert split >= set(range(len(PAST) + 1))


def test_an_engine_without_room_shows_nothing():
    short = Limits(step_tokens=2048, requests=8, kv_tokens=100_000, sequence_tokens=40_960)
    claims = split_claims("fake", lambda sizes, prompts: None, short, SPLIT_BEYOND, 60)
    assert {c.name for c in claims} == set(PROPERTIES)
    assert not any(c.holds for c in claims)
    assert "steps hold 2048 tokens" in claims[0].example


def combined(broken):
    """A fake of both kernels; broken: (step, piece, position, split) -> whether a row is wrong."""

    def made(sizes, prompts):
        generator = torch.Generator().manual_seed(5)
        right = [torch.randn(n, WIDTH, generator=generator) for n in sizes]

        def run(step, place):
            found = []
            for piece in step:
                rows = right[piece.sequence][piece.start : piece.stop].clone()
                for i, at in enumerate(range(piece.start, piece.stop)):
                    split = at >= max(prompts[piece.sequence], BEYOND)
                    if broken(step, piece, at, split):
                        rows[i] += 1
                found.append(rows)
            return found

        return run

    return made


FAULTS = [
    (lambda step, piece, at, split: False, set()),
    # A chunk's split rows are left to the other kernel.
    (lambda s, p, at, split: split and p.tokens == 1, {"decode_is_prefill"}),
    # A chunk that finds its beginning in the cache, whoever is beside it.
    (lambda s, p, at, split: split and p.tokens > 1 and p.start > 0, {"chunks"}),
    # How many split rows there are chooses the splits.
    (
        lambda s, p, at, split: split and p.tokens == 1 and len(s) > 3,
        {"decode_rows", "decode_is_prefill", "mixed"},
    ),
    # FlashAttention beside rows of length 0.
    (
        lambda s, p, at, split: not split and p.tokens == 1 and len(s) > 1,
        {"decode_rows", "decode_is_prefill"},
    ),
    # The rule takes the step for the prompt: rows beside a chunk are not split.
    (
        lambda s, p, at, split: split and p.tokens == 1 and any(q.tokens > 1 for q in s),
        {"mixed"},
    ),
    # Chunks of several requests are mixed up.
    (lambda s, p, at, split: split and sum(q.tokens > 1 for q in s) > 1, {"batched_prefill"}),
]


@pytest.mark.parametrize(("broken", "names"), FAULTS)
def test_each_fault_shows(broken, names):
    claims = split_claims("fake", combined(broken), SMALL, BEYOND, 60)
    assert {c.name for c in claims} == set(PROPERTIES)
    assert {c.name for c in claims if not c.holds} == names
    assert all(c.values >= 100_000 for c in claims if c.holds)


BESIDE = {"mixed", "batched_prefill"}
DECODED = {"decode_rows", *BESIDE}


@pytest.mark.parametrize(
    ("broken", "names"),
    [
        # A prompt's rows are never like decode rows.
        (lambda s, p, at, split: p.tokens == 1, set()),
        (lambda s, p, at, split: split and len(s) > 3, DECODED),
        (lambda s, p, at, split: not split and p.tokens == 1 and len(s) > 2, DECODED),
        (lambda s, p, at, split: split and any(q.tokens > 16 for q in s), BESIDE),
        (lambda s, p, at, split: not split and p.tokens > 1 and len(s) > 2, BESIDE),
        (lambda s, p, at, split: split and sum(q.tokens > 1 for q in s) > 1, {"batched_prefill"}),
    ],
)
def test_each_fault_of_rows_that_are_only_decoded_shows(broken, names):
    claims = split_claims("fake", combined(broken), SMALL, BEYOND, 60, decoded=True)
    assert {c.name for c in claims} == DECODED
    assert {c.name for c in claims if not c.holds} == names
    assert all(c.values >= 100_000 for c in claims if c.holds)
