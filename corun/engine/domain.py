"""The domain of a running engine: what must be equal for two outputs to be comparable.

Read in the worker, where the weights and the device are.
"""

import hashlib
import json
import platform
from typing import Any

import torch

from corun.engine import settings, worker_facts
from corun.engine.seams import vllm_version
from corun.engine.split_schedule import reaching_bits
from corun.engine.variables import reaching_arithmetic

SEAMS = (
    ("vllm.config", "VllmConfig"),
    ("vllm.config", "CompilationMode.NONE"),
    ("vllm.config", "ParallelConfig.disable_custom_all_reduce"),
    ("vllm.config", "SchedulerConfig.long_prefill_token_threshold"),
    ("vllm.platforms", "current_platform.get_device_name"),
    ("vllm.model_executor.model_loader.base_loader", "process_weights_after_loading"),
)

_CHUNK, _CPU_CHUNK = 1 << 24, 1 << 14  # words at a time; few stay in a CPU core's cache
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, so every word's weight is invertible mod 2**64


def _int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def tensor_checksum(tensor: torch.Tensor) -> int:
    """A 64-bit, order-sensitive checksum of a tensor's bytes, in exact integer arithmetic."""
    raw = tensor.detach().contiguous().view(-1)
    if raw.numel() == 0:
        return 0
    raw = raw.view(torch.uint8)
    if raw.numel() % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
    words = raw.view(torch.int32)
    chunk = _CPU_CHUNK if words.device.type == "cpu" else _CHUNK
    total = 0
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk].to(torch.int64)
        index = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        weight = (index * 2 + 1) * _MULTIPLIER
        weight = weight ^ (weight >> 29)
        total += int((part * (weight | 1)).sum().item())
    return _int64(total)


def checksums(model: torch.nn.Module) -> dict[str, list]:
    """[shape, dtype, checksum] of every parameter of `model`, by name."""
    return {
        name: [list(p.shape), str(p.dtype), tensor_checksum(p.data)]
        for name, p in model.named_parameters()
    }


def weights_digest(model: torch.nn.Module, as_loaded: dict[str, list]) -> str:
    """SHA-256 (hex, 16 digits) over every parameter's name, shape, dtype and checksum.

    as_loaded: ``checksums`` from before vLLM repacked weights (``note_loaded``). They stand in for
    parameters that are empty now; all others are read as they are, since a trainer may change them.
    """
    now = checksums(model)
    missing = [n for n, row in now.items() if 0 in row[0] and n not in as_loaded]
    if missing:
        raise RuntimeError(
            f"CoRun cannot name the weights: vLLM emptied {len(missing)} parameters, such as "
            f"{missing[0]}, before they were read"
        )
    rows = {name: as_loaded[name] if 0 in row[0] else row for name, row in now.items()}
    return _hash(rows)


