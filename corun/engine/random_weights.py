"""Seam: the load format ``corun_random``: random weights for a directory with only a config.json.

vLLM's own ``dummy`` format draws from +-1e-3. In such a network every layer's output is lost in the
residual stream, so it hides divergence. Here every weight is N(0, 0.02) as in an untrained model,
norm weights are 1 and biases 0. Each parameter has a generator of its own, seeded by its name and
made on its own device: the same weights at every start, and billions of them in seconds on a GPU.
(Under tensor parallelism each rank's shard of a parameter gets the same numbers.)
"""

import hashlib

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

SEAMS = (
    ("vllm.model_executor.model_loader", "register_model_loader", ("load_format",)),
    (
        "vllm.model_executor.model_loader.dummy_loader",
        "DummyModelLoader.load_weights",
        ("model", "model_config"),
    ),
)

LOAD_FORMAT = "corun_random"
STANDARD_DEVIATION = 0.02
_SEED = 20250


def seed_of(name: str) -> int:
    """The 63-bit generator seed of the parameter called `name`."""
    return int.from_bytes(hashlib.sha256(f"{_SEED}:{name}".encode()).digest()[:8], "little") >> 1


def fill(name: str, parameter: torch.Tensor) -> None:
    """Fill one parameter in place. ValueError where random numbers would make no model."""
    if parameter.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"random weights need an unquantized model, but {name} is {parameter.dtype}; "
            f"use one in bfloat16, float16 or float32"
        )
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("bias"):
        parameter.zero_()
    elif "norm" in name and parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        generator = torch.Generator(device=parameter.device).manual_seed(seed_of(name))
        parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)


class RandomModelLoader(DummyModelLoader):
    """vLLM's dummy loader with weights that behave like a network's."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every parameter of `model` in place."""
        if model_config.quantization is not None:
            raise ValueError(
                f"random weights need an unquantized model, not {model_config.quantization}"
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                fill(name, parameter.data)


def install() -> None:
    """Register the load format with vLLM. Idempotent; inert until an engine asks for it."""
    if not hasattr(RandomModelLoader, "__corun__"):
        register_model_loader(LOAD_FORMAT)(RandomModelLoader)
        RandomModelLoader.__corun__ = True
