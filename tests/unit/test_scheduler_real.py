"""vLLM's own scheduler under the isolate policy: the same traffic and properties as test_isolate.

No model runs: results are fed by hand, as the engine core would. Runs on every vLLM that CoRun
supports (``make test-compat``).
"""

import json
import math
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_traces import (
    BLOCK_SIZE,
    NOT_PAUSED,
    PAUSED_ALL,
    PAUSED_NEW,
    Arrival,
    Trace,
    Watch,
    traces,
)

vllm = pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: E402

from corun.engine import kv_geometry, scheduler  # noqa: E402
from corun.engine.scheduler import AsyncIsolateScheduler, IsolateScheduler  # noqa: E402
from corun.schedule.ledger import KVGeometry, KVGroup  # noqa: E402

CLASSES = (IsolateScheduler, AsyncIsolateScheduler)
WORD, STOP = 7, 9
PAUSES = {
    NOT_PAUSED: PauseState.UNPAUSED,
    PAUSED_NEW: PauseState.PAUSED_NEW,
    PAUSED_ALL: PauseState.PAUSED_ALL,
}
BEFORE_0_32 = vllm.__version__.startswith("0.25")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """One VllmConfig for all tests; `build` fits it to each."""
    model = tmp_path_factory.mktemp("model")
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
    }
    (model / "config.json").write_text(json.dumps(llama))
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=64
    )
    return VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
    )


@pytest.fixture(scope="module")
def grammars(config):
    return StructuredOutputManager(config)


SHAPE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def second_spec(trace: Trace, kind: str):
    """The KV cache of a trace's second group of layers."""
    if kind == "window":
        return SlidingWindowSpec(**SHAPE, sliding_window=trace.window)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=trace.window)
    return MambaSpec(block_size=trace.max_model_len, shapes=((1,),), dtypes=(torch.float32,))


def build(config, grammars, trace: Trace, cls=IsolateScheduler, *, threshold=0, kind="window"):
    """A scheduler for the trace's engine. threshold: vLLM's long_prefill_token_threshold."""
    config.model_config.max_model_len = trace.max_model_len
    config.scheduler_config.max_num_seqs = trace.max_running
    config.scheduler_config.max_num_batched_tokens = trace.budget
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.long_prefill_token_threshold = threshold
    # vLLM bounds what a sliding window holds by the batches that may be under way at once.
    config.scheduler_config.async_scheduling = cls is AsyncIsolateScheduler
    config.scheduler_config.policy = "priority" if trace.by_priority else "fcfs"
    groups = [KVCacheGroupSpec(["a"], FullAttentionSpec(**SHAPE))]
    if trace.window is not None:
        groups.append(KVCacheGroupSpec(["b"], second_spec(trace, kind)))
    config.cache_config.num_gpu_blocks = trace.capacity + 1  # and the null block
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=trace.capacity + 1, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=grammars,
        block_size=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
        log_stats=False,
    )


class Grammar:
    """Stands in for a compiled grammar: takes any token."""

    def accept_tokens(self, request_id, tokens):
        return True


def make_request(name: str, arrival: Arrival, **given) -> Request:
    sampling = SamplingParams(max_tokens=arrival.max_tokens, stop_token_ids=[STOP], temperature=0.0)
    request = Request(
        request_id=name,
        prompt_token_ids=[WORD] * arrival.prompt,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        priority=arrival.priority,
        **given,
    )
    if arrival.blocked_for:
        params = StructuredOutputsParams(json_object=True)
        request.structured_output_request = StructuredOutputRequest(params=params)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return request


