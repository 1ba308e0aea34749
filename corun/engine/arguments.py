"""Seam: the engine's arguments. CoRun's settings go in; settings that break the contract stay out.

``EngineArgs.create_engine_config`` is the one place that ``LLM``, ``AsyncLLM``, ``vllm serve`` and
every program that embeds vLLM pass through. Under CoRun it first settles the arguments
(``settle``), then vLLM builds its config from them, then the finished config is checked
(``check_config``): what only vLLM can resolve (the model's kind, quantization, async scheduling) is
known there.
"""

import functools
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from corun.config import CoRunConfig, resolve
from corun.engine import environment
from corun.plan import Plan

logger = init_logger("vllm.corun")

SEAMS = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context",)),
    ("vllm.config", "CUDAGraphMode.FULL_DECODE_ONLY"),
    ("vllm.config", "CompilationConfig.cudagraph_capture_sizes"),
)

PLAN_KEY = "corun_plan"
# The same on every entry point (vLLM's own defaults differ between LLM and the server), so that a
# request asked offline and one asked over HTTP are in one domain.
GPU_ROWS, GPU_PREFILL_TOKENS = 256, 8192
CPU_ROWS, CPU_PREFILL_TOKENS = 32, 2048

SCHEDULER = "corun.engine.scheduler.IsolateScheduler"
ASYNC_SCHEDULER = "corun.engine.scheduler.AsyncIsolateScheduler"
GPU_WORKER = "corun.engine.worker.CoRunGPUWorker"
CPU_WORKER = "corun.engine.cpu_worker.CoRunCPUWorker"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine argument that ``isolate`` cannot keep its contract with.

    name: the EngineArgs field. why: the reason, completing "... because". allowed: values that are
    fine, besides the field's own default.
    """

    name: str
    why: str
    allowed: tuple = (None, False, 0)


_UNTESTED = "it has not been tested under CoRun"
REFUSED: tuple[Refusal, ...] = (
    Refusal("enable_prefix_caching", "a cache hit changes the shape of the prefill"),
    Refusal("speculative_config", "accepted drafts change the shape of a step"),
    Refusal("spec_method", "accepted drafts change the shape of a step"),
    Refusal("spec_model", "accepted drafts change the shape of a step"),
    Refusal("spec_tokens", "accepted drafts change the shape of a step"),
    Refusal("diffusion_config", "diffusion models do not decode one token a step"),
    Refusal("enable_lora", _UNTESTED),
    Refusal("default_mm_loras", _UNTESTED),
    Refusal("enable_eplb", "moving experts between devices changes shapes with the load"),
    Refusal("enable_elastic_ep", "moving experts between devices changes shapes with the load"),
    Refusal("enable_expert_parallel", "tokens of all requests are exchanged between devices"),
    Refusal("enable_dbo", "splitting a batch in two depends on its co-runners"),
    Refusal("pipeline_parallel_size", _UNTESTED, (None, 1)),
    Refusal("prefill_context_parallel_size", _UNTESTED, (None, 1)),
    Refusal("decode_context_parallel_size", _UNTESTED, (None, 1)),
    Refusal("kv_transfer_config", "KV from elsewhere was made under shapes that CoRun cannot see"),
    Refusal("ec_transfer_config", _UNTESTED),
    Refusal("kv_offloading_size", "a KV hit changes the shape of the prefill"),
    Refusal("kv_sharing_fast_prefill", _UNTESTED),
    Refusal("logits_processors", "CoRun cannot know whether they look at other requests' rows"),
    Refusal("quantization", _UNTESTED),
    Refusal("calculate_kv_scales", "scales computed from a batch depend on its requests"),
    Refusal("use_fp64_gumbel", "CoRun draws its own random numbers"),
    Refusal("max_num_partial_prefills", "CoRun prefills one request at a time", (None, 1)),
    Refusal("long_prefill_token_threshold_adaptive", "chunks would depend on co-runners"),
    Refusal("return_sampling_mask", _UNTESTED),
    Refusal("enable_trace_replay", _UNTESTED),
    Refusal("watermark_config", _UNTESTED),
    Refusal("enable_hc_sp", _UNTESTED),
    Refusal("scheduler_cls", "CoRun brings its own scheduler", (None, SCHEDULER, ASYNC_SCHEDULER)),
    Refusal("worker_cls", "CoRun brings its own worker", (None, "auto", GPU_WORKER, CPU_WORKER)),
)

# Defaults that are switched off, with one log line: (field, value).
SWITCHED_OFF: tuple[tuple[str, Any], ...] = (
    ("enable_prefix_caching", False),
    ("disable_cascade_attn", True),
    ("enable_batch_sharded_sampling", False),
)


def _default(args: EngineArgs, name: str) -> Any:
    for f in fields(args):
        if f.name == name:
            return f.default if f.default is not MISSING else f.default_factory()  # type: ignore
    raise AttributeError(name)


def _refuse(setting: str, value: Any, why: str) -> None:
    raise ValueError(
        f"CoRun cannot run with {setting}={value!r}, because {why}. "
        f"Remove that setting, or turn CoRun off (policy 'off')"
    )


def choose_policy(config: CoRunConfig) -> tuple[str, str]:
    """The policy that runs for what was asked, and why, in one sentence."""
    if config.policy == "auto":
        return "isolate", "no certificate says that more shapes are safe, and isolate needs none"
    if config.policy in ("pack", "certified"):
        raise ValueError(
            f"the policy {config.policy!r} needs a certificate of this machine's shape classes, "
            "which this version of CoRun cannot make yet; use 'isolate' or 'auto'"
        )
    return config.policy, "you asked for it"


def _rows_and_tokens(args: EngineArgs) -> tuple[int, int]:
    on_cpu = current_platform.is_cpu()
    rows = args.max_num_seqs or (CPU_ROWS if on_cpu else GPU_ROWS)
    tokens = args.max_num_batched_tokens or (CPU_PREFILL_TOKENS if on_cpu else GPU_PREFILL_TOKENS)
    if not args.max_num_batched_tokens:
        tokens = max(tokens, rows)
    if tokens < rows:
        raise ValueError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({rows}): a decode step of "
            f"{rows} rows would not fit. Raise the first or lower the second"
        )
    return rows, tokens


def _settle_graphs(args: EngineArgs, rows: int) -> bool:
    """FULL_DECODE_ONLY graphs with the one capture size `rows`. Returns whether graphs are used."""
    from vllm.config import CUDAGraphMode

    compilation = args.compilation_config
    mode = compilation.cudagraph_mode
    if args.enforce_eager or current_platform.is_cpu() or mode == CUDAGraphMode.NONE:
        return False
    if mode not in (None, CUDAGraphMode.FULL_DECODE_ONLY):
        _refuse(
            "compilation_config.cudagraph_mode", mode.name, "decode must replay its one graph alone"
        )
    for holder, name in (
        (args, "cudagraph_capture_sizes"),
        (compilation, "cudagraph_capture_sizes"),
        (args, "max_cudagraph_capture_size"),
        (compilation, "max_cudagraph_capture_size"),
    ):
        value = getattr(holder, name)
        if value not in (None, rows, [rows]):
            _refuse(name, value, f"the one captured size is max_num_seqs ({rows})")
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    args.cudagraph_capture_sizes = None
    args.max_cudagraph_capture_size = None
    compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_capture_sizes = [rows]
    return True


def _settle_passes(args: EngineArgs) -> None:
    passes = args.compilation_config.pass_config
    for name in ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms"):
        if not hasattr(passes, name):
            continue
        if getattr(passes, name):
            _refuse(
                f"compilation_config.pass_config.{name}", True, "it replaces the fixed all-reduce"
            )
        setattr(passes, name, False)
    attention = args.attention_config
    if getattr(attention, "flash_attn_max_num_splits_for_cuda_graph", None) is not None:
        attention.flash_attn_max_num_splits_for_cuda_graph = 1


def settle(args: EngineArgs, config: CoRunConfig) -> Plan:
    """Put the plan into `args`, in place. ValueError names a setting that breaks the contract."""
    policy, reason = choose_policy(config)
    for refusal in REFUSED:
        value = getattr(args, refusal.name, None)
        if value in refusal.allowed or not hasattr(args, refusal.name):
            continue
        if refusal.name == "enable_prefix_caching" or value != _default(args, refusal.name):
            _refuse(refusal.name, value, refusal.why)
    if args.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        _refuse("kv_cache_dtype", args.kv_cache_dtype, _UNTESTED)
    environment.settle()
    changed = []
    for name, value in SWITCHED_OFF:
        if hasattr(args, name) and getattr(args, name) != value:
            if name == "disable_cascade_attn" and args.disable_cascade_attn is None:
                continue  # vLLM 0.32 has no cascade attention left, and warns about the setting
            setattr(args, name, value)
            changed.append(f"{name}={value}")
    rows, tokens = _rows_and_tokens(args)
    args.max_num_seqs, args.max_num_batched_tokens = rows, tokens
    graph = _settle_graphs(args, rows)
    _settle_passes(args)
    if not args.language_model_only and not args.limit_mm_per_prompt:
        args.language_model_only = True
    args.worker_cls = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    args.scheduler_cls = ASYNC_SCHEDULER
    plan = Plan(policy, rows, tokens, graph, reason)
    resolved = CoRunConfig(policy=policy, strict=config.strict, step_log=config.step_log)
    args.additional_config = {
        **(args.additional_config or {}),
        "corun": resolved.to_mapping(),
        PLAN_KEY: plan.to_mapping(),
    }
    logger.info(
        "CoRun: policy %s (%s); decode steps of %d rows, prefill chunks of at most %d tokens; "
        "switched off: %s",
        policy,
        reason,
        rows,
        tokens,
        ", ".join(changed) or "nothing",
    )
    return plan


def _unsupported(vllm_config: Any) -> str | None:
    """Why the finished config cannot run under CoRun, or None."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    reasons = (
        (model.runner_type != "generate", f"it generates no text (runner {model.runner_type})"),
        (model.is_encoder_decoder, f"it is an encoder-decoder model, and {_UNTESTED}"),
        (model.quantization is not None, f"of its quantization {model.quantization}: {_UNTESTED}"),
        (
            vllm_config.speculative_config is not None,
            "it brings a speculative decoder, whose accepted drafts change the shape of a step",
        ),
        (
            model.is_attention_free or model.is_hybrid,
            f"it has state-space layers, and {_UNTESTED}",
        ),
        (
            parallel.distributed_executor_backend == "external_launcher"
            and parallel.tensor_parallel_size > 1,
            "under an external launcher each rank has a front end of its own, and would draw its "
            "own seeds",
        ),
        (
            parallel.data_parallel_size > 1 and model.is_moe,
            "data-parallel MoE models exchange tokens between replicas",
        ),
    )
    return next((why for applies, why in reasons if applies), None)


