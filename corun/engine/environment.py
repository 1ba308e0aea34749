"""Environment variables that reach the arithmetic: pinned before any worker starts.

Workers inherit them. A value that the user set against the contract is refused, not overridden.
"""

import os
from collections.abc import MutableMapping

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


def settle(environ: MutableMapping[str, str] | None = None) -> None:
    """Pin the variables in `environ` (default: this process). ValueError names a conflict."""
    env = os.environ if environ is None else environ
    for name, why in REFUSED.items():
        if env.get(name, "").lower() not in _OFF:
            raise ValueError(f"CoRun cannot run with {name}={env[name]}, because {why}. Unset it")
    pinned = {**PINNED, **(PINNED_CPU if current_platform.is_cpu() else {})}
    for name, (value, why) in pinned.items():
        given = env.get(name)
        if given is not None and given != value:
            raise ValueError(
                f"CoRun needs {name}={value}, because {why}. Unset it, or set it to {value}"
            )
        env[name] = value
