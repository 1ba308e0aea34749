"""Random weights: like an untrained network's, and the same at every start."""

import pytest
import torch

pytest.importorskip("vllm")
from corun.engine import random_weights


def test_weights_norms_and_biases():
    weight = torch.zeros(512, 512, dtype=torch.bfloat16)
    random_weights.fill("model.layers.0.mlp.down_proj.weight", weight)
    assert abs(weight.float().std().item() / random_weights.STANDARD_DEVIATION - 1) < 0.02
    assert abs(weight.float().mean().item()) < 1e-3
    norm, bias = torch.zeros(64), torch.ones(64)
    random_weights.fill("model.layers.0.self_attn.q_norm.weight", norm)
    random_weights.fill("model.layers.0.self_attn.qkv_proj.bias", bias)
    assert (norm == 1).all() and (bias == 0).all()


def test_a_name_always_gets_the_same_numbers_and_no_other_name_does():
    names = [f"model.layers.{i}.weight" for i in range(20)]
    made = []
    for name in (*names, *names):
        tensor = torch.empty(4, 8)
        random_weights.fill(name, tensor)
        made.append(tensor)
    for i in range(20):
        assert torch.equal(made[i], made[i + 20])
    assert len({tuple(t.flatten().tolist()) for t in made}) == 20


def test_quantized_parameters_are_refused():
    with pytest.raises(ValueError, match="unquantized"):
        random_weights.fill("w", torch.zeros(4, dtype=torch.int8))
