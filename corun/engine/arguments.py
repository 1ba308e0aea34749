"""Seam: the engine's arguments. CoRun's settings go in; settings that break the contract stay out.

``EngineArgs.create_engine_config`` is the one place that ``LLM``, ``AsyncLLM``, ``vllm serve`` and
every program that embeds vLLM pass through. Under CoRun it first settles the arguments
(``settle``), then vLLM builds its config from them, then the finished config is checked
(``check_config``): what only vLLM can resolve (the model's kind, quantization, async scheduling) is
known there.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from corun.config import MEASURE, CoRunConfig, resolve
from corun.engine import compilation, environment, gemm, refusals, split_switch
from corun.engine.choose import choose
from corun.engine.refusals import (
    ASYNC_SCHEDULER,
    ASYNC_SPLIT_SCHEDULER,
    CPU_WORKER,
    GPU_WORKER,
    SYNCHRONOUS,
    UNTESTED,
    refuse,
)
from corun.engine.scheduler_limits import never_starts
from corun.engine.subject import subject
from corun.engine.wrap_once import wrap_once
from corun.plan import Plan

logger = init_logger("vllm.corun")

SEAMS = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context",)),
    ("vllm.engine.arg_utils", "EngineArgs.create_model_config"),
    ("vllm.config", "SchedulerConfig.max_num_scheduled_tokens"),
)

PLAN_KEY, SUBJECT_KEY = "corun_plan", "corun_subject"
_ASKED, _BATCHED = "corun_asked_tokens", "corun_batched_tokens"
# The same on every entry point (vLLM's own defaults differ between LLM and the server), so that a
# request asked offline and one asked over HTTP are in one domain.
GPU_ROWS, GPU_TOKENS = 256, 8192
CPU_ROWS, CPU_TOKENS = 32, 2048

# Defaults that are switched off, with one log line: (field, value).
SWITCHED_OFF: tuple[tuple[str, Any], ...] = (
    ("disable_cascade_attn", True),
    ("enable_batch_sharded_sampling", False),
)


@dataclass(frozen=True, slots=True)
class Settled:
    """The plan, and ``max_num_batched_tokens`` as vLLM's own config must end up with it."""

    plan: Plan
    batched_tokens: int


def _rows_and_tokens(args: EngineArgs) -> tuple[int, int]:
    on_cpu = current_platform.is_cpu()
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    rows = args.max_num_seqs or (CPU_ROWS if on_cpu else GPU_ROWS)
    given = args.max_num_batched_tokens
    if given and given == getattr(args, _BATCHED, None):  # settled before, by CoRun itself
        given = getattr(args, _ASKED)
    tokens = given or (CPU_TOKENS if on_cpu else GPU_TOKENS)
    if not given:
        tokens = max(tokens, rows)
    if tokens < rows:
        raise ValueError(
            f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({rows}): a decode step of "
            f"{rows} rows would not fit. Raise the first or lower the second"
        )
    return rows, tokens


def _settle_prefix_caching(args: EngineArgs, plan: Plan, changed: list[str]) -> None:
    if plan.grants.prefix_cache:
        return
    if args.enable_prefix_caching:
        why = "a cache hit changes the shape of the prefill"
        if plan.certified:
            why += ", and the certificate does not show that this changes nothing"
        refuse("enable_prefix_caching", True, why)
    if args.enable_prefix_caching is None:
        changed.append("enable_prefix_caching=False")
    args.enable_prefix_caching = False


def _scheduler(plan: Plan) -> str | None:
    """The scheduler class, for asynchronous scheduling; None: vLLM's own."""
    if not plan.grants.free:
        return ASYNC_SCHEDULER
    return ASYNC_SPLIT_SCHEDULER if plan.split_beyond else None


def _switch_off(args: EngineArgs, changed: list[str]) -> None:
    for name, value in SWITCHED_OFF:
        if hasattr(args, name) and getattr(args, name) != value:
            if name == "disable_cascade_attn" and args.disable_cascade_attn is None:
                continue  # vLLM 0.32 has no cascade attention left, and warns about the setting
            setattr(args, name, value)
            changed.append(f"{name}={value}")


