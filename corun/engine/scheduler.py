"""Seam: vLLM's scheduler, held to what a plan grants (paper, Algorithm 2).

``corun.schedule.held`` decides who runs; vLLM's own ``schedule`` then runs with only those requests
in sight, and everything hidden comes back in its old order. Works as ``scheduler_cls``, synchronous
or asynchronous. The plan is the one in ``additional_config``; without one nothing is granted, which
is the ``isolate`` policy.

A prompt's chunks are ``max_num_scheduled_tokens`` long (vLLM 0.25: or
``long_prefill_token_threshold``, if set) whatever else is there: vLLM sees one request, or only
requests whose chunks fit together, so neither the budget nor the number of waiting requests can
shorten a chunk, unless the plan grants that. vLLM's DP prefill balancing (``throttle_prefills``) is
not followed; it would move prefills in time only.

A request that cannot be served ends with an error output whose ``stop_reason`` says why, because an
exception in ``add_request`` would end the engine core. ``corun.engine.admission`` tells users the
same earlier, as a ValueError.
"""

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from corun.engine.arguments import PLAN_KEY
from corun.engine.kv_geometry import read_geometry
from corun.engine.scheduler_limits import breaks_policy
from corun.engine.split_cache import SplitMixin
from corun.plan import Grants, Plan
from corun.schedule.held import Choice, HeldPolicy
from corun.schedule.ledger import KVGeometry
from corun.schedule.refusal import refusal
from corun.schedule.step_check import violation

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
    (_QUEUES, "RequestQueue.prepend_request", ("request",)),
    (_QUEUES, "RequestQueue.remove_request", ("request",)),
    (_QUEUES, "SchedulingPolicy.FCFS"),
    (_QUEUES, "create_request_queue", ("policy",)),
    ("vllm.v1.engine", "EngineCoreOutput", ("request_id", "finish_reason", "stop_reason")),
    ("vllm.v1.engine", "EngineCoreOutputs", ("outputs",)),
    ("vllm.v1.engine", "FinishReason.ERROR"),
    ("vllm.v1.request", "RequestStatus.FINISHED_ERROR"),
    ("vllm.v1.request", "RequestStatus.PREEMPTED"),
    ("vllm.v1.request", "RequestStatus.RUNNING"),
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