class Engine:
    """Steps a scheduler as vLLM's engine core does. depth: batches under way at once, 1 or 2."""

    def __init__(self, made) -> None:
        self.scheduler = made
        self.depth = 2 if isinstance(made, AsyncIsolateScheduler) else 1
        self.under_way: deque = deque()
        self.may_wait = True
        self.arrivals: dict[str, Arrival] = {}
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, int] = {}
        self.ended: dict[str, FinishReason] = {}
        self.reasons: dict[str, str | int | None] = {}

    def add(self, name: str, arrival: Arrival, **given) -> Request:
        request = make_request(name, arrival, **given)
        self.arrivals[name], self.requests[name] = arrival, request
        self.outputs[name] = 0
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.ended[name] = FinishReason.ABORT

    def schedule(self) -> dict[str, int] | None:
        """Tokens by request of the next step; None where the engine core would not ask for one."""
        self.may_wait = self.scheduler.has_requests()
        if not self.may_wait:
            return None
        output = self.scheduler.schedule()
        tokens = dict(output.num_scheduled_tokens)
        sampled = []
        for name in tokens:
            request = self.requests[name]
            index = request.num_computed_tokens - request.num_prompt_tokens
            last = index + 1 == self.arrivals[name].stop_after
            sampled.append([] if index < 0 else [STOP if last else WORD])
        self.under_way.append((output, list(tokens), sampled))
        self.may_wait = bool(tokens) or self.scheduler.has_requests()
        return tokens

    def results(self) -> None:
        """Process the oldest batch, if the engine core would wait for it now."""
        if not self.under_way or (self.may_wait and len(self.under_way) < self.depth):
            return
        output, names, sampled = self.under_way.popleft()
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for batch in self.scheduler.update_from_output(output, result).values():
            for out in batch.outputs:
                self.outputs[out.request_id] += len(out.new_token_ids)
                if out.finish_reason is not None:
                    assert out.request_id not in self.ended, "ended twice"
                    self.ended[out.request_id] = out.finish_reason
                    self.reasons[out.request_id] = out.stop_reason

    def step(self) -> dict[str, int] | None:
        tokens = self.schedule()
        self.results()
        return tokens

    def finish(self, limit: int = 500) -> None:
        steps = 0
        while self.scheduler.has_requests() or self.under_way:
            self.step()
            steps += 1
            assert steps < limit, "stuck"

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]


class Traffic:
    """Drives an engine through a trace, and checks every step."""

    def __init__(self, trace: Trace, engine: Engine, chunk: int) -> None:
        self.trace, self.engine, self.now = trace, engine, 0
        self.geometry = engine.scheduler.kv_geometry
        reservations = {
            f"r{i}": self.geometry.reservation(a.prompt, a.max_tokens)
            for i, a in enumerate(trace.arrivals)
        }
        self.watch = Watch(trace, reservations, chunk)
        self.blocked: set[str] = set()

    def arrive(self) -> None:
        for i, a in enumerate(self.trace.arrivals):
            if a.step != self.now:
                continue
            name = f"r{i}"
            self.engine.add(name, a)
            if name in self.engine.scheduler.requests:
                self.watch.arrive(name, a)
                if a.blocked_for:
                    self.blocked.add(name)

    def unblock(self) -> None:
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
        for name in self.engine.ended:
            if name in self.watch.seen and not self.watch.seen[name].ended:
                self.watch.end(name)

    def check_blocks(self) -> None:
        """Every request's blocks, as vLLM's pool has them, are within its own reservation."""
        managers = self.engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        for r in self.watch.running:
            held = [b for m in managers for b in m.req_to_blocks.get(r.name, ()) if not b.is_null]
            assert len(held) <= r.reservation
            assert self.engine.requests[r.name].num_preemptions == 0

    def step(self) -> None:
        engine = self.engine
        self.arrive()
        self.unblock()
        self.abort(late=False)
        pause = self.trace.pause_at(self.now)
        if engine.scheduler.pause_state is not PAUSES[pause]:
            engine.scheduler.set_pause_state(PAUSES[pause])
        queues = {name: getattr(engine.scheduler, name) for name in engine.scheduler._queue_names}
        tokens = engine.schedule()
        if tokens is not None:
            self.watch.step(tokens, self.blocked, pause)
        self.watch.check_running(engine.running())
        self.check_blocks()
        for name, queue in queues.items():
            assert getattr(engine.scheduler, name) is queue
        waiting = sorted(r.request_id for queue in queues.values() for r in queue)
        assert waiting == sorted(r.name for r in self.watch.waiting())
        self.abort(late=True)
        engine.results()
        self.note_ends()
        self.now += 1

    def drain(self) -> None:
        while (
            any(a.step >= self.now for a in self.trace.arrivals)
            or self.engine.scheduler.requests
            or self.engine.scheduler.has_requests()
            or self.engine.under_way
        ):
            self.step()
            assert self.now <= self.watch.most_steps(), "starved, or stuck"


