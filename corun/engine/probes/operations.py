"""Seam: the operations of a loaded model, one of each kind and shape, as functions of rows.

They are the model's own modules, called as the model calls them: the kernel that vLLM dispatches
for these weights on this device is the one that is tried.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from corun.certify.pool import linear_pool, plain_pool
from corun.certify.probe import Operation
from corun.engine.probes.latent import into_latent, out_of_latent

SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.linear", "LinearBase"),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    ("vllm.model_executor.custom_op", "CustomOp.enabled"),
)


@dataclass(frozen=True)
class RowOperation:
    """One operation of the model that treats every row alike.

    name: module class and shape. function: [M, K] -> [M, N]. plain: makes realistic rows [P, K].
    linear: N is linear in K, so that rows can be made that show the order of its sums. sampled: see
    ``RowClaim``.
    """

    name: str
    function: Operation
    plain: Callable[[], torch.Tensor]
    linear: bool = False
    sampled: bool = False

    def pool(self) -> torch.Tensor:
        """The rows [P, K] to search its classes with."""
        return linear_pool(self.function, self.plain()) if self.linear else self.plain()


def find(runner: Any, vllm_config: Any, compute_logits: Callable) -> list[RowOperation]:
    """Every kind of row-wise operation of the model that `runner` holds.

    compute_logits: the model's own (CoRun's pads). The layers between (embedding, rotary, residual
    additions) look at single values; the whole model's trials cover them.
    """
    model, dtype, device = runner.model, vllm_config.model_config.dtype, runner.device
    found: dict[str, RowOperation] = {}
    for operation in _modules(model, vllm_config, dtype, device):
        found.setdefault(operation.name, operation)
    hidden = vllm_config.model_config.get_hidden_size()
    vocab = vllm_config.model_config.get_vocab_size()

    def logits(x: torch.Tensor) -> torch.Tensor:
        gathered = compute_logits(x)
        # A rank that is not given the logits has to take part all the same, in as many draws.
        return x[:, :1].expand(-1, vocab) if gathered is None else gathered

    head = RowOperation(
        f"LM head {hidden} x {vocab}",
        logits,
        lambda: plain_pool(hidden, dtype, device),
        linear=True,
        sampled=True,
    )
    group = get_tp_group()
    sums = [] if group.world_size == 1 else [_all_reduce(group, hidden, dtype, device)]
    return [*found.values(), *sums, head]


def _modules(
    model: nn.Module, vllm_config: Any, dtype: torch.dtype, device: torch.device
) -> Iterator[RowOperation]:
    blocks = [m for m in model.modules() if any(isinstance(c, MoERunner) for c in m.children())]
    inside = {id(part) for block in blocks for part in block.modules()}
    for block in blocks:
        yield _experts(block, vllm_config, dtype, device)
    for module in model.modules():
        if isinstance(module, LinearBase) and id(module) not in inside:
            yield _linear(module, dtype, device)
        elif isinstance(module, MLAAttention):
            yield from _latent(module, dtype, device)
        elif _is_norm(module, vllm_config):
            yield _norm(module, dtype, device)


def _all_reduce(group: Any, width: int, dtype: torch.dtype, device: torch.device) -> RowOperation:
    """The sum over the ranks of a group; each brings rows of its own."""
    return RowOperation(
        f"all-reduce of {group.world_size} ranks, {width}",
        group.all_reduce,
        lambda: plain_pool(width, dtype, device, seed=group.rank_in_group),
    )


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _linear(module: LinearBase, dtype: torch.dtype, device: torch.device) -> RowOperation:
    width = getattr(module, "input_size_per_partition", module.input_size)
    columns = getattr(module, "output_size_per_partition", module.output_size)

    # As its forward does: where ranks add up their parts, only the first one's has the bias.
    later = isinstance(module, RowParallelLinear) and module.tp_rank > 0

    def function(x: torch.Tensor) -> torch.Tensor:
        bias = None if module.skip_bias_add or later else getattr(module, "bias", None)
        return module.quant_method.apply(module, x, bias)

    return RowOperation(
        f"{type(module).__name__} {width} x {columns}",
        function,
        lambda: plain_pool(width, dtype, device),
        linear=True,
    )


def _latent(
    layer: MLAAttention, dtype: torch.dtype, device: torch.device
) -> Iterator[RowOperation]:
    heads, width, latent = layer.W_UK_T.shape
    for name, function, before, after in (
        ("into the latent", into_latent, width, latent),
        ("out of the latent", out_of_latent, latent, layer.v_head_dim),
    ):
        yield RowOperation(
            f"{type(layer).__name__} {name}, {heads} heads of {before} x {after}",
            partial(function, layer),
            partial(plain_pool, heads * before, dtype, device),
            linear=True,
        )


def _experts(
    block: nn.Module, vllm_config: Any, dtype: torch.dtype, device: torch.device
) -> RowOperation:
    hf = vllm_config.model_config.hf_text_config
    hidden = vllm_config.model_config.get_hidden_size()
    inner = getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size
    active = getattr(hf, "num_experts_per_tok", 1)
    experts = vllm_config.model_config.get_num_experts()

    def function(x: torch.Tensor) -> torch.Tensor:
        with set_forward_context(None, vllm_config, num_tokens=len(x), slot_mapping={}):
            return _first(block(x))

    return RowOperation(
        f"{type(block).__name__} {experts} experts, {active} used, {hidden} x {inner}",
        function,
        lambda: plain_pool(hidden, dtype, device),
    )


def _is_norm(module: nn.Module, vllm_config: Any) -> bool:
    """Whether it is a norm that runs as a kernel of its own.

    One that is switched off is fused by the compiler; the whole model's trials cover it.
    """
    return (
        isinstance(module, CustomOp)
        and type(module).__name__.endswith("Norm")
        and isinstance(getattr(module, "weight", None), torch.Tensor)
        and module.weight.dim() == 1
        and (vllm_config.compilation_config.mode == 0 or type(module).enabled())
    )


def _norm(module: Any, dtype: torch.dtype, device: torch.device) -> RowOperation:
    width = module.weight.numel()

    def function(x: torch.Tensor) -> torch.Tensor:
        # The residual form, which most of a model's norms take, beside the plain one.
        normed, residual = module(x.clone(), x.flip(-1).contiguous())
        return torch.cat([module(x), normed, residual], dim=-1)

    return RowOperation(
        f"{type(module).__name__} {width}",
        function,
        lambda: plain_pool(width, dtype, device),
    )


def attention_layers(runner: Any) -> dict[str, Any]:
    """One attention layer of each kind and shape that takes (query, key, value), by its name.

    Latent attention (MLA) takes other inputs; the whole model's trials cover it.
    """
    from vllm.model_executor.layers.attention import Attention

    layers: dict[str, Any] = {}
    for module in runner.model.modules():
        if isinstance(module, Attention):
            name = (
                f"{module.attn_backend.get_name()} {module.num_heads} query heads, "
                f"{module.num_kv_heads} KV heads of {module.head_size}"
            )
            window = getattr(module.impl, "sliding_window", None)
            if isinstance(window, tuple) and window[0] >= 0:
                name += f", window {window[0] + 1}"
            layers.setdefault(name, module)
    return layers