class HeldMixin(_Base):
    """Holds a vLLM scheduler to what its plan grants; put it before the scheduler class.

    ValueError: the engine's config, or its kind of KV cache, cannot keep the policy. RuntimeError
    from ``schedule``: vLLM did what the policy forbids; the engine must not go on.
    """

    running: list[Request]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        given = (vllm_config.additional_config or {}).get(PLAN_KEY)
        plan = None if given is None else Plan.from_mapping(given)
        grants = Grants() if plan is None else plan.grants
        self._policy_name = "isolate" if plan is None else plan.policy
        if reasons := list(breaks_policy(vllm_config, grants)):
            raise ValueError(
                f"CoRun's {self._policy_name} policy cannot run with {'; '.join(reasons)}. "
                "Turn that off, or run with policy 'off'"
            )
        super().__init__(vllm_config, *args, **kwargs)
        self._queue_names = [n for n, v in vars(self).items() if isinstance(v, RequestQueue)]
        if unknown := set(self._queue_names) - _KNOWN_QUEUES:
            raise RuntimeError(f"vLLM has waiting queues that CoRun does not know: {unknown}")
        self._promote = next(getattr(self, name) for name in _PROMOTERS if hasattr(self, name))
        # vLLM cuts prompts at its own budget, so that is what the policy must count with.
        step_tokens = self.max_num_scheduled_tokens
        if plan is not None and step_tokens > plan.max_prefill_tokens:
            raise ValueError(
                f"vLLM's steps may hold {step_tokens} tokens, but CoRun's plan allows "
                f"{plan.max_prefill_tokens}; set max_num_batched_tokens to that"
            )
        slots = min(
            self.max_num_running_reqs,
            getattr(self, "max_num_active_reqs", self.max_num_running_reqs),
        )
        geometry = read_geometry(self.kv_cache_manager, self.max_model_len)
        self.held: HeldPolicy = HeldPolicy(geometry, slots, grants, step_tokens)
        self._arrivals = itertools.count()
        self._errors: list[tuple[int, EngineCoreOutput]] = []

    @property
    def kv_geometry(self) -> KVGeometry:
        """What the ledger counts with, for checks made before a request gets here."""
        return self.held.ledger.geometry

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
        """vLLM's SchedulerOutput for the next step, which holds what the policy chose."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return super().schedule()
        next_ready = functools.partial(next, self._ready(), None)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        choice = self.held.choose(self.running, next_ready, free_blocks)
        output = self._run(choice)
        started = sum(r.status is RequestStatus.RUNNING for r in choice.starting)
        self.held.executed(choice, output.total_num_scheduled_tokens > 0, started)
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
        """As vLLM's, but requests that must not lose their KV cache end with an error."""
        if reset_running_requests and not self.held.grants.preemption:
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

    def _ready(self) -> Iterator[Request]:
        """The waiting requests that could start now, in the engine's order."""
        if self.pause_state is not PauseState.UNPAUSED:
            return
        queues = [getattr(self, name) for name in self._queue_names]
        key = _arrival if self.policy is SchedulingPolicy.FCFS else None
        for request in heapq.merge(*queues, key=key):
            # vLLM moves a request on (its grammar is compiled, ...) only when it looks at it.
            if self._is_blocked_waiting_status(request.status) and not self._promote(request):
                continue
            if getattr(request, "num_stale_output_tokens", 0) and not request.drop_stale_output:
                return  # a preempted request's last output is under way: vLLM 0.32 waits for it
            yield request

    def _run(self, choice: Choice[Request]) -> Any:
        """vLLM's step over `choice`: hide every other request, and bring them back as they were."""
        running = self.running
        shown = [*choice.decoding, *choice.partial]
        queues = {name: getattr(self, name) for name in self._queue_names}
        try:
            # New queue objects rather than cleared ones: a priority queue cannot be cleared, and
            # refilling one would lose its order.
            for name in queues:
                setattr(self, name, create_request_queue(self.policy))
            # Decode tokens first: what they leave of the budget is what the chunks were fit into.
            self.running = shown[:]
            for request in choice.starting:
                self.waiting.add_request(request)
            return super().schedule()
        finally:
            now_running = set(self.running)
            preempted = [r for r in shown if r.status is RequestStatus.PREEMPTED]
            self.running = running
            for name, queue in queues.items():
                setattr(self, name, queue)
            for request in choice.starting:
                if request in now_running:
                    self._take_out(request)
                    running.append(request)
            for request in preempted:
                running.remove(request)
            self._requeue(preempted)

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

    def _requeue(self, preempted: Sequence[Request]) -> None:
        """Put preempted requests at their place among the waiting: before all younger ones."""
        for request in preempted:
            older = []
            while self.policy is SchedulingPolicy.FCFS and self.waiting:
                if _arrival(self.waiting.peek_request()) > _arrival(request):
                    break
                older.append(self.waiting.pop_request())
            for waiting in (request, *reversed(older)):
                self.waiting.prepend_request(waiting)

    def _check(self, choice: Choice[Request], output: Any) -> None:
        """RuntimeError if vLLM broke the policy: it would do so silently, in the outputs' bits."""
        if not self.held.grants.preemption:
            self._check_reservations(output)
        if problem := violation(self.held, choice, output.num_scheduled_tokens):
            raise RuntimeError(problem)

    def _check_reservations(self, output: Any) -> None:
        if output.preempted_req_ids:
            raise RuntimeError(
                f"vLLM preempted {', '.join(sorted(output.preempted_req_ids))}; under CoRun's "
                f"{self._policy_name} policy the KV cache of every running request is reserved"
            )
        ledger = self.held.ledger
        held = ledger.geometry.capacity - self.kv_cache_manager.block_pool.get_num_free_blocks()
        if held > ledger.reserved:
            raise RuntimeError(
                f"vLLM holds {held} KV cache blocks, but CoRun reserved {ledger.reserved} for the "
                f"running requests ({', '.join(r.request_id for r in self.running)})"
            )


def _arrival(request: Request) -> int:
    return request.corun_arrival


class IsolateScheduler(HeldMixin, SplitMixin, Scheduler):
    """vLLM's synchronous scheduler, held to its plan; to ``isolate`` where it has none."""


class AsyncIsolateScheduler(HeldMixin, SplitMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler, held to its plan; to ``isolate`` where it has none."""
