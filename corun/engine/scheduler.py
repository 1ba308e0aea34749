"""Seam: vLLM's scheduler, held to the ``isolate`` policy (paper, Algorithm 2).

``corun.schedule.isolate`` decides who runs; vLLM's own ``schedule`` then runs with only those
requests in sight, and everything hidden comes back in its old order. Works as ``scheduler_cls``,
synchronous or asynchronous.

A prompt's chunks are ``max_num_scheduled_tokens`` long (vLLM 0.25: or
``long_prefill_token_threshold``, if set) whatever else is there: vLLM sees one request, so neither
the budget nor the number of waiting requests can shorten a chunk. vLLM's DP prefill balancing
(``throttle_prefills``) is not followed; it would move prefills in time only.

A request that cannot be served ends with an error output whose ``stop_reason`` says why, because an
exception in ``add_request`` would end the engine core. ``corun.engine.admission`` tells users the
same earlier, as a ValueError.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from corun.engine.kv_geometry import read_geometry
from corun.schedule.isolate import Choice, IsolatePolicy, Kind, refusal
from corun.schedule.ledger import KVGeometry

logger = init_logger("vllm.corun")

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_QUEUES = "vllm.v1.core.sched.request_queue"
SEAMS = (
    (_SCHEDULER, "Scheduler.__init__", ("vllm_config",)),
    (_SCHEDULER, "Scheduler.schedule", ("throttle_prefills",)),
    (_SCHEDULER, "Scheduler.add_request", ("request",)),
    (_SCHEDULER, "Scheduler.finish_requests", ("request_ids", "finished_status")),
    (_SCHEDULER, "Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
    (_SCHEDULER, "Scheduler.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    (_SCHEDULER, "Scheduler.pause_state"),
    (_SCHEDULER, "Scheduler._is_blocked_waiting_status", ("status",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_after_schedule"),
    ("vllm.v1.core.sched.interface", "PauseState.PAUSED_ALL"),
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids"),
    ),
    (_QUEUES, "RequestQueue.peek_request"),
    (_QUEUES, "RequestQueue.pop_request"),
    (_QUEUES, "RequestQueue.remove_request", ("request",)),
    (_QUEUES, "SchedulingPolicy.FCFS"),
    (_QUEUES, "create_request_queue", ("policy",)),
    ("vllm.v1.engine", "EngineCoreOutput", ("request_id", "finish_reason", "stop_reason")),
    ("vllm.v1.engine", "EngineCoreOutputs", ("outputs",)),
    ("vllm.v1.engine", "FinishReason.ERROR"),
    ("vllm.v1.request", "RequestStatus.FINISHED_ERROR"),
    ("vllm.v1.request", "Request.has_encoder_inputs"),
)
SEAMS_BY_VERSION = {
    "0.25": ((_SCHEDULER, "Scheduler._try_promote_blocked_waiting_request", ("request",)),),
    "0.32": ((_SCHEDULER, "Scheduler._handle_blocked_waiting_request", ("request",)),),
}

# Every queue that either version keeps waiting requests in, and what moves a blocked one on.
_KNOWN_QUEUES = frozenset({"waiting", "skipped_waiting", "kv_holding_waiting"})
_PROMOTERS = ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request")

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object


def _breaks_isolation(config: Any) -> Iterator[str]:
    """What in a VllmConfig would let one request change another's shapes, or its place in KV."""
    if config.cache_config.enable_prefix_caching:
        yield "prefix caching (a hit changes the shape of the prefill)"
    if config.speculative_config is not None:
        yield "speculative decoding (a decode step would hold more than one token a request)"
    if getattr(config.model_config, "is_diffusion", False):
        yield "a diffusion model (it does not decode one token a step)"
    if config.model_config.is_encoder_decoder:
        yield "an encoder-decoder model (the KV cache it needs is not known on arrival)"
    if config.kv_transfer_config is not None:
        yield "a KV connector (its KV was not computed under CoRun, and it holds blocks of its own)"
    if config.ec_transfer_config is not None:
        yield "an encoder cache connector"
    if config.lora_config is not None:
        yield "LoRA (vLLM limits the adapters in a step by looking at all running requests)"
    scheduler = config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and budget < config.model_config.max_model_len:
        yield f"chunked prefill off and a budget of {budget} tokens, less than max_model_len"