@pytest.mark.parametrize("cls", CLASSES)
def test_properties_under_random_traffic(config, grammars, cls):
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
        made = build(config, grammars, trace, cls, threshold=threshold, kind=kind)
        made.use_v2_model_runner = second_runner
        # vLLM 0.25 cuts every prompt at its threshold; 0.32 only when others wait, which it must
        # not learn of.
        chunk = min(threshold, trace.budget) if threshold and BEFORE_0_32 else trace.budget
        engine = Engine(made)
        traffic = Traffic(trace, engine, chunk)
        traffic.drain()
        for i, a in enumerate(trace.arrivals):
            name = f"r{i}"
            fits = traffic.geometry.never_fits_message(a.prompt, a.max_tokens) is None
            assert (engine.ended[name] is FinishReason.ERROR) != fits
            if fits and engine.ended[name] is not FinishReason.ABORT:
                limit = trace.length(a) - a.prompt
                assert engine.outputs[name] == min(a.stop_after, limit)
        assert not made.requests and not made.running
        pool = made.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == trace.capacity
        checked += traffic.watch.steps

    run()
    assert checked > 1000


def trace_of(**given) -> Trace:
    engine = {
        "max_running": 4,
        "budget": 8,
        "max_model_len": 64,
        "capacity": 60,
        "window": None,
        "by_priority": False,
    }
    return Trace(**{**engine, **given}, arrivals=(), pauses={})


def asking(prompt: int, max_tokens: int = 4, priority: int = 0, blocked: bool = False) -> Arrival:
    never = max_tokens + 1
    return Arrival(0, prompt, max_tokens, never, priority, int(blocked), None, False, None)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_request_that_never_fits_ends_with_an_error_that_names_the_numbers(config, grammars, cls):
    engine = Engine(build(config, grammars, trace_of(capacity=5), cls))
    engine.add("large", asking(17, 9))
    engine.add("small", asking(5, 3))
    engine.finish()
    assert engine.ended["large"] is FinishReason.ERROR
    assert "17 of prompt, max_tokens 9" in engine.reasons["large"]
    assert "7 KV cache blocks, but the engine has 5" in engine.reasons["large"]
    assert engine.ended["small"] is FinishReason.LENGTH


def test_a_refusal_reaches_the_user_while_the_engine_is_paused(config, grammars):
    engine = Engine(build(config, grammars, trace_of(capacity=5)))
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.add("large", asking(17, 9))
    engine.finish()
    assert engine.ended["large"] is FinishReason.ERROR


