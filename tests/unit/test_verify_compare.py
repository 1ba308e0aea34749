"""Records and their bitwise comparison, by properties."""

import json
import math
import struct
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corun.verify import compare as c
from corun.verify.compare import Comparison, compare, total
from corun.verify.record import Entry, Record, Sample, record_of, step_of

# A loaded machine is slow, not wrong.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
BITS = st.integers(0, 2**32 - 1)
ENTRIES = st.builds(Entry, st.integers(0, 99), st.none() | st.integers(1, 30), BITS)
STEPS = st.lists(ENTRIES, min_size=1, max_size=4).map(tuple)


@st.composite
def samples(draw, index: int) -> Sample:
    tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
    steps = st.lists(STEPS, min_size=len(tokens), max_size=len(tokens)).map(tuple)
    return Sample(
        index,
        tuple(tokens),
        draw(st.none() | steps),
        draw(st.sampled_from(["stop", "length"])),
        draw(st.none() | st.integers(0, 9) | st.just("x")),
    )


@st.composite
def records(draw) -> Record:
    prompt = draw(st.none() | st.lists(STEPS, max_size=4).map(lambda s: (None, *s)))
    n = draw(st.integers(1, 2))
    return Record(
        "r",
        draw(st.none() | st.integers(0, 9)),
        5,
        prompt,
        tuple(draw(samples(i)) for i in range(n)),
    )


def values(record: Record) -> tuple[int, int]:
    """Token ids and logprobs in a record, counted another way than the comparison does."""
    tokens = sum(len(s.token_ids) for s in record.samples)
    steps = [step for s in record.samples for step in s.logprobs or ()]
    steps += [step for step in record.prompt_logprobs or () if step]
    return tokens, sum(map(len, steps))


@PATIENT
@given(records())
def test_a_record_equals_itself_and_everything_is_counted(record):
    result = compare(record, record)
    tokens, logprobs = values(record)
    assert result == Comparison(1, 1, 1, tokens, tokens, logprobs, logprobs, 0, None, None)
    assert result.identical


def change(data, record: Record) -> tuple[Record, str]:
    """One single change somewhere in `record`; also the kind of difference it makes."""
    at = data.draw(st.integers(0, len(record.samples) - 1))
    sample = record.samples[at]
    places = ["token", "finish", "seed"]
    places += ["logprob"] * 3 * (sample.logprobs is not None)
    places += (
        ["prompt"] * 2 * (record.prompt_logprobs is not None and len(record.prompt_logprobs) > 1)
    )
    place = data.draw(st.sampled_from(places))
    if place == "seed":
        return replace(record, seed=(record.seed or 0) + 1), c.SEED
    if place == "prompt":
        steps = list(record.prompt_logprobs)
        i = data.draw(st.integers(1, len(steps) - 1))
        steps[i], _ = change_step(data, steps[i])
        return replace(record, prompt_logprobs=tuple(steps)), c.PROMPT_LOGPROB
    if place == "finish":
        changed, kind = replace(sample, finish_reason="abort"), c.FINISH
    elif place == "token":
        i = data.draw(st.integers(0, len(sample.token_ids) - 1))
        ids = list(sample.token_ids)
        ids[i] += 1
        changed, kind = replace(sample, token_ids=tuple(ids)), c.TOKEN
    else:
        i = data.draw(st.integers(0, len(sample.logprobs) - 1))
        steps = list(sample.logprobs)
        steps[i], entry = change_step(data, steps[i])
        kind = c.LOGPROB if entry == 0 else c.TOP_LOGPROB
        changed = replace(sample, logprobs=tuple(steps))
    return replace(
        record, samples=tuple(changed if i == at else s for i, s in enumerate(record.samples))
    ), kind


def change_step(data, step):
    i = data.draw(st.integers(0, len(step) - 1))
    entry = step[i]
    field = data.draw(st.sampled_from(["bits", "rank", "token_id"]))
    if field == "bits":
        new = entry._replace(bits=entry.bits ^ (1 << data.draw(st.integers(0, 31))))
    elif field == "rank":
        new = entry._replace(rank=(entry.rank or 0) + 1)
    else:
        new = entry._replace(token_id=entry.token_id + 1)
    return (*step[:i], new, *step[i + 1 :]), i


@PATIENT
@given(st.data(), records())
def test_any_single_change_is_found_and_named(data, record):
    changed, kind = change(data, record)
    for a, b in ((record, changed), (changed, record)):
        result = compare(a, b)
        assert not result.identical
        assert result.first.kind == kind
        assert (result.first_token is not None) == (kind == c.TOKEN)
        tokens, logprobs = values(record)
        assert (result.token_values, result.logprob_values) == (tokens, logprobs)
        assert result.token_values_equal == tokens - (kind == c.TOKEN)
        lost = kind in (c.LOGPROB, c.TOP_LOGPROB, c.PROMPT_LOGPROB)
        assert result.logprob_values_equal == logprobs - lost
        assert result.tokens_equal == (kind != c.TOKEN)
        assert result.logprobs_equal == (not lost)


