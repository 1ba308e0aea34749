"""Seam: seeds in the front end. Every request that generates has one, and every output reports it.

1. ``InputProcessor.process_inputs`` works on its own copy of the sampling parameters; a request
   that brought no seed gets one there, so parameters shared by many prompts stay as they are and
   each prompt draws for itself. A seed is folded to a signed 64-bit integer; one that does not fit
   is the user's error, raised before the request reaches the engine.
2. The ``n`` samples of a request get ``child_seed(seed, i)`` instead of vLLM's ``seed + i``.
3. ``CompletionOutput.seed``: the seed of that very sample, in every output, streamed or final.

Requests of an engine that runs without CoRun are left alone.
"""

from collections.abc import Callable
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from corun.config import resolve
from corun.engine import cache_hits
from corun.engine.wrap_once import wrap_once
from corun.seeds import child_seed, draw_seed, fold_seed, session_seed

SEAMS: tuple[tuple, ...] = (
    (
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("request_id", "params", "resumable"),
    ),
    ("vllm.v1.engine.parallel_sampling", "ParentRequest.get_child_info", ("index",)),
    ("vllm.v1.engine.output_processor", "RequestState.from_new_request", ("request",)),
    ("vllm.v1.engine.output_processor", "RequestState._new_completion_output"),
    ("vllm.outputs", "CompletionOutput"),
    ("vllm.sampling_params", "SamplingParams.clone"),
)

# Set on parameters that CoRun seeded. SamplingParams takes extra attributes and never sends them.
_SEEDED = "corun_seeded"


def take_seed(sampling_params: SamplingParams) -> int:
    """The signed 64-bit seed of a request that reached a worker.

    RuntimeError where it has none: sampling it would not be repeatable.
    """
    if sampling_params.seed is None:
        raise RuntimeError(
            "CoRun: a request without a seed reached the engine. Send requests through vLLM's LLM, "
            "AsyncLLM or server in a process where the CoRun plugin is loaded, or set a seed"
        )
    return fold_seed(sampling_params.seed)


def seed_request(request: EngineCoreRequest) -> None:
    """Give a generation request its seed, on the parameters that it owns."""
    params = request.sampling_params
    if params is None:  # pooling
        return
    if params.seed is not None:
        params.seed = fold_seed(params.seed)
    elif request.resumable:
        params.seed = session_seed(request.request_id)
    else:
        params.seed = draw_seed()
    setattr(params, _SEEDED, True)


def _process_inputs(original: Callable) -> Callable:
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = original(self, *args, **kwargs)
        if resolve(self.vllm_config.additional_config).enabled:
            seed_request(request)
            cache_hits.settle(request.sampling_params)
        return request

    return process_inputs


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
    wrap_once(ParentRequest, "get_child_info", _get_child_info)
    wrap_once(RequestState, "from_new_request", _from_new_request)
    wrap_once(RequestState, "_new_completion_output", _new_completion_output)
