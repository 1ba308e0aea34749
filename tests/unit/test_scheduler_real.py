"""vLLM's own scheduler under the isolate policy: the same traffic and properties as test_isolate.

No model runs. Runs on every vLLM that CoRun supports (``make test-compat``).
"""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_traces import BLOCK_SIZE, traces

pytest.importorskip("vllm")

from real_scheduler import (
    BEFORE_0_32,
    CLASSES,
    Engine,
    Grammar,
    asking,
    trace_of,
)
from real_traffic import Traffic
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason

from corun.engine import kv_geometry, scheduler
from corun.engine.scheduler import AsyncIsolateScheduler
from corun.plan import Grants
from corun.schedule.ledger import KVGeometry, KVGroup


@pytest.mark.parametrize("cls", CLASSES)
def test_properties_under_random_traffic(build, cls):
    checked = 0

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        trace=traces(),
        threshold=st.sampled_from((0, 0, 3)),
        second_runner=st.booleans(),
        kind=st.sampled_from(("window", "chunk", "state")),
    )
    def run(trace, threshold, second_runner, kind):
        nonlocal checked
        made = build(trace, cls, threshold=threshold, kind=kind)
        made.use_v2_model_runner = second_runner
        # vLLM 0.25 cuts every prompt at its threshold; 0.32 only when others wait, which it must
        # not learn of.
        chunk = min(threshold, trace.budget) if threshold and BEFORE_0_32 else trace.budget
        traffic = Traffic(trace, Grants(), Engine(made), chunk)
        traffic.drain()
        checked += traffic.watch.steps

    run()
    assert checked > 1000


@pytest.mark.parametrize("cls", CLASSES)
def test_a_request_that_never_fits_ends_with_an_error_that_names_the_numbers(build, cls):
    engine = Engine(build(trace_of(capacity=5), cls))
    engine.add("large", asking(17, 9))
    engine.add("small", asking(5, 3))
    engine.finish()
    assert engine.ended["large"] is FinishReason.ERROR
    assert "17 of prompt, max_tokens 9" in engine.reasons["large"]
    assert "7 KV cache blocks, but the engine has 5" in engine.reasons["large"]
    assert engine.ended["small"] is FinishReason.LENGTH


def test_a_refusal_reaches_the_user_while_the_engine_is_paused(build):
    engine = Engine(build(trace_of(capacity=5)))
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.add("large", asking(17, 9))
    engine.finish()
    assert engine.ended["large"] is FinishReason.ERROR


