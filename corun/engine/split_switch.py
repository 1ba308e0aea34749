"""Seam: whether an engine can split decode, as far as its arguments tell before it starts.

What only the loaded model tells (windows, caps, the backend that vLLM chose) is checked in the
worker, by ``corun.engine.split_steps``.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from corun.config import CoRunConfig
from corun.engine.split_schedule import LATENT, MOST_SEQUENCES, RULES

SEAMS: tuple[tuple, ...] = (
    ("vllm.platforms", "current_platform.is_cuda"),
    ("vllm.platforms", "current_platform.is_device_capability_family", ("capability",)),
    ("vllm.engine.arg_utils", "EngineArgs.max_num_seqs"),
    ("vllm.config", "AttentionConfig.flash_attn_version"),
    ("vllm.engine.arg_utils", "EngineArgs.attention_backend"),
    ("vllm.engine.arg_utils", "EngineArgs.attention_config"),
    ("vllm.config", "ModelConfig.get_head_size"),
    ("vllm.config", "ModelConfig.use_mla"),
    ("vllm.config", "CUDAGraphMode.FULL"),
)

logger = init_logger("vllm.corun")


def _backend(args: EngineArgs) -> str | None:
    """The attention backend that was asked for, by its name."""
    asked = args.attention_backend or args.attention_config.backend
    return getattr(asked, "name", asked)


def why_not(args: EngineArgs, model_config: Any) -> str | None:
    """Why this engine cannot split decode, or None."""
    asked, size, latent = _backend(args), model_config.get_head_size(), model_config.use_mla
    backend = "FLASH_ATTN_MLA" if latent else "FLASH_ATTN"
    version = args.attention_config.flash_attn_version
    reasons = (
        (
            not current_platform.is_cuda() or not current_platform.is_device_capability_family(90),
            "it needs an NVIDIA GPU of compute capability 9.x, for FlashAttention 3",
        ),
        (version not in (None, 3), f"it needs FlashAttention 3, not {version}"),
        (
            (args.max_num_seqs or 0) > MOST_SEQUENCES,
            f"FlashAttention 3 splits steps of at most {MOST_SEQUENCES} requests, not "
            f"{args.max_num_seqs} (max_num_seqs)",
        ),
        (
            model_config.dtype not in (torch.bfloat16, torch.float16),
            f"it computes in bfloat16 or float16, not {model_config.dtype}",
        ),
        (
            asked not in (None, backend),
            f"it works with the attention backend {backend} here, not {asked}",
        ),
        (
            not latent and size not in RULES,
            f"it takes head dimensions {tuple(RULES)}, not {size}",
        ),
        (
            latent and size != sum(LATENT),
            f"of latent attention (MLA) it takes {' + '.join(map(str, LATENT))} dimensions, not "
            f"{size} together",
        ),
        (
            getattr(model_config, "rswa_window", None) is not None,
            "it does not know the attention pattern of this model (R-SWA)",
        ),
        (
            mixed_in_graph(args.compilation_config.cudagraph_mode),
            "it keeps prefills out of whole CUDA graphs (cudagraph_mode FULL)",
        ),
    )
    return next((why for applies, why in reasons if applies), None)


def mixed_in_graph(mode: Any) -> bool:
    """Whether a vLLM graph mode replays whole graphs for steps that hold chunks, too."""
    return mode is not None and mode.mixed_mode().name == "FULL"


def settle(config: CoRunConfig, args: EngineArgs, model_config: Any) -> CoRunConfig:
    """`config`, with ``split_decode`` off where ``auto`` cannot have it here.

    ValueError where ``certified`` was named.
    """
    if not config.split_decode or (why := why_not(args, model_config)) is None:
        return config
    if config.policy != "auto":
        raise ValueError(f"split_decode cannot run here: {why}; leave it off")
    logger.info("CoRun: split_decode is ignored: %s", why)
    return replace(config, split_decode=False)