def test_the_ledger_counts_as_vllm_does(config, grammars):
    trace = trace_of(max_model_len=32, capacity=20, window=9, budget=8)
    full = KVGroup(BLOCK_SIZE)
    # vLLM 0.32 keeps what a batch under way may still read; 0.25 does not wait for it.
    ahead = 8 if BEFORE_0_32 else 2 * 8
    for kind, group in (
        ("window", KVGroup(BLOCK_SIZE, -(-(9 - 1 + ahead) // BLOCK_SIZE) + 1)),
        ("chunk", KVGroup(BLOCK_SIZE, -(-(9 + ahead) // BLOCK_SIZE) + 1)),
        ("state", KVGroup(32)),
    ):
        made = build(config, grammars, trace, AsyncIsolateScheduler, kind=kind)
        assert made.kv_geometry == KVGeometry((full, group), 20, 32), kind


@pytest.mark.skipif(BEFORE_0_32, reason="vLLM 0.25 has no per-request error for it")
def test_a_grammar_that_does_not_compile_ends_its_request_alone(config, grammars):
    engine = Engine(build(config, grammars, trace_of()))
    bad = engine.add("bad", asking(3, blocked=True))
    bad.structured_output_request.grammar = ValueError("no such grammar")
    engine.add("good", asking(3, 2))
    engine.finish()
    assert engine.ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}


def test_a_pause_between_two_chunks_changes_nothing(config, grammars):
    engine = Engine(build(config, grammars, trace_of(budget=4)))
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
def test_streaming_input_is_refused_by_name(config, grammars, cls):
    engine = Engine(build(config, grammars, trace_of(), cls))
    engine.add("session", asking(5), resumable=True)
    engine.finish()
    assert engine.ended["session"] is FinishReason.ERROR
    assert "streaming input" in engine.reasons["session"]
    assert engine.scheduler.num_waiting_for_streaming_input == 0


def test_multimodal_inputs_are_refused_by_name(config, grammars):
    engine = Engine(build(config, grammars, trace_of()))
    engine.add("picture", asking(5), mm_features=[SimpleNamespace(identifier="x")])
    engine.finish()
    assert engine.ended["picture"] is FinishReason.ERROR
    assert "images, audio or video" in engine.reasons["picture"]


@pytest.mark.parametrize("cls", CLASSES)
def test_clearing_the_kv_cache_of_running_requests_ends_them_by_name(config, grammars, cls):
    engine = Engine(build(config, grammars, trace_of(), cls))
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
def test_a_blocked_head_neither_starves_nor_is_starved(config, grammars, cls, by_priority):
    engine = Engine(build(config, grammars, trace_of(by_priority=by_priority), cls))
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
def test_an_engine_of_blocked_requests_still_decodes_and_then_idles(config, grammars, cls):
    engine = Engine(build(config, grammars, trace_of(), cls))
    engine.add("runs", asking(3, 5))
    blocked = engine.add("blocked", asking(3, 2, blocked=True))
    for _ in range(10):
        engine.step()
    assert engine.ended == {"runs": FinishReason.LENGTH}
    assert engine.step() == {}
    blocked.structured_output_request.grammar = Grammar()
    engine.finish()
    assert engine.outputs["blocked"] == 2


def test_a_prompt_that_vllm_will_not_run_does_not_stop_the_others(config, grammars, monkeypatch):
    engine = Engine(build(config, grammars, trace_of()))
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


def test_a_preemption_is_an_error_that_names_the_request(config, grammars, monkeypatch):
    engine = Engine(build(config, grammars, trace_of()))
    engine.add("victim", asking(3, 6))
    engine.step()
    monkeypatch.setattr(
        engine.scheduler.kv_cache_manager, "allocate_slots", lambda *args, **kwargs: None
    )
    with pytest.raises(RuntimeError, match="preempted victim"):
        engine.step()


def test_blocks_that_nobody_reserved_are_an_error(config, grammars):
    engine = Engine(build(config, grammars, trace_of()))
    engine.add("honest", asking(3, 6))
    engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(3)
    with pytest.raises(RuntimeError, match=r"holds 4 KV cache blocks, but CoRun reserved 3"):
        engine.step()


def test_more_than_one_token_in_decode_is_an_error(config, grammars):
    engine = Engine(build(config, grammars, trace_of()))
    engine.add("odd", asking(3, 6))
    engine.step()
    engine.requests["odd"].num_computed_tokens -= 1
    engine.requests["odd"].num_prompt_tokens = 2
    with pytest.raises(RuntimeError, match=r"more than one token in decode for .*odd"):
        engine.step()


def test_vllm_is_put_back_as_it_was_after_an_error(config, grammars, monkeypatch):
    engine = Engine(build(config, grammars, trace_of()))
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


def test_slots_are_those_of_max_num_active_seqs_where_vllm_has_it(config, grammars):
    if not hasattr(config.scheduler_config, "max_num_active_seqs"):
        pytest.skip("this vLLM has no max_num_active_seqs")
    config.scheduler_config.max_num_active_seqs = 2
    try:
        made = build(config, grammars, trace_of())
    finally:
        config.scheduler_config.max_num_active_seqs = None
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
def test_what_cannot_be_isolated_is_refused_by_name(config, grammars, setting, value, name):
    *path, last = setting.split(".")
    holder = getattr(config, path[0]) if path else config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, last, value)
        for cls in CLASSES:
            with pytest.raises(ValueError, match=f"isolate policy cannot run with {name}"):
                build(config, grammars, trace_of(), cls)


def test_an_unknown_queue_or_kv_cache_is_an_error(config, grammars, monkeypatch):
    monkeypatch.setattr(scheduler, "_KNOWN_QUEUES", frozenset({"waiting"}))
    with pytest.raises(RuntimeError, match="waiting queues that CoRun does not know"):
        build(config, grammars, trace_of())
    monkeypatch.undo()
    monkeypatch.setattr(kv_geometry, "_CAPPED", frozenset())
    with pytest.raises(ValueError, match="SlidingWindowManager"):
        build(config, grammars, trace_of(window=9))