def check_config(vllm_config: Any, plan: Plan) -> None:
    """Check vLLM's finished config against the plan. ValueError says what is wrong."""
    if why := _unsupported(vllm_config):
        raise ValueError(f"CoRun cannot run this model, because {why}. Turn CoRun off to run it")
    scheduler = vllm_config.scheduler_config
    if scheduler.max_num_seqs != plan.decode_rows:
        raise ValueError(
            f"vLLM changed max_num_seqs from {plan.decode_rows} to {scheduler.max_num_seqs}"
        )
    if scheduler.max_num_batched_tokens != plan.max_prefill_tokens:
        raise ValueError(
            f"vLLM changed max_num_batched_tokens from {plan.max_prefill_tokens} to "
            f"{scheduler.max_num_batched_tokens}; ask for that number"
        )
    if not scheduler.async_scheduling:
        scheduler.scheduler_cls = SCHEDULER
    if vllm_config.cache_config.enable_prefix_caching:
        raise ValueError("vLLM turned prefix caching on again; CoRun cannot run with it")
    compilation = vllm_config.compilation_config
    if plan.decode_graph and (
        compilation.cudagraph_mode.name != "FULL_DECODE_ONLY"
        or list(compilation.cudagraph_capture_sizes) != [plan.decode_rows]
    ):
        raise ValueError(
            f"vLLM changed the decode graph to {compilation.cudagraph_mode.name} at "
            f"{compilation.cudagraph_capture_sizes}; use enforce_eager=True"
        )


def install() -> None:
    """Wrap ``EngineArgs.create_engine_config``; once, however often it is called."""
    create: Callable[..., Any] = EngineArgs.create_engine_config
    if hasattr(create, "__corun__"):
        return

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = resolve(self.additional_config)
        if not config.enabled:
            return create(self, *args, **kwargs)
        from corun.engine import seams

        seams.require()
        plan = settle(self, config)
        vllm_config = create(self, *args, **kwargs)
        check_config(vllm_config, plan)
        return vllm_config

    create_engine_config.__corun__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
