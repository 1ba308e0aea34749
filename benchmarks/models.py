"""Model shapes for benchmarks: directories with a config.json, from published hyperparameters.

    python -m benchmarks.models qwen3-8b DIRECTORY

NAME:N cuts a shape to its first N layers, as in deepseek-v3:4. No weights are downloaded: an engine
fills such a model with random ones (``--random-weights``). Servers want a tokenizer, too:
``--tokenizer`` adds one, whose texts are the names of tokens: <17> <4>.
"""

import argparse
import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_DENSE = _QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3_DENSE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-32b": _QWEN3_DENSE
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "max_window_layers": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    # The smallest common shape with heads of 64.
    "llama-3.2-1b": _LLAMA
    | {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    # bf16, not FP8: for its attention (MLA), in a few layers. The fourth is its first with experts.
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    # Not a published model: small enough for a CPU test.
    "tiny-llama": _LLAMA
    | {
        "head_dim": 32,
        "hidden_size": 256,
        "intermediate_size": 704,
        "max_position_embeddings": 4096,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
}


def write_config(name: str, directory: Path) -> Path:
    """Write the config.json of shape `name` into `directory`, and return that.

    name: one of SHAPES, or NAME:N for its first N layers. ValueError for any other.
    """
    shape, _, layers = name.partition(":")
    if shape not in SHAPES or (layers and not (layers.isdigit() and int(layers))):
        raise ValueError(
            f"no model shape {name!r}; there are {', '.join(SHAPES)}, or NAME:N for N layers"
        )
    config = dict(SHAPES[shape])
    if layers:
        config["num_hidden_layers"] = int(layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer into the directory of a shape: token i is the word ``<i>``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    config = json.loads((directory / "config.json").read_text())
    words = WordLevel({f"<{i}>": i for i in range(config["vocab_size"])}, unk_token="<0>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ends = {name: f"<{config[f'{name}_id']}>" for name in ("bos_token", "eos_token")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(directory)


def main() -> None:
    """Write one directory."""
    parser = argparse.ArgumentParser(description="Write a model directory with a config.json.")
    parser.add_argument("name", help=f"{', '.join(SHAPES)}, or NAME:N for N layers")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", action="store_true", help="with a tokenizer")
    args = parser.parse_args()
    print(write_config(args.name, args.directory))
    if args.tokenizer:
        write_tokenizer(args.directory)


if __name__ == "__main__":
    main()
