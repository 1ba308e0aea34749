"""Builds vLLM's own schedulers, and steps them as its engine core does.

No model runs: results are fed by hand. On every vLLM that CoRun supports (``make test-compat``).
"""

import json
import math
from collections import deque
from pathlib import Path

import torch
import vllm
from scheduler_traces import BLOCK_SIZE, NOT_PAUSED, PAUSED_ALL, PAUSED_NEW, Arrival, Trace
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from corun.engine.scheduler import AsyncIsolateScheduler, IsolateScheduler

CLASSES = (IsolateScheduler, AsyncIsolateScheduler)
WORD, STOP = 7, 9
PAUSES = {
    NOT_PAUSED: PauseState.UNPAUSED,
    PAUSED_NEW: PauseState.PAUSED_NEW,
    PAUSED_ALL: PauseState.PAUSED_ALL,
}
BEFORE_0_32 = vllm.__version__.startswith("0.25")
LLAMA = {
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
SHAPE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def second_spec(trace: Trace, kind: str):
    """The KV cache of a trace's second group of layers."""
    if kind == "window":
        return SlidingWindowSpec(**SHAPE, sliding_window=trace.window)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=trace.window)
    return MambaSpec(block_size=trace.max_model_len, shapes=((1,),), dtypes=(torch.float32,))


init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


class Builder:
    """Builds schedulers from one VllmConfig, `config`, which it fits to each trace."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(LLAMA))
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=64
            ),
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
        self.grammars = StructuredOutputManager(self.config)

    def __call__(self, trace: Trace, cls=IsolateScheduler, *, threshold=0, kind="window"):
        """A scheduler for the trace's engine. threshold: vLLM's long_prefill_token_threshold."""
        config = self.config
        config.model_config.max_model_len = trace.max_model_len
        config.scheduler_config.max_num_seqs = trace.max_running
        config.scheduler_config.max_num_batched_tokens = trace.budget
        config.scheduler_config.max_num_scheduled_tokens = None
        config.scheduler_config.long_prefill_token_threshold = threshold
        # vLLM bounds what a sliding window holds by the batches that may be under way at once.
        config.scheduler_config.async_scheduling = issubclass(cls, AsyncScheduler)
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
            structured_output_manager=self.grammars,
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
    """Steps a scheduler as vLLM's engine core does. depth: batches under way at once, 1 or 2.

    preempted: who lost its KV cache in the last step. begins: where each request of it began.
    """

    def __init__(self, made) -> None:
        self.scheduler = made
        self.depth = 2 if isinstance(made, AsyncScheduler) else 1
        self.under_way: deque = deque()
        self.may_wait = True
        self.preempted: list[str] = []
        self.begins: dict[str, int] = {}
        self.caches = made.vllm_config.cache_config.enable_prefix_caching
        self.arrivals: dict[str, Arrival] = {}
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, int] = {}
        self.ended: dict[str, FinishReason] = {}
        self.reasons: dict[str, str | int | None] = {}

    def add(self, name: str, arrival: Arrival, **given) -> Request:
        hasher = HASHER if self.caches else None
        request = make_request(name, arrival, block_hasher=hasher, **given)
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
        self.preempted, self.begins = [], {}
        self.may_wait = self.scheduler.has_requests()
        if not self.may_wait:
            return None
        output = self.scheduler.schedule()
        tokens = dict(output.num_scheduled_tokens)
        self.preempted = sorted(output.preempted_req_ids or ())
        sampled = []
        for name, n in tokens.items():
            request = self.requests[name]
            self.begins[name] = request.num_computed_tokens - n
            index = request.num_computed_tokens - request.num_prompt_tokens
            last = index + 1 == self.arrivals[name].stop_after
            sampled.append([] if request.is_prefill_chunk else [STOP if last else WORD])
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