class IsolateMixin(_Base):
    """Holds a vLLM scheduler to the ``isolate`` policy; put it before the scheduler class.

    ValueError: the engine's config, or its kind of KV cache, cannot keep the policy. RuntimeError
    from ``schedule``: vLLM did what the policy forbids; the engine must not go on.
    """

    running: list[Request]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if reasons := list(_breaks_isolation(vllm_config)):
            raise ValueError(
                f"CoRun's isolate policy cannot run with {'; '.join(reasons)}. "
                "Turn that off, or run with policy 'off'"
            )
        super().__init__(vllm_config, *args, **kwargs)
        self._queue_names = [n for n, v in vars(self).items() if isinstance(v, RequestQueue)]
        if unknown := set(self._queue_names) - _KNOWN_QUEUES:
            raise RuntimeError(f"vLLM has waiting queues that CoRun does not know: {unknown}")
        self._promote = next(getattr(self, name) for name in _PROMOTERS if hasattr(self, name))
        geometry = read_geometry(self.kv_cache_manager, self.max_model_len)
        slots = min(
            self.max_num_running_reqs,
            getattr(self, "max_num_active_reqs", self.max_num_running_reqs),
        )
        self.isolate: IsolatePolicy = IsolatePolicy(geometry, slots)
        self._arrivals = itertools.count()
        self._errors: list[tuple[int, EngineCoreOutput]] = []

    @property
    def kv_geometry(self) -> KVGeometry:
        """What the ledger counts with, for checks made before a request gets here."""
        return self.isolate.ledger.geometry

    def add_request(self, request: Request) -> None:
        """Queue a request, or end it with an error if it can never be served."""
        super().add_request(request)
        request.corun_arrival = next(self._arrivals)
        message = refusal(
            self.kv_geometry,
            request.num_prompt_tokens,
            request.max_tokens,
            streaming=request.resumable,
            multimodal=request.has_encoder_inputs,
        )
        if message is not None:
            self._end_with_error(request, message)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's SchedulerOutput for the next step: one prompt's chunk, or a decode step."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return super().schedule()
        choice = self.isolate.choose(self.running, self._head)
        with self._in_sight(choice):
            output = super().schedule()
        self.isolate.executed(choice, output.total_num_scheduled_tokens > 0)
        self._check(choice, output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's outputs by client, and those of requests that CoRun ended since the last step."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client_index, output in self._errors:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        self._errors.clear()
        return outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As vLLM's, but requests whose KV cache would be taken away end with an error."""
        if reset_running_requests:
            for request in list(self.running):
                self._end_with_error(
                    request,
                    "the KV cache was cleared while this request ran. Recomputing what it has "
                    "generated takes other shapes than decoding did, so its output would depend on "
                    "when that happened. Send it again; or pause with clear_cache=False, or with "
                    "mode='wait'",
                )
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _end_with_error(self, request: Request, message: str) -> None:
        logger.warning("CoRun ended request %s: %s", request.request_id, message)
        # vLLM's own way out for a request in any state; it also keeps the engine stepping until
        # update_from_output has run.
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            stop_reason=message,
        )
        self._errors.append((request.client_index, output))

    def _head(self) -> Request | None:
        """The first waiting request, in the engine's order, that is not waiting for something."""
        if self.pause_state is not PauseState.UNPAUSED:
            return None
        firsts = [self._first_ready(getattr(self, name)) for name in self._queue_names]
        ready = [request for request in firsts if request is not None]
        if self.policy is SchedulingPolicy.FCFS:
            return min(ready, key=lambda request: request.corun_arrival, default=None)
        return min(ready, default=None)

    def _first_ready(self, queue: RequestQueue) -> Request | None:
        if queue and self._is_ready(head := queue.peek_request()):
            return head
        return next((request for request in queue if self._is_ready(request)), None)

    def _is_ready(self, request: Request) -> bool:
        # vLLM moves a request on (its grammar is compiled, ...) only when it looks at it.
        return not self._is_blocked_waiting_status(request.status) or self._promote(request)

    @contextmanager
    def _in_sight(self, choice: Choice) -> Iterator[None]:
        """Hide every request that is not in `choice`; bring them back as they were."""
        running = self.running
        queues = {name: getattr(self, name) for name in self._queue_names}
        starting = choice.requests[0] if choice.kind is Kind.START else None
        try:
            # New queue objects rather than cleared ones: a priority queue cannot be cleared, and
            # refilling one would lose its order.
            for name in queues:
                setattr(self, name, create_request_queue(self.policy))
            if starting is None:
                self.running = choice.requests
            else:
                self.running = []
                self.waiting.add_request(starting)
            yield
        finally:
            started = starting in self.running
            self.running = running
            for name, queue in queues.items():
                setattr(self, name, queue)
            if starting is not None and started:
                self._take_out(starting)
                running.append(starting)

    def _take_out(self, request: Request) -> None:
        queues = [getattr(self, name) for name in self._queue_names]
        for queue in queues:
            if queue and queue.peek_request() is request:
                queue.pop_request()
                return
        for queue in queues:
            try:
                queue.remove_request(request)
            except ValueError:
                continue
            return
        raise AssertionError(f"{request.request_id} started but was not waiting")

    def _check(self, choice: Choice, output: Any) -> None:
        """RuntimeError if vLLM broke the policy: it would do so silently, in the outputs' bits."""
        if output.preempted_req_ids:
            raise RuntimeError(
                f"vLLM preempted {', '.join(sorted(output.preempted_req_ids))}; under CoRun's "
                "isolate policy the KV cache of every running request is reserved"
            )
        ledger = self.isolate.ledger
        held = ledger.geometry.capacity - self.kv_cache_manager.block_pool.get_num_free_blocks()
        if held > ledger.reserved:
            raise RuntimeError(
                f"vLLM holds {held} KV cache blocks, but CoRun reserved {ledger.reserved} for the "
                f"running requests ({', '.join(r.request_id for r in self.running)})"
            )
        tokens = output.num_scheduled_tokens
        if choice.kind is Kind.DECODE and output.total_num_scheduled_tokens != len(tokens):
            longer = [request_id for request_id, n in tokens.items() if n != 1]
            raise RuntimeError(f"vLLM scheduled more than one token in decode for {longer}")


class IsolateScheduler(IsolateMixin, Scheduler):
    """vLLM's synchronous scheduler under the ``isolate`` policy."""


class AsyncIsolateScheduler(IsolateMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler under the ``isolate`` policy."""