def test_the_ledger_counts_as_vllm_does(build):
    trace = trace_of(max_model_len=32, capacity=20, window=9, budget=8)
    full = KVGroup(BLOCK_SIZE)
    # vLLM 0.32 keeps what a batch under way may still read; 0.25 does not wait for it.
    ahead = 8 if BEFORE_0_32 else 2 * 8
    for kind, group in (
        ("window", KVGroup(BLOCK_SIZE, -(-(9 - 1 + ahead) // BLOCK_SIZE) + 1)),
        ("chunk", KVGroup(BLOCK_SIZE, -(-(9 + ahead) // BLOCK_SIZE) + 1)),
        ("state", KVGroup(32)),
    ):
        made = build(trace, AsyncIsolateScheduler, kind=kind)
        assert made.kv_geometry == KVGeometry((full, group), 20, 32), kind


@pytest.mark.skipif(BEFORE_0_32, reason="vLLM 0.25 has no per-request error for it")
def test_a_grammar_that_does_not_compile_ends_its_request_alone(build):
    engine = Engine(build(trace_of()))
    bad = engine.add("bad", asking(3, blocked=True))
    bad.structured_output_request.grammar = ValueError("no such grammar")
    engine.add("good", asking(3, 2))
    engine.finish()
    assert engine.ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}


def test_a_pause_between_two_chunks_changes_nothing(build):
    engine = Engine(build(trace_of(budget=4)))
    engine.add("other", asking(3, 8))
    engine.step()
    engine.add("paused", asking(8, 2))
    assert engine.step() == {"paused": 4}
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.schedule().num_scheduled_tokens == {}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step() == {"paused": 4}
    engine.finish()
    assert engine.outputs == {"other": 8, "paused": 2}


@pytest.mark.parametrize("cls", CLASSES)
def test_streaming_input_is_refused_by_name(build, cls):
    engine = Engine(build(trace_of(), cls))
    engine.add("session", asking(5), resumable=True)
    engine.finish()
    assert engine.ended["session"] is FinishReason.ERROR
    assert "streaming input" in engine.reasons["session"]
    assert engine.scheduler.num_waiting_for_streaming_input == 0


def test_multimodal_inputs_are_refused_by_name(build):
    engine = Engine(build(trace_of()))
    engine.add("picture", asking(5), mm_features=[SimpleNamespace(identifier="x")])
    engine.finish()
    assert engine.ended["picture"] is FinishReason.ERROR
    assert "images, audio or video" in engine.reasons["picture"]


@pytest.mark.parametrize("cls", CLASSES)
def test_clearing_the_kv_cache_of_running_requests_ends_them_by_name(build, cls):
    engine = Engine(build(trace_of(), cls))
    engine.add("running", asking(5, 8))
    engine.step()
    engine.add("waiting", asking(5, 3))
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert engine.ended["running"] is FinishReason.ERROR
    assert "clear_cache=False" in engine.reasons["running"]
    assert (engine.ended["waiting"], engine.outputs["waiting"]) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("by_priority", [False, True])
def test_a_blocked_head_neither_starves_nor_is_starved(build, cls, by_priority):
    engine = Engine(build(trace_of(by_priority=by_priority), cls))
    blocked = engine.add("blocked", asking(3, blocked=True))
    engine.add("ready", asking(3, 6))
    assert engine.step() == {"ready": 3}
    engine.add("later", asking(3, 6))
    blocked.structured_output_request.grammar = Grammar()
    assert engine.step() == {"blocked": 3}, "an older request, ready again, comes first"
    assert engine.step() == {"later": 3}
    engine.finish()
    assert set(engine.ended.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("cls", CLASSES)
def test_an_engine_of_blocked_requests_still_decodes_and_then_idles(build, cls):
    engine = Engine(build(trace_of(), cls))
    engine.add("runs", asking(3, 5))
    blocked = engine.add("blocked", asking(3, 2, blocked=True))
    for _ in range(10):
        engine.step()
    assert engine.ended == {"runs": FinishReason.LENGTH}
    assert engine.step() == {}
    blocked.structured_output_request.grammar = Grammar()
    engine.finish()
    assert engine.outputs["blocked"] == 2


def test_a_prompt_that_vllm_will_not_run_does_not_stop_the_others(build, monkeypatch):
    engine = Engine(build(trace_of()))
    engine.add("first", asking(3, 6))
    engine.step()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def full_for_second(request, *args, **kwargs):
        refuse = request.request_id == "second" and engine.running() != []
        return None if refuse else allocate(request, *args, **kwargs)

    # While it is hidden from vLLM, `first` still runs; look at the request table instead.
    monkeypatch.setattr(
        engine,
        "running",
        lambda: [n for n in engine.scheduler.requests if n == "first"],
    )
    monkeypatch.setattr(manager, "allocate_slots", full_for_second)
    engine.add("second", asking(3, 2))
    steps = [engine.step() for _ in range(4)]
    assert steps == [{}, {"first": 1}, {}, {"first": 1}]
    engine.finish()
    assert engine.outputs == {"first": 6, "second": 2}


def test_a_preemption_is_an_error_that_names_the_request(build, monkeypatch):
    engine = Engine(build(trace_of()))
    engine.add("victim", asking(3, 6))
    engine.step()
    monkeypatch.setattr(
        engine.scheduler.kv_cache_manager, "allocate_slots", lambda *args, **kwargs: None
    )
    with pytest.raises(RuntimeError, match="preempted victim"):
        engine.step()


def test_blocks_that_nobody_reserved_are_an_error(build):
    engine = Engine(build(trace_of()))
    engine.add("honest", asking(3, 6))
    engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    with pytest.raises(RuntimeError, match=r"holds 4 KV cache blocks, but CoRun reserved 3"):
        engine.step()


def test_more_than_one_token_in_decode_is_an_error(build):
    engine = Engine(build(trace_of()))
    engine.add("odd", asking(3, 6))
    engine.step()
    engine.requests["odd"].num_computed_tokens -= 1
    engine.requests["odd"].num_prompt_tokens = 2
    with pytest.raises(RuntimeError, match=r"more than one token in decode for .*odd"):
        engine.step()


def test_vllm_is_put_back_as_it_was_after_an_error(build, monkeypatch):
    engine = Engine(build(trace_of()))
    for name in ("a", "b", "c"):
        engine.add(name, asking(3, 6))
    engine.step()
    before = engine.running()

    def broken(*args, **kwargs):
        raise OSError("broken")

    monkeypatch.setattr(engine.scheduler.kv_cache_manager, "new_step_starts", broken)
    with pytest.raises(OSError, match="broken"):
        engine.step()
    assert engine.running() == before
    assert [r.request_id for r in engine.scheduler.waiting] == ["b", "c"]


def test_slots_are_those_of_max_num_active_seqs_where_vllm_has_it(build):
    if not hasattr(build.config.scheduler_config, "max_num_active_seqs"):
        pytest.skip("this vLLM has no max_num_active_seqs")
    build.config.scheduler_config.max_num_active_seqs = 2
    try:
        made = build(trace_of())
    finally:
        build.config.scheduler_config.max_num_active_seqs = None
    assert made.held.max_running == 2


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("cache_config.enable_prefix_caching", True, "prefix caching"),
        ("speculative_config", SimpleNamespace(), "speculative decoding"),
        ("kv_transfer_config", SimpleNamespace(), "a KV connector"),
        ("ec_transfer_config", SimpleNamespace(), "an encoder cache connector"),
        ("lora_config", SimpleNamespace(), "LoRA"),
        ("scheduler_config.enable_chunked_prefill", False, "chunked prefill off"),
    ],
)
def test_what_cannot_be_isolated_is_refused_by_name(build, setting, value, name):
    *path, last = setting.split(".")
    holder = getattr(build.config, path[0]) if path else build.config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, last, value)
        for cls in CLASSES:
            with pytest.raises(ValueError, match=f"isolate policy cannot run with {name}"):
                build(trace_of(), cls)


def test_an_unknown_queue_or_kv_cache_is_an_error(build, monkeypatch):
    monkeypatch.setattr(scheduler, "_KNOWN_QUEUES", frozenset({"waiting"}))
    with pytest.raises(RuntimeError, match="waiting queues that CoRun does not know"):
        build(trace_of())
    monkeypatch.undo()
    monkeypatch.setattr(kv_geometry, "_CAPPED", frozenset())
    with pytest.raises(ValueError, match="SlidingWindowManager"):
        build(trace_of(window=9))