@PATIENT
@given(st.data(), records())
def test_a_shorter_output_counts_what_it_lacks(data, record):
    sample = record.samples[0]
    keep = data.draw(st.integers(0, len(sample.token_ids) - 1))
    short = replace(
        sample,
        token_ids=sample.token_ids[:keep],
        logprobs=None if sample.logprobs is None else sample.logprobs[:keep],
    )
    cut = replace(record, samples=(short, *record.samples[1:]))
    for a, b in ((record, cut), (cut, record)):
        result = compare(a, b)
        assert (result.token_values, result.logprob_values) == values(record)
        assert (result.token_values_equal, result.logprob_values_equal) == values(cut)
        assert result.tokens_equal == 0
        assert result.first_token.kind == c.LENGTH
        assert result.first_token.step == keep
        assert result.first_token.tokens_before == sample.token_ids[:keep]


@PATIENT
@given(records())
def test_missing_logprobs_are_a_difference(record):
    bare = replace(
        record,
        prompt_logprobs=None,
        samples=tuple(replace(s, logprobs=None) for s in record.samples),
    )
    lost = values(record)[1]
    for a, b in ((record, bare), (bare, record)):
        result = compare(a, b)
        assert (result.logprob_values, result.logprob_values_equal) == (lost, 0)
        had = record.prompt_logprobs is not None or any(s.logprobs for s in record.samples)
        assert result.identical == (not had)
        assert result.logprobs_equal == int(not had)
        if had:
            assert result.first.kind == c.MISSING


@PATIENT
@given(records())
def test_a_missing_completion_is_a_difference(record):
    fewer = replace(record, samples=record.samples[:-1])
    result = compare(record, fewer)
    assert result.tokens_equal == 0
    assert result.first.kind == c.COMPLETIONS
    assert result.token_values == values(record)[0]


@PATIENT
@given(st.lists(records(), max_size=4), st.lists(records(), max_size=4))
def test_comparisons_add_up(ours, theirs):
    parts = [compare(a, b) for a, b in zip(ours, theirs, strict=False)]
    whole = total(parts)
    for name in ("requests", "token_values", "logprob_values_equal", "differing"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert whole.identical == all(part.identical for part in parts)
    steps = [part.first.step for part in parts if part.first and part.first.kind == c.TOKEN]
    if whole.first is not None and whole.first.kind == c.TOKEN:
        assert whole.first.step == min(steps)


def test_records_of_two_requests_are_not_compared():
    record = Record("a", 1, 5, None, ())
    with pytest.raises(ValueError, match="two requests"):
        compare(record, replace(record, name="b"))
    with pytest.raises(ValueError, match="two requests"):
        compare(record, replace(record, prompt_tokens=6))


def test_a_divergence_is_json_also_where_a_logprob_is_infinite():
    def one(value: float) -> Record:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return Record("a", 1, 5, None, (Sample(0, (7,), ((Entry(7, 1, bits),),), "stop", None),))

    first = compare(one(-math.inf), one(-1.5)).first
    text = json.dumps(first.to_mapping(), allow_nan=False)
    assert '"-inf"' in text
    assert '"0xbfc00000"' in text


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def output(**completion):
    given = {
        "index": 0,
        "token_ids": [4, 5],
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    return SimpleNamespace(
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=None,
        outputs=[SimpleNamespace(**{**given, **completion})],
    )


def test_a_record_keeps_every_bit_rank_and_order():
    final = output(logprobs=[{4: Logprob(-0.5, 1)}, {5: Logprob(-0.0, 3), 9: Logprob(0.0, 1)}])
    final.prompt_logprobs = [None, {2: Logprob(-1.0, 2)}, {3: Logprob(-math.inf, 7)}]
    record = record_of("r", 42, final)
    assert record == Record(
        "r",
        42,
        3,
        (None, (Entry(2, 2, 0xBF800000),), (Entry(3, 7, 0xFF800000),)),
        (
            Sample(
                0,
                (4, 5),
                ((Entry(4, 1, 0xBF000000),), (Entry(5, 3, 0x80000000), Entry(9, 1, 0))),
                "length",
                None,
            ),
        ),
    )
    assert record.total_tokens == 5


def test_negative_zero_is_not_zero():
    ours, theirs = (
        record_of("r", 1, output(logprobs=[{4: Logprob(-0.5)}, {5: Logprob(v)}]))
        for v in (0.0, -0.0)
    )
    result = compare(ours, theirs)
    assert result.first.kind == c.LOGPROB
    assert result.first.step == 1
    assert result.logprob_values_equal == 1


def test_completions_streamed_apart_are_put_in_order():
    parts = [output(index=i, token_ids=[i]).outputs[0] for i in (1, 0)]
    record = record_of("r", None, output(), parts)
    assert [s.index for s in record.samples] == [0, 1]


@pytest.mark.parametrize("value", [0.1, 1e300])
def test_logprobs_that_are_no_float32_are_refused(value):
    with pytest.raises(ValueError, match="not a float32"):
        step_of({1: Logprob(value)})


def test_nan_has_bits_too():
    assert step_of({1: Logprob(math.nan)})[0].bits & 0x7F800000 == 0x7F800000
