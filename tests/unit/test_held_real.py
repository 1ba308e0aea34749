"""vLLM's own scheduler under every set of grants: the same traffic and properties as test_held.

No model runs: results are fed by hand, as the engine core would. Runs on every vLLM that CoRun
supports (``make test-compat``).
"""

from collections import Counter
from dataclasses import replace

import pytest
from held_watch import GRANTS, HeldWatch, name_of
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scheduler_traces import BLOCK_SIZE, PAUSED_ALL, Arrival, Trace, traces
from test_scheduler_real import (  # noqa: F401 (fixtures)
    CLASSES,
    PAUSES,
    STOP,
    WORD,
    Engine,
    Grammar,
    asking,
    build,
    config,
    grammars,
    trace_of,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import FinishReason

from corun.engine.arguments import PLAN_KEY
from corun.plan import Grants, Plan

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


class HeldEngine(Engine):
    """An engine core whose requests may be preempted, and whose prompts may hit the cache."""

    def add(self, name: str, arrival: Arrival, **given):
        return super().add(name, arrival, block_hasher=HASHER, **given)

    def schedule(self) -> dict[str, int] | None:
        self.preempted: list[str] = []
        self.begins: dict[str, int] = {}
        self.may_wait = self.scheduler.has_requests()
        if not self.may_wait:
            return None
        output = self.scheduler.schedule()
        tokens = dict(output.num_scheduled_tokens)
        self.preempted = sorted(output.preempted_req_ids or ())
        sampled = []
        for name, n in tokens.items():
            request = self.requests[name]
            self.begins[name] = request.num_computed_tokens - n
            index = request.num_computed_tokens - request.num_prompt_tokens
            last = index + 1 == self.arrivals[name].stop_after
            sampled.append([] if request.is_prefill_chunk else [STOP if last else WORD])
        self.under_way.append((output, list(tokens), sampled))
        self.may_wait = bool(tokens) or self.scheduler.has_requests()
        return tokens


class Traffic:
    """Drives an engine through a trace, and checks every step."""

    def __init__(self, trace: Trace, grants: Grants, engine: HeldEngine) -> None:
        self.trace, self.grants, self.engine, self.now = trace, grants, engine, 0
        self.geometry = engine.scheduler.kv_geometry
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        reservations = {
            f"r{i}": self.geometry.reservation(a.prompt, a.max_tokens)
            for i, a in enumerate(trace.arrivals)
        }
        self.watch = HeldWatch(trace, grants, reservations, self.geometry.blocks)
        self.blocked: set[str] = set()
        self.ended: set[str] = set()

    def arrive(self) -> None:
        for i, a in enumerate(self.trace.arrivals):
            name = f"r{i}"
            if a.step != self.now:
                continue
            self.engine.add(name, a)
            if name in self.engine.scheduler.requests:
                self.watch.arrive(name, a)
                if a.blocked_for:
                    self.blocked.add(name)
        for name in list(self.blocked):
            a = self.engine.arrivals[name]
            if self.now >= a.step + a.blocked_for:
                self.engine.requests[name].structured_output_request.grammar = Grammar()
                self.blocked.discard(name)

    def abort(self, late: bool) -> None:
        for i, a in enumerate(self.trace.arrivals):
            if a.abort_after == self.now - a.step and a.abort_late == late:
                self.engine.abort(f"r{i}")
        self.note_ends()

    def note_ends(self) -> None:
        for name in set(self.engine.ended) - self.ended:
            self.ended.add(name)
            self.watch.end(name)

    def step(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        self.arrive()
        self.abort(late=False)
        pause = self.trace.pause_at(self.now)
        if scheduler.pause_state is not PAUSES[pause]:
            scheduler.set_pause_state(PAUSES[pause])
        known = {r.request_id: r.num_tokens for r in scheduler.requests.values()}
        stale = [
            name for name in known if getattr(engine.requests[name], "num_stale_output_tokens", 0)
        ]
        free = self.pool.get_num_free_blocks()
        tokens = engine.schedule()
        if self.grants.preemption and tokens == {} and pause != PAUSED_ALL:
            self.watch.idle(engine.preempted)
        elif tokens is not None:
            self.watch.step(
                tokens,
                known=known,
                begins=engine.begins,
                unready=[*stale, *self.blocked],
                pause=pause,
                preempted=engine.preempted,
                free_blocks=free,
                exact=not self.grants.preemption,
            )
        assert engine.running() == [r.name for r in self.watch.running]
        waiting = [r.request_id for n in scheduler._queue_names for r in getattr(scheduler, n)]
        assert sorted(waiting) == sorted(r.name for r in self.watch.waiting)
        self.abort(late=True)
        engine.results()
        self.note_ends()
        self.now += 1

    def drain(self) -> None:
        last, most = max(a.step for a in self.trace.arrivals), self.watch.most_steps()
        scheduler = self.engine.scheduler
        while (
            self.now <= last
            or scheduler.requests
            or scheduler.has_requests()
            or self.engine.under_way
        ):
            self.step()
            assert self.now <= most, "starved, or stuck"


def held(config, grammars, trace, grants, cls, **given) -> HeldEngine:  # noqa: F811
    plan = Plan("certified", trace.max_running, trace.budget, False, "", grants)
    config.additional_config = {PLAN_KEY: plan.to_mapping()}
    config.cache_config.enable_prefix_caching = grants.prefix_cache
    return HeldEngine(build(config, grammars, trace, cls, **given))


@pytest.mark.parametrize("cls", CLASSES)
def test_properties_under_random_traffic(config, grammars, cls):  # noqa: F811
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
            engine = held(config, grammars, trace, grants, cls, kind=kind)
            engine.scheduler.use_v2_model_runner = second_runner
            traffic = Traffic(trace, grants, engine)
            traffic.drain()
            for i, a in enumerate(trace.arrivals):
                name = f"r{i}"
                fits = traffic.geometry.never_fits_message(a.prompt, a.max_tokens) is None
                assert (engine.ended[name] is FinishReason.ERROR) != fits
                if fits and engine.ended[name] is not FinishReason.ABORT:
                    limit = trace.length(a) - a.prompt
                    assert engine.outputs[name] == min(a.stop_after, limit)
            assert traffic.pool.get_num_free_blocks() == trace.capacity
            counts.update(traffic.watch.counts, steps=traffic.watch.steps)

    run()
    for grants, counts in seen.items():
        assert counts["steps"] > 100
        assert not counts["preempted"] or grants.preemption


@pytest.mark.parametrize("cls", CLASSES)
def test_a_tiny_cache_preempts_where_that_is_granted_and_everybody_finishes(config, grammars, cls):  # noqa: F811
    for grants in GRANTS:
        for by_priority in (False, True):
            trace = trace_of(capacity=8, budget=16, by_priority=by_priority)
            arrivals = tuple(asking(5 + i, 12, priority=i % 3) for i in range(6))
            trace = replace(trace, arrivals=arrivals)
            engine = held(config, grammars, trace, grants, cls)
            traffic = Traffic(trace, grants, engine)
            traffic.drain()
            counts, name = traffic.watch.counts, name_of(grants)
            assert (counts["preempted"] > 0) == grants.preemption, name
            assert set(engine.ended.values()) == {FinishReason.LENGTH}
            assert set(engine.outputs.values()) == {12}
            preemptions = sum(r.num_preemptions for r in engine.requests.values())
            assert preemptions == counts["preempted"]


@pytest.mark.parametrize("cls", CLASSES)
def test_prompts_are_packed_mixed_and_cut_only_where_that_is_granted(config, grammars, cls):  # noqa: F811
    for grants in GRANTS:
        arrivals = tuple(asking(prompt, 3) for prompt in (6, 7, 30, 4, 6))
        trace = replace(trace_of(capacity=80, budget=16), arrivals=arrivals)
        traffic = Traffic(trace, grants, held(config, grammars, trace, grants, cls))
        traffic.drain()
        counts, name = traffic.watch.counts, name_of(grants)
        assert (counts["packed"] > 0) == grants.batched_prefill, name
        assert (counts["mixed"] > 0) == grants.mixed, name
        shared = grants.batched_prefill or grants.mixed
        assert (counts["cut"] > 0) == (grants.free_chunks and shared), name


@pytest.mark.parametrize("cls", CLASSES)
def test_a_prompt_starts_behind_its_cached_prefix_where_that_is_granted(config, grammars, cls):  # noqa: F811
    for granted in (False, True):
        grants = Grants(batched_prefill=True, prefix_cache=granted)
        engine = held(config, grammars, trace_of(budget=16), grants, cls)
        engine.add("first", asking(11, 2))
        engine.finish()
        engine.add("second", asking(11, 2))
        engine.step()
        assert engine.begins == {"second": 8 * granted}
        engine.finish()


@pytest.mark.parametrize("cls", CLASSES)
def test_clearing_the_kv_cache_recomputes_where_preemption_is_granted(config, grammars, cls):  # noqa: F811
    engine = held(config, grammars, trace_of(budget=16), Grants(preemption=True), cls)
    engine.add("a", asking(5, 8))
    engine.add("b", asking(6, 8))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert set(engine.ended.values()) == {FinishReason.LENGTH}
    assert engine.requests["a"].num_preemptions == 1


def test_a_chunk_that_vllm_cuts_is_an_error(config, grammars):  # noqa: F811
    engine = held(config, grammars, trace_of(budget=16), Grants(batched_prefill=True), CLASSES[0])
    engine.scheduler.max_num_scheduled_tokens = 10
    engine.add("a", asking(6))
    engine.add("b", asking(9))
    with pytest.raises(RuntimeError, match="cut b's prompt after 4 tokens"):
        engine.step()


def test_a_start_that_vllm_puts_off_is_not_reserved(config, grammars, monkeypatch):  # noqa: F811
    engine = held(config, grammars, trace_of(budget=16), Grants(batched_prefill=True), CLASSES[0])
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


def test_nobody_overtakes_a_preempted_request_whose_output_is_under_way(config, grammars):  # noqa: F811
    engine = held(config, grammars, trace_of(budget=16), Grants(preemption=True), CLASSES[1])
    first = engine.add("first", asking(6))
    engine.add("second", asking(7))
    first.num_stale_output_tokens, first.drop_stale_output = 1, False
    assert engine.step() == {}
    first.num_stale_output_tokens = 0
    assert engine.step() == {"first": 6}


def test_what_the_plan_does_not_grant_is_refused(config, grammars):  # noqa: F811
    pack = Grants(batched_prefill=True)
    trace = trace_of()
    with pytest.raises(ValueError, match="certified policy cannot run with long_prefill_token_th"):
        held(config, grammars, trace, pack, CLASSES[0], threshold=3)
    held(config, grammars, trace, Grants(free_chunks=True), CLASSES[0], threshold=3)
    longer = Plan("pack", 4, 7, False, "", pack)
    config.additional_config = {PLAN_KEY: longer.to_mapping()}
    with pytest.raises(ValueError, match="may hold 8 tokens, but CoRun's plan allows 7"):
        build(config, grammars, trace)


def test_without_a_plan_nothing_is_granted(config, grammars):  # noqa: F811
    config.additional_config = {}
    config.cache_config.enable_prefix_caching = False
    assert build(config, grammars, trace_of()).held.grants == Grants()
