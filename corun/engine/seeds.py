"""Seam: seeds in the front end. Every request that generates has one, and every output reports it.

1. ``InputProcessor.process_inputs`` works on its own copy of the sampling parameters; a request
   that brought no seed gets one there, so parameters shared by many prompts stay as they are and
   each prompt draws for itself. A seed is folded to a signed 64-bit integer; one that does not fit
   is the user's error, raised before the request reaches the engine. (-1 is no seed: vLLM's own
   ``SamplingParams`` turns it into None.) The same goes for an ``EngineCoreRequest`` that a program
   made by itself and hands to ``add_request``.
2. The ``n`` samples of a request get ``child_seed(seed, i)`` instead of vLLM's ``seed + i``.
3. ``CompletionOutput.seed``: the seed of that very sample, in every output, streamed or final.
4. ``EngineCore.preprocess_add_request`` refuses a request that came without, from whatever front
   end: vLLM answers that one with an error, where an exception in a worker would end the engine.

Requests of an engine that runs without CoRun are left alone.
"""

from collections.abc import Callable
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from corun.config import resolve
from corun.engine import cache_hits
from corun.engine.admission import RequestRefusedError
from corun.engine.wrap_once import wrap_once
from corun.seeds import child_seed, draw_seed, fold_seed, session_seed

SEAMS: tuple[tuple, ...] = (
    (
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("request_id", "params", "resumable"),
    ),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ("prompt",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM.add_request", ("prompt",)),
    ("vllm.v1.engine.core", "EngineCore.preprocess_add_request", ("request",)),
    ("vllm.v1.engine.parallel_sampling", "ParentRequest.get_child_info", ("index",)),
    ("vllm.v1.engine.output_processor", "RequestState.from_new_request", ("request",)),
    ("vllm.v1.engine.output_processor", "RequestState._new_completion_output"),
    ("vllm.outputs", "CompletionOutput"),
    ("vllm.sampling_params", "SamplingParams.clone"),
)

# Set on parameters that CoRun seeded. SamplingParams takes extra attributes and never sends them.
_SEEDED = "corun_seeded"


_NO_SEED = (
    "CoRun: a request without a seed reached the engine. Send requests through vLLM's LLM, "
    "AsyncLLM or server in a process where the CoRun plugin is loaded, or set a seed"
)
_NO_TEXT = "CoRun's engines generate text, and take no pooling requests"


def take_seed(sampling_params: SamplingParams) -> int:
    """The signed 64-bit seed of a request that reached a worker.

    RuntimeError where it has none: sampling it would not be repeatable.
    """
    if sampling_params.seed is None:
        raise RuntimeError(_NO_SEED)
    return fold_seed(sampling_params.seed)


def seed_request(request: EngineCoreRequest) -> None:
    """Give a request its seed, on the parameters that it owns.

    RequestRefusedError: its seed is no integer of 64 bits, or it does not generate text.
    """
    params = request.sampling_params
    if params is None:
        raise RequestRefusedError(_NO_TEXT)
    if params.seed is not None:
        try:
            params.seed = fold_seed(params.seed)
        except ValueError as e:
            raise RequestRefusedError(str(e)) from None
    elif request.resumable:
        params.seed = session_seed(request.request_id)
    else:
        params.seed = draw_seed()
    setattr(params, _SEEDED, True)


def _enabled(holder: Any) -> bool:
    return resolve(holder.vllm_config.additional_config).enabled


def _process_inputs(original: Callable) -> Callable:
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = original(self, *args, **kwargs)
        if _enabled(self):
            seed_request(request)
            cache_hits.settle(request.sampling_params)
        return request

    return process_inputs


def _add_request(original: Callable) -> Callable:
    """For LLMEngine and AsyncLLM, whose coroutine it hands on."""

    def add_request(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(prompt, EngineCoreRequest) and _enabled(self):
            if prompt.sampling_params is not None:  # may be shared with other requests
                prompt.sampling_params = prompt.sampling_params.clone()
            seed_request(prompt)
            cache_hits.settle(prompt.sampling_params)
        return original(self, request_id, prompt, *args, **kwargs)

    return add_request


def _preprocess_add_request(original: Callable) -> Callable:
    def preprocess_add_request(self: EngineCore, request: EngineCoreRequest) -> Any:
        if _enabled(self):
            if request.sampling_params is None:
                raise RequestRefusedError(_NO_TEXT)
            if request.sampling_params.seed is None:
                raise RequestRefusedError(_NO_SEED)
        return original(self, request)

    return preprocess_add_request


def _get_child_info(original: Callable) -> Callable:
    def get_child_info(self: ParentRequest, index: int) -> tuple[str, SamplingParams]:
        request_id, params = original(self, index)
        if getattr(self.sampling_params, _SEEDED, False):
            params.seed = child_seed(self.sampling_params.seed, index)
        return request_id, params

    return get_child_info


def _from_new_request(original: Callable) -> Callable:
    def from_new_request(cls: type[RequestState], *args: Any, **kwargs: Any) -> RequestState:
        request = kwargs["request"] if "request" in kwargs else args[1]
        state = original(cls, *args, **kwargs)
        params = request.sampling_params
        state.seed = None if params is None else params.seed
        return state

    return from_new_request


def _new_completion_output(original: Callable) -> Callable:
    def new_completion_output(self: RequestState, *args: Any, **kwargs: Any) -> CompletionOutput:
        output = original(self, *args, **kwargs)
        output.seed = self.seed
        return output

    return new_completion_output


def install() -> None:
    """Put the seeds into this process's front end; calling it again changes nothing."""
    CompletionOutput.seed = None  # beam search makes outputs of its own, which draw nothing
    wrap_once(InputProcessor, "process_inputs", _process_inputs)
    wrap_once(LLMEngine, "add_request", _add_request)
    wrap_once(AsyncLLM, "add_request", _add_request)
    wrap_once(EngineCore, "preprocess_add_request", _preprocess_add_request)
    wrap_once(ParentRequest, "get_child_info", _get_child_info)
    wrap_once(RequestState, "from_new_request", _from_new_request)
    wrap_once(RequestState, "_new_completion_output", _new_completion_output)