def note_loaded(into: dict[str, list]) -> None:
    """Have vLLM's next model load leave its ``checksums`` in `into`, before weights are repacked.

    vLLM's CPU build moves the weights of linear layers into kernels and empties the parameters.
    """
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def noted(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        base_loader.process_weights_after_loading = process
        into.update(checksums(model))
        process(model, *args, **kwargs)

    base_loader.process_weights_after_loading = noted


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def model_shape(hf_config: Any) -> str:
    """A hash of a Hugging Face config without the names in it that change nothing."""
    volatile = ("_name_or_path", "transformers_version")
    return _hash({k: v for k, v in hf_config.to_dict().items() if k not in volatile})


def software() -> dict[str, Any]:
    """Versions of what computes, as JSON values."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    from corun import __version__

    return {
        "corun": __version__,
        "vllm": vllm_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": triton_version,
        "transformers": settings.installed("transformers"),  # some models are its own
        "flashinfer": settings.installed("flashinfer-python"),
    }


def device_name() -> str:
    """The device's model; for a CPU its instruction sets as torch uses them, and its caches.

    vLLM's CPU attention cuts the KV by what fits into the L2 cache, and so orders its sums.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # oneDNN picks its GEMMs by what torch's own capability does not tell apart.
        has = [
            name
            for name, test in (
                ("avx512_bf16", "_is_avx512_bf16_supported"),
                ("amx", "_is_amx_tile_supported"),
                ("amx_fp16", "_is_amx_fp16_supported"),
            )
            if getattr(torch.cpu, test, bool)()
        ]
        capability = torch.backends.cpu.get_cpu_capability()
        sizes: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        caches = [f"{level}:{sizes.get(f'{level}_cache_size')}" for level in ("l1d", "l2")]
        return " ".join(["cpu", platform.machine(), capability, *has, *caches])
    return str(current_platform.get_device_name())


def _shapes(plan: dict[str, Any], vllm_config: Any, eager: bool) -> dict[str, Any]:
    """What of the plan reaches the bits.

    Under ``certified`` numbers of rows do not, within the class; what the compiler was given does.
    Nor does it matter where a prompt is cut, if the certificate says so.
    """
    threshold = vllm_config.scheduler_config.long_prefill_token_threshold
    if plan["policy"] != "certified":
        names = ("policy", "decode_rows", "max_prefill_tokens", "decode_graph", "prefill_rows")
        return {**{name: plan[name] for name in names}, "long_prefill": threshold}
    most = vllm_config.scheduler_config.max_num_batched_tokens
    chunks = [plan["max_prefill_tokens"], threshold]
    latent = vllm_config.model_config.use_mla
    return {
        "policy": plan["policy"],
        "row_classes": plan["class_of"],
        "compiled_for": None if eager else most,
        "chunks": None if plan["grants"]["free_chunks"] else chunks,
        **({"split_decode": reaching_bits(latent=latent)} if plan["split_beyond"] else {}),
    }


def _parallel(parallel: Any) -> dict[str, Any]:
    if parallel.tensor_parallel_size == 1:
        return {"size": 1}
    return {
        "size": parallel.tensor_parallel_size,
        "custom_all_reduce": not parallel.disable_custom_all_reduce,
        "nccl": list(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
    }


def describe(
    vllm_config: Any,
    model: torch.nn.Module,
    *,
    plan: dict[str, Any],
    runner: str,
    attention: list[str],
    as_loaded: dict[str, list],
    endings: dict[str, Any],
) -> dict[str, Any]:
    """The domain as JSON values; ``corun.contract.fingerprint`` names it.

    plan: the plan's mapping. runner: V1, V2 or CPU. attention: names of the backends in use.
    as_loaded: see ``weights_digest``. endings: ``settings.endings``, read as the engine started.
    """
    from vllm.config import CompilationMode

    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    compilation, cache = vllm_config.compilation_config, vllm_config.cache_config
    eager = model_config.enforce_eager or compilation.mode == CompilationMode.NONE
    classes = settings.module_classes(model)
    return {
        **_shapes(plan, vllm_config, eager),
        "model": model_shape(model_config.hf_config),
        "implementation": {
            **settings.implementation(model_config),
            "class": classes[0],
            "modules": _hash(classes),
        },
        "weights": weights_digest(model, as_loaded),
        "dtype": str(model_config.dtype),
        "max_model_len": model_config.max_model_len,
        "logprobs_mode": str(model_config.logprobs_mode),
        "max_logprobs": model_config.max_logprobs,
        "masks": settings.masks(vllm_config),
        "endings": endings,
        "kv_cache": {"dtype": str(cache.cache_dtype), "block_size": cache.block_size},
        "attention": attention,
        # Backends by their effect: asked for or found, they are the same.
        "attention_settings": settings.fields_of(vllm_config.attention_config, ("backend",)),
        "kernels": settings.kernels(vllm_config.kernel_config),
        "runner": runner,
        "compilation": settings.compiler(compilation, eager=eager),
        "tensor_parallel": _parallel(parallel),
        "device": device_name(),
        "worker": worker_facts.this_process(),
        "software": software(),
        "variables": reaching_arithmetic(parallel=parallel.tensor_parallel_size > 1),
    }
