"""Opens and closes the vLLM engines that verification runs on.

A verification needs engines that differ from a user's in nothing but what is being verified, so
the defaults here are few: small and eager on a CPU, vLLM's own on a GPU, and no prefix cache under
plain vLLM (a cache hit is a difference of its own, and would hide what the batch does).
"""

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corun.config import CoRunConfig
from corun.verify.workload import LONG_RUN, Limits

if TYPE_CHECKING:
    from vllm import LLM

CPU_ROWS, GPU_ROWS = 32, 256
CPU_KV_BYTES = 2 << 30
CPU_PLAIN_TOKENS = 32768
_BOTH = 4  # tokens past those that split decode never splits
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def open_engine(
    model: str, config: CoRunConfig, *, random_weights: bool = False, **engine_args: Any
) -> "LLM":
    """Start a vLLM engine for `model` under `config`; returns vLLM's LLM.

    random_weights: fill the model with seeded random weights instead of loading any (for a
    directory with only a config.json). engine_args: keywords of vLLM's LLM. A directory without a
    tokenizer gets none. Close it with ``close_engine``. ValueError where vLLM or CoRun refuses a
    setting.
    """
    from corun.plugin import register

    register()
    check_names(engine_args)
    import vllm.envs
    from vllm import LLM

    given = dict(engine_args)
    apart = vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING or given.get("tensor_parallel_size", 1) != 1
    if apart and (config.enabled or random_weights):
        from corun.engine.plugins import ensure_plugin

        ensure_plugin(os.environ)  # workers in processes of their own must load CoRun too
    if random_weights:
        from corun.engine import random_weights as loader

        loader.install()
        given["load_format"] = loader.LOAD_FORMAT
    if not has_tokenizer(model, given):
        given["skip_tokenizer_init"] = True
    extra = {**(given.pop("additional_config", None) or {}), "corun": config.to_mapping()}
    return LLM(model, additional_config=extra, **given)


def defaults(config: CoRunConfig, rows: int | None) -> dict[str, Any]:
    """Keywords of LLM that a verification uses unless the user says otherwise.

    rows: max_num_seqs, or None for 256 on a GPU and 32 on a CPU.
    """
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    chosen: dict[str, Any] = {"max_num_seqs": rows or (CPU_ROWS if on_cpu else GPU_ROWS)}
    if on_cpu:
        chosen |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES}
    if not config.enabled:
        chosen["enable_prefix_caching"] = False
        if on_cpu:
            # vLLM's CPU runner crashes when the prefill of a seeded request is cut in chunks.
            chosen["max_num_batched_tokens"] = CPU_PLAIN_TOKENS
    return chosen


def check_names(engine_args: Mapping[str, Any]) -> None:
    """ValueError names a keyword that vLLM's LLM does not take."""
    import inspect
    from dataclasses import fields
    from difflib import get_close_matches

    from vllm import LLM, EngineArgs

    known = {*inspect.signature(LLM.__init__).parameters, *(f.name for f in fields(EngineArgs))}
    for name in engine_args:
        if name not in known:
            near = get_close_matches(name, sorted(known), 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"vLLM has no engine argument {name!r}{hint}")


def limits_of(llm: "LLM") -> Limits:
    """What an open engine can hold."""
    config = llm.llm_engine.vllm_config
    blocks = config.cache_config.num_gpu_blocks
    return Limits(
        rows=config.scheduler_config.max_num_seqs,
        model_len=llm.model_config.max_model_len,
        kv_tokens=blocks * config.cache_config.block_size if blocks else None,
        has_tokenizer=tokenizer_of(llm) is not None,
        long_run=_long_run(config.additional_config or {}),
    )


def _long_run(additional: Mapping[str, Any]) -> int:
    """With split decode it starts where no row is split, and ends where all are."""
    from corun.engine.arguments import PLAN_KEY

    beyond = additional.get(PLAN_KEY, {}).get("split_beyond", 0)
    return max(LONG_RUN, beyond + _BOTH)


def tokenizer_of(llm: "LLM") -> Any | None:
    """The engine's tokenizer, or None."""
    return None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()


def has_tokenizer(model: str, engine_args: Mapping[str, Any]) -> bool:
    """Whether to start `model` with a tokenizer; anything but a bare local directory has one."""
    if "skip_tokenizer_init" in engine_args:
        return not engine_args["skip_tokenizer_init"]
    directory = Path(model)
    if engine_args.get("tokenizer") is not None or not directory.is_dir():
        return True
    return any((directory / name).exists() for name in _TOKENIZER_FILES)


def worker_reports(llm: Any, policy: str) -> Sequence[Mapping[str, Any]]:
    """What CoRun in each worker of an engine tells of itself.

    policy: what was asked for. RuntimeError where CoRun is not there.
    """
    try:
        found: Sequence[Mapping[str, Any]] = llm.collective_rpc("corun_report")
    except Exception as error:
        raise RuntimeError(
            f"policy {policy} was asked for, but the engine's worker has no CoRun report "
            f"({type(error).__name__}: {error}). Is CoRun installed as a package, so that vLLM's "
            f"worker processes load it?"
        ) from error
    return found


def close_engine(llm: "LLM") -> None:
    """Shut the engine down and free its memory; the caller must drop its own references too."""
    llm.llm_engine.engine_core.shutdown()
    # In one process the executor, and with it weights and KV cache, hangs on these two.
    engine = llm.llm_engine
    for name in ("model_executor", "engine_core"):
        if hasattr(engine, name):
            delattr(engine, name)
    del engine, llm.llm_engine
    gc.collect()
    import torch

    from corun.engine import graph_pool

    graph_pool.forget()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
