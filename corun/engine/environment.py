"""Environment variables that reach the arithmetic: pinned before any worker starts.

Workers inherit them. A value that the user set against the contract is refused, not overridden.
``corun.engine.gemm_check`` looks for what is not listed here.
"""

import os
from collections.abc import Mapping, MutableMapping

import torch
from vllm.platforms import current_platform

# name -> (value, why)
PINNED: dict[str, tuple[str, str]] = {
    "VLLM_USE_FLASHINFER_SAMPLER": ("0", "its results vary with the number of rows"),
    # Padding rows go through the experts like any other row, so that the MoE shape is fixed. vLLM's
    # default differs between versions.
    "VLLM_MOE_SKIP_PADDING": ("0", "the number of rows in the experts would follow the load"),
}
PINNED_CPU: dict[str, tuple[str, str]] = {
    "VLLM_CPU_ATTN_SPLIT_KV": ("0", "KV splits are chosen from the whole batch"),
    "VLLM_USE_V2_MODEL_RUNNER": ("0", "CoRun's CPU seams are those of the V1 runner"),
}
REFUSED: dict[str, str] = {
    "VLLM_BATCH_INVARIANT": "it replaces the kernels that CoRun keeps",
}
_OFF = ("", "0", "false")
# OpenMP's ways to give a parallel region fewer threads than it asks for; KMP_* are those of Intel's
# runtime, which vLLM recommends. vLLM's oneDNN GEMM counts on the threads that it asked for: the
# part of the output that was meant for the missing ones stays as the memory was, at random.
_THREAD_LIMITS = ("OMP_THREAD_LIMIT", "KMP_DEVICE_THREAD_LIMIT", "KMP_ALL_THREADS")
_NO_DYNAMIC = (*_OFF, "f", ".false.", "no", "off")


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _most_threads(env: Mapping[str, str]) -> int:
    """The most OpenMP threads that a worker may ask for."""
    here = torch.get_num_threads()
    in_process = env.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
    if in_process or env.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        return here
    # vLLM gives a worker process as many as the CPUs that it binds it to.
    return max(here, usable_cpus())


def _number(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:  # OpenMP ignores it
        return None


def _capped_by(env: Mapping[str, str]) -> str | None:
    """The variable that makes OpenMP's teams smaller than asked for, or None."""
    if env.get("OMP_DYNAMIC", "").strip().lower() not in _NO_DYNAMIC:
        return "OMP_DYNAMIC"
    levels = _number(env.get("OMP_MAX_ACTIVE_LEVELS", ""))
    if levels is not None and levels < 1:
        return "OMP_MAX_ACTIVE_LEVELS"
    for name in _THREAD_LIMITS:
        limit = _number(env.get(name, ""))
        if limit is not None and limit < _most_threads(env):
            return name
    return None


def _check_openmp(env: Mapping[str, str]) -> None:
    name = _capped_by(env)
    if name is not None:
        raise ValueError(
            f"CoRun cannot run with {name}={env[name]} on a CPU, because OpenMP may then start "
            f"fewer threads than a step asks for (up to {_most_threads(env)}), and vLLM's GEMM "
            "leaves what the missing ones should compute unwritten. Unset it; OMP_NUM_THREADS "
            "sets the number of threads"
        )


def settle(environ: MutableMapping[str, str] | None = None) -> None:
    """Pin the variables in `environ` (default: this process). ValueError names a conflict."""
    env = os.environ if environ is None else environ
    for name, why in REFUSED.items():
        if env.get(name, "").lower() not in _OFF:
            raise ValueError(f"CoRun cannot run with {name}={env[name]}, because {why}. Unset it")
    if current_platform.is_cpu():
        _check_openmp(env)
    pinned = {**PINNED, **(PINNED_CPU if current_platform.is_cpu() else {})}
    for name, (value, why) in pinned.items():
        given = env.get(name)
        if given is not None and given != value:
            raise ValueError(
                f"CoRun needs {name}={value}, because {why}. Unset it, or set it to {value}"
            )
        env[name] = value
