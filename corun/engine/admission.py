"""Seam: the front end. A request that ``isolate`` can never run is refused where it is made.

The scheduler refuses such a request too, but it lives in the engine core, from where vLLM brings
back no exception: the user would see an output with ``finish_reason`` "error", a server's client an
internal error. So each front end asks its engine core once for the KV cache's geometry and checks
before it sends: ``LLM.generate`` raises RequestRefusedError, a server answers 400 with its message.
"""

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine

from corun.config import resolve
from corun.engine.refusals import ASYNC_SCHEDULER, SCHEDULER
from corun.engine.wrap_once import wrap_once
from corun.schedule.ledger import KVGeometry
from corun.schedule.refusal import refusal

SEAMS = (
    ("vllm.exceptions", "VLLMValidationError"),
    ("vllm.sampling_params", "SamplingParams.thinking_token_budget"),
    ("vllm.v1.engine.async_llm", "AsyncLLM.add_request"),
    ("vllm.v1.engine.core", "EngineCore"),
    ("vllm.v1.engine.core_client", "InprocClient"),
    ("vllm.v1.engine.core_client", "SyncMPClient.call_utility", ("method",)),
    ("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("method",)),
    ("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", ("resumable",)),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request"),
)

SCHEDULERS = frozenset({SCHEDULER, ASYNC_SCHEDULER})
_UTILITY = "corun_kv_geometry"  # a method of EngineCore, callable from its front ends
_GEOMETRY = "corun_kv_geometry"  # an attribute of an InputProcessor: KVGeometry


_SESSION = (
    "CoRun cannot stream input into a session with split_decode: what was decoded becomes a prompt "
    "there, whose rows are computed in another way. Send whole prompts, or leave split_decode off"
)


_THINKING = (
    "CoRun cannot keep its contract with thinking_token_budget: vLLM counts a request's thinking "
    "by its place in the batch, and begins anew when the request comes back to it, which depends "
    "on other requests. Leave it out, or turn CoRun off (policy 'off')"
)


class RequestRefusedError(VLLMValidationError, ValueError):
    """The ``isolate`` policy can never run this request; the message says why and what to do.

    vLLM 0.32 takes only its own validation errors for the sender's fault, and they are no
    ValueErrors there.
    """


def _report_geometry(core: EngineCore) -> dict[str, Any]:
    """The geometry that the engine core's scheduler counts with, in JSON form."""
    return core.scheduler.kv_geometry.to_mapping()


def _must_ask(engine: Any) -> bool:
    scheduler = engine.vllm_config.scheduler_config.scheduler_cls
    if isinstance(scheduler, type):
        scheduler = f"{scheduler.__module__}.{scheduler.__qualname__}"
    return scheduler in SCHEDULERS and not hasattr(engine.input_processor, _GEOMETRY)


def _keep(engine: Any, reported: dict[str, Any]) -> None:
    setattr(engine.input_processor, _GEOMETRY, KVGeometry.from_mapping(reported))


def _asking(original: Callable) -> Callable:
    def add_request(self: LLMEngine, *args: Any, **kwargs: Any) -> Any:
        if _must_ask(self):
            client = self.engine_core
            in_process = getattr(client, "engine_core", None)
            if isinstance(in_process, EngineCore):
                _keep(self, _report_geometry(in_process))
            else:
                _keep(self, client.call_utility(_UTILITY))
        return original(self, *args, **kwargs)

    return add_request


def _asking_async(original: Callable) -> Callable:
    async def add_request(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        if _must_ask(self):
            _keep(self, await self.engine_core.call_utility_async(_UTILITY))
        return await original(self, *args, **kwargs)

    return add_request


def _checking(original: Callable) -> Callable:
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        config = resolve(self.vllm_config.additional_config)
        sampling = request.sampling_params
        if config.enabled and getattr(sampling, "thinking_token_budget", None) is not None:
            raise RequestRefusedError(_THINKING)
        if request.resumable and config.split_decode:
            raise RequestRefusedError(_SESSION)
        geometry = getattr(self, _GEOMETRY, None)
        if geometry is not None:
            tokens = request.prompt_token_ids
            message = refusal(
                geometry,
                len(request.prompt_embeds if tokens is None else tokens),
                sampling.max_tokens if sampling is not None else 1,
                streaming=request.resumable,
                multimodal=bool(request.mm_features),
            )
            if message is not None:
                raise RequestRefusedError(message)
        return request

    return process_inputs


def install() -> None:
    """Put the check into every front end of this process, and the answer into its engine cores."""
    setattr(EngineCore, _UTILITY, _report_geometry)
    wrap_once(LLMEngine, "add_request", _asking)
    wrap_once(AsyncLLM, "add_request", _asking_async)
    wrap_once(InputProcessor, "process_inputs", _checking)
