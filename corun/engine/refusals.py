"""Engine arguments that CoRun cannot keep its contract with, and why."""

from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs

SCHEDULER = "corun.engine.scheduler.IsolateScheduler"
ASYNC_SCHEDULER = "corun.engine.scheduler.AsyncIsolateScheduler"
SPLIT_SCHEDULER = "corun.engine.split_cache.SplitScheduler"
ASYNC_SPLIT_SCHEDULER = "corun.engine.split_cache.AsyncSplitScheduler"
SYNCHRONOUS = {ASYNC_SCHEDULER: SCHEDULER, ASYNC_SPLIT_SCHEDULER: SPLIT_SCHEDULER}
GPU_WORKER = "corun.engine.worker.CoRunGPUWorker"
CPU_WORKER = "corun.engine.cpu_worker.CoRunCPUWorker"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine argument that CoRun cannot keep its contract with.

    name: the EngineArgs field. why: the reason, completing "... because". allowed: values that are
    fine, besides the field's own default.
    """

    name: str
    why: str
    allowed: tuple = (None, False, 0)


UNTESTED = "it has not been tested under CoRun"
BY_TIMING = "it picks kernels by timing, which may end otherwise at the next start"
REFUSED: tuple[Refusal, ...] = (
    Refusal("speculative_config", "accepted drafts change the shape of a step"),
    Refusal("spec_method", "accepted drafts change the shape of a step"),
    Refusal("spec_model", "accepted drafts change the shape of a step"),
    Refusal("spec_tokens", "accepted drafts change the shape of a step"),
    Refusal("diffusion_config", "diffusion models do not decode one token a step"),
    Refusal("enable_lora", UNTESTED),
    Refusal("default_mm_loras", UNTESTED),
    Refusal("enable_eplb", "moving experts between devices changes shapes with the load"),
    Refusal("enable_elastic_ep", "moving experts between devices changes shapes with the load"),
    Refusal("enable_expert_parallel", "tokens of all requests are exchanged between devices"),
    Refusal("enable_dbo", "splitting a batch in two depends on its co-runners"),
    Refusal("pipeline_parallel_size", UNTESTED, (None, 1)),
    Refusal("prefill_context_parallel_size", UNTESTED, (None, 1)),
    Refusal("decode_context_parallel_size", UNTESTED, (None, 1)),
    Refusal("kv_transfer_config", "KV from elsewhere was made under shapes that CoRun cannot see"),
    Refusal("ec_transfer_config", UNTESTED),
    Refusal("kv_offloading_size", "a KV hit changes the shape of the prefill"),
    Refusal("kv_sharing_fast_prefill", UNTESTED),
    Refusal("logits_processors", "CoRun cannot know whether they look at other requests' rows"),
    Refusal("quantization", UNTESTED),
    Refusal("calculate_kv_scales", "scales computed from a batch depend on its requests"),
    Refusal("enable_flashinfer_autotune", BY_TIMING),
    Refusal("use_fp64_gumbel", "CoRun draws its own random numbers"),
    Refusal("max_num_partial_prefills", "CoRun prefills one request at a time", (None, 1)),
    Refusal(
        "max_num_scheduled_tokens",
        "CoRun's plan sets how many tokens a step may hold (max_num_batched_tokens asks for other "
        "numbers)",
        (None,),
    ),
    Refusal("long_prefill_token_threshold_adaptive", "chunks would depend on co-runners"),
    Refusal("return_sampling_mask", UNTESTED),
    Refusal("enable_trace_replay", UNTESTED),
    Refusal("watermark_config", UNTESTED),
    Refusal("enable_hc_sp", UNTESTED),
    Refusal(
        "scheduler_cls",
        "CoRun brings its own scheduler",
        (None, *SYNCHRONOUS, *SYNCHRONOUS.values()),
    ),
    Refusal("worker_cls", "CoRun brings its own worker", (None, "auto", GPU_WORKER, CPU_WORKER)),
)


def default(args: EngineArgs, name: str) -> Any:
    """The default of one engine argument."""
    for f in fields(args):
        if f.name == name:
            return f.default if f.default is not MISSING else f.default_factory()  # type: ignore
    raise AttributeError(name)


def refuse(setting: str, value: Any, why: str) -> NoReturn:
    """ValueError for a setting that breaks the contract."""
    raise ValueError(
        f"CoRun cannot run with {setting}={value!r}, because {why}. "
        f"Remove that setting, or turn CoRun off (policy 'off')"
    )


def check(args: EngineArgs) -> None:
    """ValueError names the first argument that was set against the contract."""
    for refusal in REFUSED:
        value = getattr(args, refusal.name, None)
        if value in refusal.allowed or not hasattr(args, refusal.name):
            continue
        if value != default(args, refusal.name):
            refuse(refusal.name, value, refusal.why)
    if args.kernel_config.enable_flashinfer_autotune:
        refuse("kernel_config.enable_flashinfer_autotune", True, BY_TIMING)
    if args.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        refuse("kv_cache_dtype", args.kv_cache_dtype, UNTESTED)
