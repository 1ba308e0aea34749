"""A model's config that no weights belong to, and an environment that engine configs may fill."""

import os

import pytest

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def environment_kept():
    """vLLM sets variables while it makes a config: gone after each test that imports this."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
