"""The planner: for any certificate a plan keeps every operation in one class, or there is none."""

import json
from dataclasses import replace

import pytest
from certificates import DIFFERS, DOMAIN, SEQUENCE, certificate, certificates
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from corun.certify import planner
from corun.certify.compositions import PROPERTIES
from corun.certify.planner import Engine, plan, verdicts
from corun.config import POLICIES
from corun.plan import DECODE, PREFILL, Grants, Plan, StepShape
from corun.rows import Rows

MANY = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def engines(draw, largest=48, requests=12):
    few = draw(st.sampled_from([1, 2, 4, 8, requests]))
    longest = draw(st.sampled_from([0, SEQUENCE, SEQUENCE + 1]))
    return Engine(few, draw(st.integers(few, largest)), draw(st.booleans()), longest)


def class_of(claim, n):
    """Which class a count is in; None where it varies or was not reached."""
    return next((i for i, c in enumerate(claim.classes) if n in set(c)), None)


def planned(made, engine, policy):
    found = planner.PLANNERS[policy](made, engine)
    if isinstance(found, str):
        assert found
    return None if isinstance(found, str) else found


@given(certificates(good=True), engines())
@MANY
def test_certified_steps_are_in_one_class_of_every_operation(made, engine):
    found = planned(made, engine, "certified")
    assume(found)
    assert engine.sequence <= made.sequence
    assert found.decode_rows == engine.requests <= found.max_prefill_tokens <= engine.tokens
    step = [c for c in made.rows if not c.sampled]
    sampled = [c for c in made.rows if c.sampled]
    assert step and sampled  # what was not measured is not certified
    seen = {claim.name: set() for claim in step}
    for tokens in range(1, found.max_prefill_tokens + 1):
        rows = found.rows_for(tokens, decode=tokens <= engine.requests)
        assert rows >= tokens
        for claim in step:
            seen[claim.name].add(class_of(claim, rows))
    heads = [set() for _ in sampled]
    for n in range(1, engine.requests + 1):
        rows = found.sample_rows_for(n, decode=True)
        assert rows >= n
        for kind, claim in zip(heads, sampled, strict=True):
            kind.add(class_of(claim, rows))
    for kinds in (*seen.values(), *heads):
        assert len(kinds) == 1 and None not in kinds


@given(certificates(good=True), engines(), st.data())
@MANY
def test_every_step_that_a_held_scheduler_may_emit_passes_the_audit(made, engine, data):
    found = planned(made, engine, "certified")
    assume(found)
    decoding = data.draw(st.integers(0, engine.requests))
    prompts = data.draw(st.integers(0, engine.requests - decoding))
    if not found.grants.mixed and decoding:
        prompts = 0
    if not found.grants.batched_prefill:
        prompts = min(prompts, 1)
    assume(decoding + prompts)
    assume(2 * prompts + decoding <= found.max_prefill_tokens or not prompts)
    longest = found.max_prefill_tokens
    tokens = decoding if not prompts else data.draw(st.integers(2 * prompts + decoding, longest))
    sampling = data.draw(st.integers(1, decoding + prompts))
    step = StepShape(
        PREFILL if prompts else DECODE,
        requests=decoding + prompts,
        prefill_requests=prompts,
        tokens=tokens,
        rows=found.rows_for(tokens, decode=not prompts),
        sample_rows=found.sample_rows_for(sampling, decode=not prompts),
        graph=False,
    )
    assert found.violation(step) is None
    outside = {*range(step.tokens, 60)} - set(found.step_rows)
    for rows in outside:
        assert "certified" in found.violation(replace(step, rows=rows))
    for rows in {*range(1, 60)} - set(found.sample_rows):
        assert "sampled" in found.violation(replace(step, sample_rows=rows))


@given(certificates(good=True), engines())
@MANY
def test_padding_is_bounded(made, engine):
    found = planned(made, engine, "certified")
    assume(found)
    for tokens in range(planner.LEAST_TOKENS, found.max_prefill_tokens + 1):
        rows = found.rows_for(tokens, decode=False)
        assert rows <= planner.MOST_PADDING * tokens


