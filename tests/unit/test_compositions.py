"""Trials: each fits the engine's limits, and together they try every property."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.certify.compositions import BESIDE, LENGTHS, PROPERTIES, Limits, lengths, trials


@st.composite
def limits(draw):
    step = draw(st.sampled_from([2, 16, 64, 257, 512, 2048, 8192]))
    return Limits(
        step_tokens=step,
        requests=draw(st.integers(1, min(step, 256))),
        kv_tokens=draw(st.sampled_from([4096, 8192, 100_000, 1_000_000])),
        sequence_tokens=draw(st.sampled_from([32, 256, 2048, 40_960])),
    )


@given(limits(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_every_step_can_run(held, thorough):
    sizes = lengths(held, thorough)
    assert sizes
    assert all(1 <= n <= min(held.step_tokens, held.sequence_tokens) for n in sizes)
    for trial in trials(sizes, held, thorough):
        assert trial.name in PROPERTIES
        assert trial.steps
        for step in trial.steps:
            assert 1 <= len(step) <= held.requests
            assert sum(piece.tokens for piece in step) <= held.step_tokens
            assert len({piece.sequence for piece in step}) == len(step), "a sequence twice"
            assert all(0 <= p.start < p.stop <= sizes[p.sequence] for p in step)


@given(limits(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_each_kind_tries_what_it_is_called(held, thorough):
    sizes = lengths(held, thorough)
    for trial in trials(sizes, held, thorough):
        for step in trial.steps:
            prompts = [p for p in step if p.tokens > 1]
            match trial.name:
                case "decode_rows":
                    assert not prompts and trial.decode
                    assert len(step) > 1 or held.requests == 1
                case "decode_is_prefill":
                    assert not prompts and not trial.decode
                case "batched_prefill":
                    assert all(p.stop == sizes[p.sequence] for p in step)
                    assert all(p.start == 0 or p.tokens > 1 for p in step)
                case "mixed":
                    assert len(prompts) == 1 and len(step) > 1 and trial.decode
        if trial.name == "chunks":
            cut = [step[0] for step in trial.steps]
            assert len(cut) > 1 and all(len(step) == 1 for step in trial.steps)
            assert all(p.tokens > 1 for p in cut), "one token is a decode row"
            edges = [(p.start, p.stop) for p in cut]
            assert edges[0][0] == 0 and edges[-1][1] == sizes[cut[0].sequence]
            assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("thorough", [False, True])
def test_a_large_engine_tries_everything(thorough):
    held = Limits(step_tokens=8192, requests=256, kv_tokens=1_000_000, sequence_tokens=40_960)
    sizes = lengths(held, thorough)
    assert sizes[0] == (3000 if thorough else 600) == max(sizes)
    assert set(LENGTHS) - {700} <= set(sizes)
    assert len(sizes) == 256
    found = list(trials(sizes, held, thorough))
    assert {trial.name for trial in found} == set(PROPERTIES)
    beside = {p.tokens for t in found if t.name == "mixed" for p in t.steps[0] if p.tokens > 1}
    assert beside == {n for n in BESIDE if n <= sizes[0]}
    together = {len(t.steps[0]) for t in found if t.name == "decode_rows"}
    assert {2, 3, 32, 33, 128, 200, 256} <= together
    for name in ("mixed", "batched_prefill"):
        starts = {p.start > 0 for t in found if t.name == name for p in t.steps[0] if p.tokens > 1}
        assert starts == {True, False}, f"{name}: from a prompt's start, and behind cached tokens"
    decode = {p.sequence for t in found if t.name == "decode_rows" for p in t.steps[0]}
    assert decode == set(range(256))
    # Kinds take turns, so that a time limit leaves none of them out.
    assert {trial.name for trial in found[:5]} == set(PROPERTIES)


def test_sequences_fit_the_cache_twice():
    held = Limits(step_tokens=2048, requests=64, kv_tokens=8192, sequence_tokens=4096)
    assert sum(lengths(held, thorough=True)) <= held.kv_tokens // 2
