"""The seam of the front end's seeds: no request without a safe seed gets past it. No engine."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from corun.engine import seeds
from corun.seeds import fold_seed

ON, OFF = {"corun": {"policy": "isolate"}}, {"corun": {"policy": "off"}}
EDGES = (0, 1, -2, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, -(2**63), np.int64(5), np.uint64(2**63))
BAD = (2**64, -(2**63) - 1, 1.5, "7")


def request_of(seed=None, params=None, pooling=None):
    if params is None and pooling is None:
        params = SamplingParams()
        params.seed = seed
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=pooling,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def travelled(request):
    """The request as an engine core in another process decodes it."""
    return MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))


@pytest.fixture
def installed(monkeypatch):
    """The seams over stubs of vLLM's methods, which hand on the request."""

    async def add_request_async(self, request_id, prompt, params=None):
        return prompt

    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, request: request)
    monkeypatch.setattr(LLMEngine, "add_request", lambda self, request_id, prompt, params: prompt)
    monkeypatch.setattr(AsyncLLM, "add_request", add_request_async)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda self: None, raising=False)
    monkeypatch.setattr(EngineCore, "preprocess_add_request", lambda self, request: (request, 0))
    seeds.install()
    seeds.install()


def engine_of(cls, additional=ON):
    engine = cls.__new__(cls)
    engine.vllm_config = SimpleNamespace(additional_config=additional)
    return engine


def test_a_folded_minus_one_would_be_lost_between_processes():
    """Why fold_seed never gives -1: vLLM's decoder runs SamplingParams' own checks."""
    request = request_of(-1)
    assert request.sampling_params.seed == -1
    assert travelled(request).sampling_params.seed is None


@pytest.mark.parametrize("seed", EDGES)
def test_every_accepted_seed_reaches_a_worker_as_it_was_folded(installed, seed):
    request = engine_of(InputProcessor).process_inputs(request_of(seed))
    there, _ = engine_of(EngineCore).preprocess_add_request(travelled(request))
    here, _ = engine_of(EngineCore).preprocess_add_request(request)  # an engine in this process
    folded = fold_seed(seed)
    assert [seeds.take_seed(r.sampling_params) for r in (here, there)] == [folded, folded]
    assert seeds.take_seed(there.sampling_params.clone()) == folded


def test_minus_one_from_a_user_is_no_seed_and_gets_one(installed):
    request = request_of(params=SamplingParams(seed=-1))
    drawn = engine_of(InputProcessor).process_inputs(request).sampling_params.seed
    assert 0 <= drawn < 2**53
    again = engine_of(InputProcessor).process_inputs(request_of(drawn))
    assert again.sampling_params.seed == drawn  # reported, it replays


@pytest.mark.parametrize("seed", BAD)
def test_any_other_seed_is_refused_where_the_request_is_made(installed, seed):
    with pytest.raises(VLLMValidationError, match="seed") as refused:
        engine_of(InputProcessor).process_inputs(request_of(seed))
    assert isinstance(refused.value, ValueError)  # a server answers 400, LLM raises ValueError


def submit(cls, request, additional=ON):
    added = engine_of(cls, additional).add_request("r", request, None)
    return asyncio.run(added) if cls is AsyncLLM else added


@pytest.mark.parametrize("cls", [LLMEngine, AsyncLLM])
def test_requests_that_a_program_made_by_itself_are_seeded_too(installed, cls):
    shared = SamplingParams(prompt_logprobs=1)
    first, second = (submit(cls, request_of(params=shared)) for _ in range(2))
    drawn = first.sampling_params.seed, second.sampling_params.seed
    assert None not in drawn
    assert drawn[0] != drawn[1]
    assert shared.seed is None
    assert first.sampling_params.skip_reading_prefix_cache is True
    assert submit(cls, request_of(2**64 - 1)).sampling_params.seed == fold_seed(-1)
    with pytest.raises(VLLMValidationError, match="seed"):
        submit(cls, request_of(2**64))
    with pytest.raises(VLLMValidationError, match="generate text"):
        submit(cls, request_of(pooling=PoolingParams()))


def test_an_engine_core_refuses_what_no_front_end_of_coruns_sent(installed):
    core = engine_of(EngineCore)
    with pytest.raises(VLLMValidationError, match="without a seed reached the engine"):
        core.preprocess_add_request(request_of())
    with pytest.raises(VLLMValidationError, match="generate text"):
        core.preprocess_add_request(request_of(pooling=PoolingParams()))


@pytest.mark.parametrize("cls", [LLMEngine, AsyncLLM])
def test_engines_without_corun_are_left_alone(installed, cls):
    assert engine_of(InputProcessor, OFF).process_inputs(request_of()).sampling_params.seed is None
    assert submit(cls, request_of(), OFF).sampling_params.seed is None
    assert engine_of(EngineCore, OFF).preprocess_add_request(request_of())[1] == 0
    pooling = request_of(pooling=PoolingParams())
    assert submit(cls, pooling, OFF) is pooling


@pytest.mark.parametrize(
    ("module", "name", "prompt"),
    [
        ("completion", "CompletionRequest", {"prompt": "a"}),
        ("chat_completion", "ChatCompletionRequest", {"messages": []}),
        ("responses", "ResponsesRequest", {"input": "a"}),
    ],
)
def test_the_servers_endpoints_take_signed_64_bits_and_nothing_else(module, name, prompt):
    """vLLM's own bounds, which answer 400; the range of ``corun generate`` is the same."""
    pydantic = pytest.importorskip("pydantic")
    protocol = pytest.importorskip(f"vllm.entrypoints.openai.{module}.protocol")
    from corun.jobs.params import MAX_SEED, MIN_SEED

    request = getattr(protocol, name)
    for seed in (MIN_SEED, -1, MAX_SEED):
        assert request(model="m", seed=seed, **prompt).seed == seed
    for seed in (MIN_SEED - 1, MAX_SEED + 1, 1.5):
        with pytest.raises(pydantic.ValidationError, match="seed"):
            request(model="m", seed=seed, **prompt)