@given(certificates())
@MANY
def test_what_was_not_shown_is_not_granted(made):
    given_ = planner.grants(made)
    shown = {
        name
        for name in PROPERTIES
        if any(c.name == name for c in made.steps)
        and all(c.holds for c in made.steps if c.name == name)
    }
    assert given_.mixed == ("mixed" in shown)
    assert given_.batched_prefill == ("batched_prefill" in shown)
    cut = {"chunks", "decode_is_prefill"} <= shown
    assert given_.free_chunks == given_.prefix_cache == given_.preemption == cut


@given(certificates(), engines())
@MANY
def test_pack_and_isolate_use_counts_that_do_not_vary(made, engine):
    for policy in ("pack", "isolate"):
        found = planned(made, engine, policy)
        if found is None:
            continue
        assert (found.decode_rows, found.max_prefill_tokens) == (engine.requests, engine.tokens)
        assert not found.grants.mixed and not found.grants.preemption
        assert not found.grants.prefix_cache and not found.grants.free_chunks
        assert found.grants.batched_prefill == (policy == "pack")
        assert not any(engine.requests in set(claim.variant) for claim in made.rows)
        if policy == "pack":
            fuller = engine.requests > 1 and engine.tokens > made.together
            assert made.holds("packed_prefill" if fuller else "batched_prefill")
            for claim in made.rows:
                assert class_of(claim, engine.requests) is not None
                assert claim.sampled or class_of(claim, engine.tokens) is not None


@given(certificates(), engines())
@MANY
def test_plan_and_verdicts_agree(made, engine):
    found = verdicts(made, engine)
    assert [v.policy for v in found] == ["certified", "pack", "isolate"]
    for verdict in found:
        assert verdict.reason
        if verdict.allowed:
            assert plan(made, engine, verdict.policy).reason == verdict.reason
        else:
            with pytest.raises(ValueError) as raised:
                plan(made, engine, verdict.policy)
            assert verdict.reason in str(raised.value)
    allowed = [v.policy for v in found if v.allowed]
    if allowed:
        assert plan(made, engine).policy == allowed[0]
    else:
        with pytest.raises(ValueError, match=r"certified: .*; pack: .*; isolate: "):
            plan(made, engine)
    if "certified" in allowed:
        assert made.engine is not None and made.engine.equal


@given(certificates(), engines())
@MANY
def test_plans_survive_json(made, engine):
    for policy in planner.ORDER:
        if found := planned(made, engine, policy):
            assert Plan.from_mapping(json.loads(json.dumps(found.to_mapping()))) == found
            assert found.policy in POLICIES


ENGINE = Engine(8, 64, decode_graph=True)


def test_auto_takes_the_least_restrictive():
    assert plan(certificate(), ENGINE).policy == "certified"
    assert plan(certificate(engine=None), ENGINE).policy == "pack"
    assert plan(certificate(engine=DIFFERS), ENGINE).policy == "pack"
    assert plan(certificate(broken=["decode_rows"]), ENGINE).policy == "isolate"
    only_isolate = certificate(engine=None, broken=["batched_prefill"])
    assert plan(only_isolate, ENGINE).policy == "isolate"
    # Two classes, so no common one for all steps; each count is invariant by itself.
    apart = certificate(step=[range(9, 65), range(1, 9)], sample=[range(5, 9), range(1, 5)])
    assert plan(apart, ENGINE).step_rows == Rows.span(9, 64)
    no_large = certificate(step=[[64], range(1, 64)])
    assert plan(no_large, ENGINE).policy == "pack"


