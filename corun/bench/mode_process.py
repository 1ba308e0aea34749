"""What the process of a mode must be started with: the policy, and a clean environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import corun
from corun.bench import mode_names
from corun.config import MEASURE, POLICIES, CoRunConfig

NO_SPLIT, NO_SPLIT_PREFILL = "nosplit", "nosplit+prefill"
"""The paper's ablation between plain vLLM and ``isolate``: plain vLLM whose decode attention does
not split KV, and the same with isolated prefills. They promise nothing."""
SPLIT = "certified+split"
"""``certified`` with ``split_decode``."""
PLAIN = ("std", "bi", NO_SPLIT, NO_SPLIT_PREFILL)
MODES = (*PLAIN, *(p for p in POLICIES if p != "off"), SPLIT)
_RUNNERS = {"": None, "v1": "0", "v2": "1"}
# What a mode decides for itself: a setting left over from the user's shell would blur the modes.
_CLEARED = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_CPU_ATTN_SPLIT_KV",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
)
_KEPT = ("CORUN_CACHE", "CORUN_DEBUG", "CORUN_UNTESTED_VLLM")


def parse_mode(text: str) -> str:
    """`text`, checked: a mode, and with ``@v1`` or ``@v2`` vLLM's model runner. Else ValueError."""
    name, runner = mode_names.split(text)
    if name not in MODES or runner not in _RUNNERS:
        raise ValueError(
            f"there is no mode {text!r} here; choose of {', '.join(MODES)}, each with @v1 or @v2 "
            "to pick vLLM's model runner"
        )
    return text


def policy_of(mode: str) -> str:
    """CoRun's policy in `mode`: "off" in everything that is plain vLLM."""
    name = mode_names.split(mode)[0]
    return "off" if name in PLAIN else name.partition("+")[0]


def config_of(mode: str, certificate: str | None) -> CoRunConfig:
    """CoRun's settings in `mode`.

    certificate: a file's path, MEASURE (for certified, which then rests on nothing), or None for
    the kept one.
    """
    policy, split = policy_of(mode), mode_names.split(mode)[0] == SPLIT
    if policy == "off":
        return CoRunConfig(policy)
    if certificate == MEASURE and policy != "certified":
        certificate = None
    return CoRunConfig(policy, certificate=certificate or None, split_decode=split)


def engine_args_of(mode: str) -> dict[str, Any]:
    """Keywords of vLLM's LLM that make `mode` what it is."""
    from vllm.platforms import current_platform

    name, on_cpu = mode_names.split(mode)[0], current_platform.is_cpu()
    found: dict[str, Any] = {}
    if name in (NO_SPLIT, NO_SPLIT_PREFILL) and not on_cpu:
        found["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
    if name == NO_SPLIT_PREFILL:
        from corun.engine.refusals import ASYNC_SCHEDULER, SCHEDULER

        found["scheduler_cls"] = SCHEDULER if on_cpu else ASYNC_SCHEDULER
    return found


def environment(mode: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that runs `mode`, from `base` (default: this process's)."""
    given = os.environ if base is None else base
    env = {
        name: value
        for name, value in given.items()
        if name not in _CLEARED and (not name.startswith("CORUN_") or name in _KEPT)
    }
    # The same sampler in every mode, and none that has to be compiled.
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    name, runner = mode_names.split(mode)
    if name == "bi":
        env["VLLM_BATCH_INVARIANT"] = "1"
    if name in (NO_SPLIT, NO_SPLIT_PREFILL):
        env["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # a GPU reads engine_args_of instead
    if (choice := _RUNNERS[runner]) is not None:
        env["VLLM_USE_V2_MODEL_RUNNER"] = choice
    root = str(Path(corun.__file__).parents[1])  # where CoRun runs from its source
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env
