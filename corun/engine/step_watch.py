"""Seam: what each step of an engine in this process held, for benchmarks of any mode.

Works on plain vLLM as on CoRun's engines: the scheduler tells what it scheduled, the runner's
dispatcher how many rows were run. Steps are executed in the order in which they were scheduled.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from corun.engine import padding
from corun.engine.scheduled import computed_before

SEAMS: tuple[tuple, ...] = (
    ("vllm.v1.engine.core_client", "InprocClient"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_request_counts"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.usage"),
)


@dataclass(slots=True)
class StepRow:
    """One step. end_s: on the ``perf_counter`` clock, when its output was taken; None before that.

    prefill_tokens: tokens scheduled of prompts, or to be recomputed. decode_rows: requests that
    brought one token behind their prompt. running, waiting: requests after the step. kv_used: share
    of the KV cache in use then, 0 to 1.
    """

    prefill_tokens: int
    decode_rows: int
    end_s: float | None = None
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0


@dataclass(slots=True)
class StepWatch:
    """Steps in order; ``rows_run`` has one entry a step, where the runner tells it."""

    steps: list[StepRow] = field(default_factory=list)
    rows_run: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget the steps so far (after warm-up, from idle)."""
        self.steps.clear()
        self.rows_run.clear()


def watch(llm: Any) -> StepWatch:
    """Watch `llm`, a vLLM LLM whose engine core lives in this process. ValueError: it does not."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise ValueError(
            "steps can only be watched in this process; set VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    found = StepWatch()
    _watch_scheduler(core.scheduler, found)
    llm.collective_rpc(_watch_rows, args=(found.rows_run,))
    return found


def _watch_scheduler(scheduler: Any, found: StepWatch) -> None:
    schedule, update = scheduler.schedule, scheduler.update_from_output
    pending: dict[int, StepRow] = {}

    def seen_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            row = StepRow(*_tokens(scheduler.requests, output))
            pending[id(output)] = row
            found.steps.append(row)
        return output

    def seen_update(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(scheduler_output, *args, **kwargs)
        if (row := pending.pop(id(scheduler_output), None)) is not None:
            row.end_s = time.perf_counter()
            row.running, row.waiting = scheduler.get_request_counts()
            row.kv_used = min(1.0, max(0.0, float(scheduler.kv_cache_manager.usage)))
        return result

    scheduler.schedule, scheduler.update_from_output = seen_schedule, seen_update


def _tokens(requests: dict[str, Any], output: Any) -> tuple[int, int]:
    """Prefill tokens and decode rows of a step."""
    computed = computed_before(output)
    prefill = decode = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        if tokens == 1 and computed[request_id] >= request.num_prompt_tokens:
            decode += 1
        else:
            prefill += tokens
    return prefill, decode


def _watch_rows(worker: Any, rows: list[int]) -> None:
    """Note the rows of every step that `worker` runs, behind whatever pads them."""

    def noted(descriptor: Any, _mode: Any) -> Any:
        rows.append(descriptor.num_tokens)
        return descriptor

    padding.follow(worker.model_runner, noted)