def test_a_full_certificate_frees_the_scheduler():
    found = plan(certificate(), ENGINE)
    assert found.grants == Grants.everything()
    assert found.grants.free
    assert (found.decode_rows, found.max_prefill_tokens, found.decode_graph) == (8, 64, True)
    assert found.certificate == certificate().digest
    assert found.step_rows == Rows.span(1, 64)
    assert "not allowed" not in found.reason


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("mixed", "not allowed: mixed steps"),
        ("batched_prefill", "not allowed: batched prefill"),
        ("chunks", "not allowed: free chunks, prefix caching, preemption"),
        ("decode_is_prefill", "not allowed: free chunks, prefix caching, preemption"),
    ],
)
def test_one_property_less_is_said(broken, words):
    found = plan(certificate(broken=[broken]), ENGINE)
    assert found.policy == "certified"
    assert found.reason.endswith(words)
    assert not found.grants.free


@pytest.mark.parametrize(
    ("made", "engine", "words"),
    [
        (certificate(), Engine(8, 65, True), "covers steps of at most 64 tokens, not 65"),
        (certificate(), Engine(9, 64, True), "certified for 1-8 rows, not 9"),
        (certificate(broken=["decode_rows"]), ENGINE, "decode rows does not hold for attention"),
        (certificate(engine=None), ENGINE, "not checked on the loaded engine"),
        (certificate(), Engine(8, 64, True, 4097), "at most 4096 tokens, and this engine's .*4097"),
        (certificate(sequence=0), Engine(8, 64, True, 16), "at most 0 tokens"),
        (certificate(engine=DIFFERS), ENGINE, "request 3, output 7"),
        (certificate(step=[[64], range(1, 64)]), ENGINE, "without much padding"),
    ],
)
def test_why_certified_is_not_allowed(made, engine, words):
    with pytest.raises(ValueError, match=words):
        plan(made, engine, "certified")


def test_longer_requests_than_were_tried_are_left_to_isolate():
    assert plan(certificate(), replace(ENGINE, sequence=4096)).policy == "certified"
    assert plan(certificate(), replace(ENGINE, sequence=4097)).policy == "isolate"  # pack neither


def test_the_longest_step_keeps_padding_low():
    rows = Rows.from_lists([[5, 32], [576, 576], [584, 584], [1024, 2048]])  # a CPU in bf16
    assert planner.longest_step(rows, Engine(32, 2048, False)) == 32
    assert planner.longest_step(rows, Engine(33, 2048, False)) is None
    assert planner.longest_step(Rows.span(2, 2048), Engine(32, 2048, False)) == 2048
    eights = Rows.of([*range(1, 33), *range(40, 2049, 8)])
    assert planner.longest_step(eights, Engine(32, 2047, False)) == 2040


# What the plan's own check says of a step, without a certificate


CERTIFIED = Plan(
    "certified", 8, 32, False, "t", Grants(), Rows.of([*range(5, 17), 32]), Rows.of([4, 8])
)
STEP = StepShape(DECODE, 3, 0, 3, rows=5, sample_rows=4, graph=False)
PACK = Plan("pack", 8, 64, False, "t", Grants(batched_prefill=True))
PACKED = StepShape(PREFILL, 3, 3, 50, rows=64, sample_rows=8, graph=False)


def test_rows_of_a_certified_plan():
    assert [CERTIFIED.rows_for(n, decode=False) for n in (1, 5, 6, 17, 32)] == [5, 5, 6, 32, 32]
    assert [CERTIFIED.sample_rows_for(n, decode=True) for n in (1, 4, 5)] == [4, 4, 8]
    with pytest.raises(ValueError, match="no certified step shape holds 33 rows"):
        CERTIFIED.rows_for(33, decode=False)
    with pytest.raises(ValueError, match="no certified LM head shape holds 9 rows"):
        CERTIFIED.sample_rows_for(9, decode=False)


