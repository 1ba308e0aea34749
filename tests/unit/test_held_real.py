"""vLLM's own scheduler under every set of grants: the same traffic and properties as test_held.

No model runs. Runs on every vLLM that CoRun supports (``make test-compat``).
"""

from collections import Counter
from dataclasses import replace

import pytest
from held_watch import GRANTS, name_of
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scheduler_traces import traces

pytest.importorskip("vllm")

from real_scheduler import CLASSES, Engine, asking, trace_of
from real_traffic import Traffic
from vllm.v1.engine import FinishReason

from corun.engine.arguments import PLAN_KEY
from corun.plan import Grants, Plan


def held(build, trace, grants, cls, **given) -> Engine:
    plan = Plan("certified", trace.max_running, trace.budget, False, "", grants)
    build.config.additional_config = {PLAN_KEY: plan.to_mapping()}
    build.config.cache_config.enable_prefix_caching = grants.prefix_cache
    return Engine(build(trace, cls, **given))


@pytest.mark.parametrize("cls", CLASSES)
def test_properties_under_random_traffic(build, cls):
    seen = {grants: Counter() for grants in GRANTS}

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        trace=traces(),
        more=st.sampled_from((0, 8, 24)),
        second_runner=st.booleans(),
        kind=st.sampled_from(("window", "chunk")),
    )
    def run(trace, more, second_runner, kind):
        trace = replace(trace, budget=trace.budget + more)
        for grants, counts in seen.items():
            note(name_of(grants))
            engine = held(build, trace, grants, cls, kind=kind)
            engine.scheduler.use_v2_model_runner = second_runner
            traffic = Traffic(trace, grants, engine)
            traffic.drain()
            counts.update(traffic.watch.counts, steps=traffic.watch.steps)

    run()
    for grants, counts in seen.items():
        assert counts["steps"] > 100
        assert not counts["preempted"] or grants.preemption


@pytest.mark.parametrize("cls", CLASSES)
def test_a_tiny_cache_preempts_where_that_is_granted_and_everybody_finishes(build, cls):
    for grants in GRANTS:
        for by_priority in (False, True):
            trace = trace_of(capacity=8, budget=16, by_priority=by_priority)
            arrivals = tuple(asking(5 + i, 12, priority=i % 3) for i in range(6))
            trace = replace(trace, arrivals=arrivals)
            engine = held(build, trace, grants, cls)
            traffic = Traffic(trace, grants, engine)
            traffic.drain()
            counts, name = traffic.watch.counts, name_of(grants)
            assert (counts["preempted"] > 0) == grants.preemption, name
            assert set(engine.ended.values()) == {FinishReason.LENGTH}
            assert set(engine.outputs.values()) == {12}
            preemptions = sum(r.num_preemptions for r in engine.requests.values())
            assert preemptions == counts["preempted"]


@pytest.mark.parametrize("cls", CLASSES)
def test_prompts_are_packed_mixed_and_cut_only_where_that_is_granted(build, cls):
    for grants in GRANTS:
        arrivals = tuple(asking(prompt, 3) for prompt in (6, 7, 30, 4, 6))
        trace = replace(trace_of(capacity=80, budget=16), arrivals=arrivals)
        traffic = Traffic(trace, grants, held(build, trace, grants, cls))
        traffic.drain()
        counts, name = traffic.watch.counts, name_of(grants)
        assert (counts["packed"] > 0) == grants.batched_prefill, name
        assert (counts["mixed"] > 0) == grants.mixed, name
        shared = grants.batched_prefill or grants.mixed
        assert (counts["cut"] > 0) == (grants.free_chunks and shared), name


@pytest.mark.parametrize("cls", CLASSES)
def test_a_prompt_starts_behind_its_cached_prefix_where_that_is_granted(build, cls):
    for granted in (False, True):
        grants = Grants(batched_prefill=True, prefix_cache=granted)
        engine = held(build, trace_of(budget=16), grants, cls)
        engine.add("first", asking(11, 2))
        engine.finish()
        engine.add("second", asking(11, 2))
        engine.step()
        assert engine.begins == {"second": 8 * granted}
        engine.finish()


@pytest.mark.parametrize("cls", CLASSES)
def test_clearing_the_kv_cache_recomputes_where_preemption_is_granted(build, cls):
    engine = held(build, trace_of(budget=16), Grants(preemption=True), cls)
    engine.add("a", asking(5, 8))
    engine.add("b", asking(6, 8))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert set(engine.ended.values()) == {FinishReason.LENGTH}
    assert engine.requests["a"].num_preemptions == 1


def test_a_chunk_that_vllm_cuts_is_an_error(build):
    engine = held(build, trace_of(budget=16), Grants(batched_prefill=True), CLASSES[0])
    engine.scheduler.max_num_scheduled_tokens = 10
    engine.add("a", asking(6))
    engine.add("b", asking(9))
    with pytest.raises(RuntimeError, match="cut b's prompt after 4 tokens"):
        engine.step()


def test_a_start_that_vllm_puts_off_is_not_reserved(build, monkeypatch):
    engine = held(build, trace_of(budget=16), Grants(batched_prefill=True), CLASSES[0])
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    monkeypatch.setattr(
        manager,
        "allocate_slots",
        lambda r, *args, **given: None if r.request_id == "b" else allocate(r, *args, **given),
    )
    engine.add("a", asking(6))
    engine.add("b", asking(7))
    assert engine.step() == {"a": 6}
    assert engine.running() == ["a"]
    assert "b" not in engine.scheduler.held.ledger
    monkeypatch.undo()
    engine.finish()
    assert engine.outputs == {"a": 4, "b": 4}


def test_nobody_overtakes_a_preempted_request_whose_output_is_under_way(build):
    engine = held(build, trace_of(budget=16), Grants(preemption=True), CLASSES[1])
    first = engine.add("first", asking(6))
    engine.add("second", asking(7))
    first.num_stale_output_tokens, first.drop_stale_output = 1, False
    assert engine.step() == {}
    first.num_stale_output_tokens = 0
    assert engine.step() == {"first": 6}


def test_what_the_plan_does_not_grant_is_refused(build):
    pack = Grants(batched_prefill=True)
    trace = trace_of()
    with pytest.raises(ValueError, match="certified policy cannot run with long_prefill_token_th"):
        held(build, trace, pack, CLASSES[0], threshold=3)
    held(build, trace, Grants(free_chunks=True), CLASSES[0], threshold=3)
    longer = Plan("pack", 4, 7, False, "", pack)
    build.config.additional_config = {PLAN_KEY: longer.to_mapping()}
    with pytest.raises(ValueError, match="may hold 8 tokens, but CoRun's plan allows 7"):
        build(trace)


def test_without_a_plan_nothing_is_granted(build):
    build.config.additional_config = {}
    build.config.cache_config.enable_prefix_caching = False
    assert build(trace_of()).held.grants == Grants()