def settle(args: EngineArgs, config: CoRunConfig) -> Settled:
    """Put the plan into `args`, in place. ValueError names a setting that breaks the contract."""
    refusals.check(args)
    environment.settle()
    changed: list[str] = []
    if current_platform.is_cpu() and not args.enforce_eager:
        # One way to run on a CPU, so that what was certified and verified is what serves.
        args.enforce_eager = True
        changed.append("enforce_eager=True")
    rows, tokens = _rows_and_tokens(args)
    batched = compilation.tokens_compiled_for(args, tokens, GPU_TOKENS)
    model_config = args.create_model_config()
    config = split_switch.settle(config, args, model_config)
    plan = choose(config, args, model_config, rows, tokens, compiled_for=batched)
    if not plan.constrained:
        batched = tokens
    elif not current_platform.is_cpu():
        gemm.settle(os.environ)
    _settle_prefix_caching(args, plan, changed)
    _switch_off(args, changed)
    args.max_num_seqs, args.max_num_batched_tokens = rows, batched
    setattr(args, _ASKED, tokens)
    setattr(args, _BATCHED, batched)
    plan = compilation.settle_graphs(args, plan)
    compilation.settle_passes(args)
    compilation.settle_determinism(args)
    if not args.language_model_only and not args.limit_mm_per_prompt:
        args.language_model_only = True
    args.worker_cls = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    args.scheduler_cls = _scheduler(plan)
    if config.split_decode and not plan.split_beyond:
        logger.info("CoRun: split_decode is ignored under the policy %s", plan.policy)
    resolved = replace(config, policy=plan.policy, split_decode=bool(plan.split_beyond))
    measured = {}
    if config.certificate == MEASURE:
        measured[SUBJECT_KEY] = subject(args, model_config, batched, split=config.split_decode)
    args.additional_config = {
        **(args.additional_config or {}),
        "corun": resolved.to_mapping(),
        PLAN_KEY: plan.to_mapping(),
        **measured,
    }
    logger.info(
        "CoRun: policy %s (%s); %s; changed: %s",
        plan.policy,
        plan.reason,
        plan.summary(),
        ", ".join(changed) or "nothing",
    )
    return Settled(plan, batched)


def _unsupported(vllm_config: Any) -> str | None:
    """Why the finished config cannot run under CoRun, or None."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    reasons = (
        (model.runner_type != "generate", f"it generates no text (runner {model.runner_type})"),
        (model.is_encoder_decoder, f"it is an encoder-decoder model, and {UNTESTED}"),
        (model.quantization is not None, f"of its quantization {model.quantization}: {UNTESTED}"),
        (
            vllm_config.speculative_config is not None,
            "it brings a speculative decoder, whose accepted drafts change the shape of a step",
        ),
        (
            model.is_attention_free or model.is_hybrid,
            f"it has state-space layers, and {UNTESTED}",
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


def check_config(vllm_config: Any, settled: Settled) -> None:
    """Check vLLM's finished config against the plan. ValueError says what is wrong."""
    plan = settled.plan
    if why := _unsupported(vllm_config):
        raise ValueError(f"CoRun cannot run this model, because {why}. Turn CoRun off to run it")
    scheduler = vllm_config.scheduler_config
    if scheduler.max_num_seqs != plan.decode_rows:
        raise ValueError(
            f"vLLM changed max_num_seqs from {plan.decode_rows} to {scheduler.max_num_seqs}"
        )
    if scheduler.max_num_batched_tokens != settled.batched_tokens:
        raise ValueError(
            f"vLLM changed max_num_batched_tokens from {settled.batched_tokens} to "
            f"{scheduler.max_num_batched_tokens}; ask for that number"
        )
    if plan.constrained:
        scheduler.max_num_scheduled_tokens = plan.max_prefill_tokens
    if why := next(never_starts(vllm_config), None):
        raise ValueError(f"CoRun's {plan.policy} policy cannot run with {why}")
    if (cls := _scheduler(plan)) and not scheduler.async_scheduling:
        scheduler.scheduler_cls = SYNCHRONOUS[cls]
    if vllm_config.cache_config.enable_prefix_caching and not plan.grants.prefix_cache:
        raise ValueError("vLLM turned prefix caching on again; CoRun cannot run with it")
    compilation.settle_autotune(vllm_config)
    compilation.check(vllm_config.compilation_config, plan)


def _create_engine_config(original: Callable) -> Callable:
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = resolve(self.additional_config)
        if not config.enabled:
            return original(self, *args, **kwargs)
        from corun.engine import seams

        seams.require()
        settled = settle(self, config)
        vllm_config = original(self, *args, **kwargs)
        check_config(vllm_config, settled)
        return vllm_config

    return create_engine_config


def install() -> None:
    """Hold every engine's arguments; calling it again changes nothing."""
    wrap_once(EngineArgs, "create_engine_config", _create_engine_config)
