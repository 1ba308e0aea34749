"""The front end's check: a request that can never run is refused before it is sent."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

from corun.config import CoRunConfig
from corun.engine import admission
from corun.schedule.ledger import KVGeometry, KVGroup

GEOMETRY = KVGeometry((KVGroup(16),), 10, 1000)
ISOLATED = CoRunConfig("isolate")
ISOLATE = "corun.engine.scheduler.IsolateScheduler"


def request_of(tokens: int, max_tokens: int | None = 8, **given):
    """What InputProcessor.process_inputs returns, as far as the check reads it."""
    plain = {
        "prompt_token_ids": [7] * tokens,
        "prompt_embeds": None,
        "sampling_params": SimpleNamespace(max_tokens=max_tokens) if max_tokens else None,
        "resumable": False,
        "mm_features": None,
    }
    return SimpleNamespace(**{**plain, **given})


class Client:
    """Stands in for an engine core's client in another process."""

    def __init__(self) -> None:
        self.calls = 0

    def call_utility(self, method):
        assert method == "corun_kv_geometry"
        self.calls += 1
        return GEOMETRY.to_mapping()

    async def call_utility_async(self, method):
        return self.call_utility(method)


@pytest.fixture
def installed(monkeypatch):
    """The seams over stubs of vLLM's methods; vLLM is put back afterwards."""
    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, request: request)

    def add_request(self, request):
        return self.input_processor.process_inputs(request)

    async def add_request_async(self, request):
        return self.input_processor.process_inputs(request)

    monkeypatch.setattr(LLMEngine, "add_request", add_request)
    monkeypatch.setattr(AsyncLLM, "add_request", add_request_async)
    monkeypatch.setattr(EngineCore, "corun_kv_geometry", None, raising=False)
    admission.install()


def engine_of(cls, client, scheduler=ISOLATE, config=ISOLATED):
    engine = cls.__new__(cls)
    engine.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        additional_config={"corun": config.to_mapping()},
    )
    engine.engine_core = client
    engine.input_processor = InputProcessor.__new__(InputProcessor)
    engine.input_processor.vllm_config = engine.vllm_config
    return engine


def test_the_engine_core_is_asked_once_and_too_long_requests_are_refused(installed):
    client = Client()
    engine = engine_of(LLMEngine, client)
    fits = request_of(100, 60)
    assert engine.add_request(fits) is fits
    with pytest.raises(admission.RequestRefusedError, match="need 11 KV cache blocks"):
        engine.add_request(request_of(100, 61))
    assert client.calls == 1


def test_a_pooling_request_counts_one_token_of_output(installed):
    engine = engine_of(LLMEngine, Client())
    assert engine.add_request(request_of(159, None))
    with pytest.raises(admission.RequestRefusedError, match="160 of prompt, max_tokens 1"):
        engine.add_request(request_of(160, None))


def test_the_asynchronous_front_end_does_the_same(installed, monkeypatch):
    # The stub has none of what the destructor shuts down.
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None, raising=False)
    client = Client()
    engine = engine_of(AsyncLLM, client)

    async def run():
        assert await engine.add_request(request_of(100, 60))
        with pytest.raises(admission.RequestRefusedError):
            await engine.add_request(request_of(100, 61))

    asyncio.run(run())
    assert client.calls == 1


def test_an_engine_core_in_this_process_is_asked_directly(installed):
    core = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(kv_geometry=GEOMETRY)
    engine = engine_of(LLMEngine, SimpleNamespace(engine_core=core))
    with pytest.raises(admission.RequestRefusedError):
        engine.add_request(request_of(100, 61))
    assert core.corun_kv_geometry() == GEOMETRY.to_mapping()


@pytest.mark.parametrize("scheduler", [None, "vllm.v1.core.sched.scheduler.Scheduler", dict])
def test_an_engine_without_the_policy_is_left_alone(installed, scheduler):
    client = Client()
    engine = engine_of(LLMEngine, client, scheduler)
    assert engine.add_request(request_of(10_000))
    assert client.calls == 0


def test_a_scheduler_class_counts_as_its_path(installed):
    from corun.engine.scheduler import AsyncIsolateScheduler

    client = Client()
    engine_of(LLMEngine, client, AsyncIsolateScheduler).add_request(request_of(1))
    assert client.calls == 1


def test_streaming_and_multimodal_requests_are_refused_by_name(installed):
    engine = engine_of(LLMEngine, Client())
    with pytest.raises(admission.RequestRefusedError, match="streaming input"):
        engine.add_request(request_of(1, resumable=True))
    with pytest.raises(admission.RequestRefusedError, match="images, audio or video"):
        engine.add_request(request_of(1, mm_features=[object()]))


def test_prompts_given_as_embeddings_are_counted_by_position(installed):
    engine = engine_of(LLMEngine, Client())
    assert engine.add_request(request_of(0, 60, prompt_token_ids=None, prompt_embeds=[0] * 100))
    with pytest.raises(admission.RequestRefusedError, match="100 of prompt"):
        engine.add_request(request_of(0, 61, prompt_token_ids=None, prompt_embeds=[0] * 100))


def test_a_refusal_is_both_a_value_error_and_vllms_own(installed):
    assert issubclass(admission.RequestRefusedError, ValueError)
    assert issubclass(admission.RequestRefusedError, VLLMValidationError)


def test_installing_twice_wraps_once(installed):
    before = LLMEngine.add_request, AsyncLLM.add_request, InputProcessor.process_inputs
    admission.install()
    assert before == (LLMEngine.add_request, AsyncLLM.add_request, InputProcessor.process_inputs)


def test_sessions_are_refused_where_decode_is_split(installed):
    for split in (True, False):
        engine = engine_of(LLMEngine, Client(), None, CoRunConfig("certified", split_decode=split))
        assert engine.add_request(request_of(1)).resumable is False
        if split:
            with pytest.raises(admission.RequestRefusedError, match="split_decode"):
                engine.add_request(request_of(1, resumable=True))
        else:
            assert engine.add_request(request_of(1, resumable=True)).resumable


@pytest.mark.parametrize("policy", ["isolate", "certified"])
def test_a_thinking_budget_is_refused_under_every_policy(installed, policy):
    """vLLM counts it by the place in the batch, which a request loses when others prefill."""
    engine = engine_of(LLMEngine, Client(), "vllm.Scheduler", CoRunConfig(policy))
    asked = SimpleNamespace(max_tokens=8, thinking_token_budget=4)
    with pytest.raises(admission.RequestRefusedError, match="thinking_token_budget"):
        engine.add_request(request_of(4, sampling_params=asked))
    plain = SimpleNamespace(max_tokens=8, thinking_token_budget=None)
    assert engine.add_request(request_of(4, sampling_params=plain))
    off = engine_of(LLMEngine, Client(), "vllm.Scheduler", CoRunConfig("off"))
    assert off.add_request(request_of(4, sampling_params=asked))
