"""Decode steps of an engine in this process: how long they take, and on which operators.

Requests of given lengths are brought into decode together. Some steps are then timed as they are,
some more under PyTorch's profiler.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corun.bench.kernel_types import CPU_RULES, CUDA_RULES, breakdown

if TYPE_CHECKING:
    from vllm import LLM

WARM_STEPS = 8
_SPARE_TOKENS = 16
_SPECIAL_IDS = 10  # token ids that are left out at both ends: many tokenizers keep controls there


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of one decode step.

    wall_us: median of the steps that were not profiled. by_type, unclassified: means over the
    profiled steps, of the device's kernels where there is a GPU, else of the host's operators.
    """

    wall_us: float
    by_type: dict[str, float]
    unclassified: dict[str, float]

    @property
    def total_us(self) -> float:
        """The step's time, what its operators leave idle included."""
        return max(self.wall_us, sum(self.by_type.values()))


def measure_steps(llm: "LLM", lengths: Sequence[int], *, steps: int, seed: int = 0) -> StepTimes:
    """Measure decode steps of requests with prompts of `lengths` tokens, all running together.

    steps: how many to time, and how many more to profile. ValueError where the engine cannot hold
    them, RuntimeError where they never decode together.
    """
    engine = llm.llm_engine
    max_tokens = WARM_STEPS + 2 * steps + _steps_to_start(engine.vllm_config, lengths)
    _check_room(engine.vllm_config, lengths, max_tokens)
    names = _add_requests(engine, lengths, max_tokens, seed)
    try:
        _start(engine, len(lengths), limit=max_tokens)
        for _ in range(WARM_STEPS):
            _step(engine, len(lengths))
        walls = []
        for _ in range(steps):
            started = time.perf_counter()
            _step(engine, len(lengths))
            walls.append((time.perf_counter() - started) * 1e6)
        times, rules = _profile(engine, len(lengths), steps)
    finally:
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
    found = breakdown(times, rules)
    if not any(found.by_type.values()):
        raise RuntimeError("the profiler saw nothing run; is another profiler attached?")
    return StepTimes(statistics.median(walls), found.by_type, found.unclassified)


def _steps_to_start(config: Any, lengths: Sequence[int]) -> int:
    """Engine steps until all requests decode, at most: the first may decode in all of them."""
    scheduler = config.scheduler_config
    tokens = getattr(scheduler, "max_num_scheduled_tokens", None)  # CoRun's chunks may be smaller
    budget = (tokens or scheduler.max_num_batched_tokens) - len(lengths)
    return -(-sum(lengths) // max(budget, 1)) + len(lengths) + _SPARE_TOKENS


def _check_room(config: Any, lengths: Sequence[int], max_tokens: int) -> None:
    rows, longest = config.scheduler_config.max_num_seqs, max(lengths) + max_tokens
    if len(lengths) > rows:
        raise ValueError(
            f"{len(lengths)} requests cannot decode together with max_num_seqs={rows}; raise it "
            "or ask for fewer rows"
        )
    if longest > config.model_config.max_model_len:
        raise ValueError(
            f"a request of {longest} tokens ({max(lengths)} of context) is longer than "
            f"max_model_len={config.model_config.max_model_len}; ask for less context"
        )
    cache = config.cache_config
    block, blocks = cache.block_size, cache.num_gpu_blocks
    needed = sum(-(-(n + max_tokens) // block) for n in lengths)
    if blocks is not None and needed >= blocks:
        raise ValueError(
            f"the KV cache has {blocks} blocks and these requests need {needed}; give it more "
            "memory, or ask for fewer rows or less context"
        )


def _add_requests(engine: Any, lengths: Sequence[int], max_tokens: int, seed: int) -> list[str]:
    import numpy as np

    from corun.verify.drive import sampling_params

    params = {
        "temperature": 0.6,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "detokenize": False,
    }
    rng = np.random.default_rng(seed)
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    names = []
    for i, length in enumerate(lengths):
        prompt = rng.integers(_SPECIAL_IDS, vocabulary - _SPECIAL_IDS, length).tolist()
        names.append(f"steps/{seed}/{i}")
        engine.add_request(names[-1], {"prompt_token_ids": prompt}, sampling_params(params))
    return names


def _start(engine: Any, rows: int, limit: int) -> None:
    """Step until every request got a token in one step."""
    for _ in range(limit):
        if sum(len(output.outputs) for output in engine.step()) == rows:
            return
    raise RuntimeError(f"{rows} requests did not decode together within {limit} steps")


def _step(engine: Any, rows: int) -> None:
    got = sum(len(output.outputs) for output in engine.step())
    if got != rows:
        raise RuntimeError(f"a decode step gave {got} tokens, not {rows}: a request was held back")


def _profile(engine: Any, rows: int, steps: int) -> tuple[Iterator[tuple[str, float]], Any]:
    """(Name, microseconds per step) of everything that ran, and the rules to sort it by."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize()  # vLLM runs a step ahead: what was launched before is not counted
    with profile(activities=[activity]) as profiler:
        for _ in range(steps):
            _step(engine, rows)
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu:
        return _device_times(profiler, steps), CUDA_RULES
    return _host_times(profiler, steps), CPU_RULES


def _device_times(profiler: Any, steps: int) -> Iterator[tuple[str, float]]:
    from torch.autograd import DeviceType

    for event in profiler.key_averages():
        # A label put around launches is shown on the device too, over the kernels it covers.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield event.key, event.self_device_time_total / steps


def _host_times(profiler: Any, steps: int) -> Iterator[tuple[str, float]]:
    for event in profiler.key_averages():
        if not event.is_user_annotation:
            yield event.key, event.self_cpu_time_total / steps