@pytest.mark.parametrize(
    ("held", "step", "word"),
    [
        (CERTIFIED, STEP, None),
        (CERTIFIED, replace(STEP, graph=True), None),
        (CERTIFIED, replace(STEP, sample_rows=0), None),  # nobody's prompt ends in this step
        (CERTIFIED, replace(STEP, rows=4), "4 rows"),
        (CERTIFIED, replace(STEP, rows=17), "17 rows"),
        (CERTIFIED, replace(STEP, sample_rows=5), "sampled 5"),
        (CERTIFIED, replace(STEP, kind=PREFILL, prefill_requests=1, tokens=9, rows=9), "mixed"),
        (CERTIFIED, StepShape(PREFILL, 2, 2, 9, 9, 4, False), "2 requests"),
        (CERTIFIED, StepShape(PREFILL, 1, 1, 33, 33, 4, False), "33 tokens"),
        (CERTIFIED, StepShape(PREFILL, 1, 1, 20, 16, 4, False), "16 rows"),  # fewer than tokens
        (PACK, PACKED, None),
        (PACK, StepShape(DECODE, 3, 0, 3, 8, 8, False), None),
        (PACK, replace(PACKED, rows=50), "padded to 50 rows"),
        (PACK, replace(PACKED, sample_rows=3), "sampled 3"),
        (PACK, replace(PACKED, requests=4), "mixed"),
        (PACK, replace(PACKED, tokens=65), "65 tokens"),
        (PACK, replace(PACKED, graph=True), "graph"),
        (PACK, StepShape(DECODE, 3, 0, 3, 3, 8, False), "3 rows"),
    ],
)
def test_violations(held, step, word):
    found = held.violation(step)
    assert found is None if word is None else word in found


def test_split_decode_follows_from_what_was_measured():
    domain = {**certificate().domain, "split_decode": {"beyond": 2048}}
    split, engine = certificate(domain=domain), Engine(8, 64, False)
    assert plan(split, engine, "certified").split_beyond == 2048
    assert plan(certificate(), engine, "certified").split_beyond == 0
    assert [v.allowed for v in verdicts(split, engine)] == [True, False, True]
    assert [v.allowed for v in verdicts(certificate(), engine)] == [True, True, True]
    with pytest.raises(ValueError, match="split_decode"):
        plan(split, engine, "pack")


LATENT = certificate(domain={**DOMAIN, "latent_attention": True})


def test_latent_attention_never_mixes_its_two_algorithms():
    """Measured or not: what was decoded is not recomputed, a cut is not free, no hit is taken."""
    found = planner.plan_certified(LATENT, Engine(8, 64, False, 64))
    assert found.grants == Grants(mixed=True, batched_prefill=True)


@pytest.mark.parametrize(("longest", "together"), [(64, True), (65, False)])
def test_prompts_of_latent_attention_stay_apart_where_one_may_be_cut(longest, together):
    engine = Engine(8, 64, False, longest)
    assert planner.plan_certified(LATENT, engine).grants.batched_prefill is together
    packed = planner.plan_pack(LATENT, engine)
    assert isinstance(packed, Plan) is together
    if not together:
        assert "raise max_num_batched_tokens to max_model_len (65)" in packed


def test_company_that_was_not_tried_is_withheld():
    """A certificate from before full steps were tried has no ``together``."""
    for together, tried in ((0, False), (63, False), (64, True)):
        made = certificate(together=together, broken=["packed_prefill"])
        found = planner.plan_certified(made, Engine(8, 64, False))
        assert (found.grants.mixed, found.grants.batched_prefill) == (tried, tried)
        assert found.grants.free_chunks and found.grants.preemption
        packed = planner.plan_pack(made, Engine(8, 64, False))
        assert isinstance(packed, Plan) is tried
        if not tried:
            assert "packed prefill does not hold" in packed
        assert planner.plan_certified(made, Engine(1, 64, False)).grants.free


def test_pack_rests_on_its_own_steps_where_they_are_longer():
    made = certificate(together=32, broken=["batched_prefill"])
    assert isinstance(planner.plan_pack(made, Engine(8, 64, False)), Plan)
    assert "batched prefill does not hold" in planner.plan_pack(made, Engine(8, 32, False))
    never = replace(made, steps=tuple(c for c in made.steps if c.name != "packed_prefill"))
    assert "packed prefill was not measured" in planner.plan_pack(never, Engine(8, 64, False))
