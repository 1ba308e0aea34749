"""Seam: vLLM's settings that pick kernels, mask tokens or end a request, as JSON values.

Whole config objects are taken, less what is known to change nothing: a field that a later vLLM adds
is in from the start, and one that a version lacks is no error.
"""

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from corun.engine.variables import files_digest

SEAMS: tuple[tuple, ...] = (
    ("vllm.config", "VllmConfig.attention_config"),
    ("vllm.config", "VllmConfig.kernel_config"),
    ("vllm.config", "VllmConfig.structured_outputs_config"),
    ("vllm.config", "VllmConfig.reasoning_config"),
    ("vllm.config", "AttentionConfig.flash_attn_version"),
    ("vllm.config", "KernelConfig.linear_backend"),
    ("vllm.config", "KernelConfig.ir_op_priority"),
    ("vllm.config", "CompilationConfig.pass_config"),
    ("vllm.config", "CompilationConfig.compile_sizes"),
    ("vllm.config", "CompilationConfig.compile_ranges_endpoints"),
    ("vllm.config", "CompilationConfig.inductor_compile_config"),
    ("vllm.config", "ModelConfig.model_impl"),
    ("vllm.config", "ModelConfig.architecture"),
    ("vllm.config", "ModelConfig.disable_sliding_window"),
    ("vllm.config", "ModelConfig.try_get_generation_config"),
    ("vllm.config", "ModelConfig.get_diff_sampling_param"),
    ("vllm.config", "StructuredOutputsConfig.reasoning_parser_plugin"),
    ("vllm.tokenizers", "cached_tokenizer_from_config"),
)
SEAMS_BY_VERSION: dict[str, tuple[tuple, ...]] = {
    "0.25": (("vllm.config", "ModelConfig.override_attention_dtype"),),
}

# Where files go, what is captured (graphs replay the same kernels), encoders that CoRun never runs.
_NOT_COMPILED = (
    *("debug_dump_path", "cache_dir", "compile_cache_save_format", "cudagraph_", "max_cudagraph_"),
    *("encoder_", "compile_mm_encoder", "decoder_replay_"),
)
# Without a compiler these do nothing, and some hold numbers of rows.
_OF_COMPILER = (
    *("backend", "compile_sizes", "compile_ranges_endpoints", "inductor_", "splitting_ops"),
    *("dynamic_shapes_config", "use_inductor_graph_partition"),
)
_WARM_UP = ("enable_cutedsl_warmup", "enable_jit_warmup")
_MASKERS = ("xgrammar", "llguidance", "outlines_core", "lm-format-enforcer")


def plain(value: Any) -> Any:
    """`value` as JSON values, without anything that changes from process to process."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(getattr(value, "uuid", None)):  # a compiler pass names its own contents
        return str(value.uuid())
    if isinstance(value, Iterable) or (is_dataclass(value) and not isinstance(value, type)):
        return _plain_inside(value)
    text = f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _plain_inside(value: Any) -> Any:
    if is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, set | frozenset):
        return sorted((plain(v) for v in value), key=str)
    return [plain(v) for v in value]


def fields_of(config: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A config's public settings, less those whose names start as one of `without`."""
    return {
        f.name: plain(getattr(config, f.name))
        for f in fields(config)
        if f.init and not f.name.startswith(("_", *without))
    }


def compiler(compilation: Any, *, eager: bool) -> dict[str, Any]:
    """What decides which kernels a CompilationConfig makes. eager: whether nothing is compiled."""
    found = fields_of(compilation, (*_NOT_COMPILED, *(_OF_COMPILER if eager else ())))
    return {**found, "custom_ops": sorted(found["custom_ops"])}


def kernels(config: Any) -> dict[str, Any]:
    """What a KernelConfig picks."""
    return fields_of(config, _WARM_UP)


def implementation(model_config: Any) -> dict[str, Any]:
    """Which code runs the model, as far as its config says."""
    return {
        "impl": plain(model_config.model_impl),
        "architecture": model_config.architecture,
        "disable_sliding_window": model_config.disable_sliding_window,
        "attention_dtype": plain(getattr(model_config, "override_attention_dtype", None)),
    }


def module_classes(model: Any) -> list[str]:
    """Module and name of every class in a loaded model, its own first."""
    names = [f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules()]
    return [names[0], *sorted(set(names[1:]))]


def masks(vllm_config: Any) -> dict[str, Any]:
    """What decides which tokens structured outputs and reasoning budgets allow."""
    outputs, reasoning = vllm_config.structured_outputs_config, vllm_config.reasoning_config
    found = fields_of(outputs, ("reasoning_parser_plugin",))
    if outputs.reasoning_parser_plugin:
        found["plugin"] = files_digest([Path(outputs.reasoning_parser_plugin)])
    return {
        **found,
        "reasoning": None if reasoning is None else fields_of(reasoning),
        "libraries": {name: installed(name) for name in _MASKERS},
    }


def endings(model_config: Any) -> dict[str, Any]:
    """The tokens that end a request, what they spell (for stop strings, bad words and structured
    outputs), and what a request that is silent about sampling gets.
    """
    ids = model_config.try_get_generation_config().get("eos_token_id")
    tokenizer = cached_tokenizer_from_config(model_config)  # None where there is none
    return {
        "eos": sorted(ids) if isinstance(ids, list) else ids,
        "tokenizer_eos": getattr(tokenizer, "eos_token_id", None),
        "vocabulary": None if tokenizer is None else _vocabulary(tokenizer),
        "sampling": plain(model_config.get_diff_sampling_param()),
    }


def _vocabulary(tokenizer: Any) -> str:
    """16 hex digits over every token and its id."""
    known = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def installed(distribution: str) -> str | None:
    """A distribution's version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
