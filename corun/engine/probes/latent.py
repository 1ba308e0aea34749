"""Seam: the products of latent attention (MLA) that vLLM makes outside of its linear modules.

Decode rows go through two of them, one matrix for each head: queries into the latent space before
attention, its outputs out of it after.
"""

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from corun.engine.seams import vllm_version

BY_HEAD = vllm_version().startswith("0.25")  # how the layer lays out the queries in the latent
SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention._v_up_proj", ("x", "out")),
)


def into_latent(layer: MLAAttention, x: torch.Tensor) -> torch.Tensor:
    """Queries [M, heads * P] -> [M, heads * latent], as the layer's forward does it."""
    weight = layer.W_UK_T
    heads, width, latent = weight.shape
    query = x.view(len(x), heads, width).transpose(0, 1)
    if BY_HEAD:
        by_head = x.new_empty((heads, len(x), latent))
        torch.bmm(query, weight, out=by_head)
        return by_head.transpose(0, 1).flatten(1)
    by_row = x.new_empty((len(x), heads, latent))
    torch.bmm(query, weight, out=by_row.transpose(0, 1))
    return by_row.flatten(1)


def out_of_latent(layer: MLAAttention, x: torch.Tensor) -> torch.Tensor:
    """Attention's outputs [M, heads * latent] -> [M, heads * V], as the layer does it."""
    out = x.new_empty((len(x), layer.num_heads * layer.v_head_dim))
    layer._v_up_proj(x, out=out)
    return out
