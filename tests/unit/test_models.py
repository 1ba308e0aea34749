"""The shapes of benchmarks: a config that vLLM can read, and a tokenizer for servers."""

import json

import pytest

from benchmarks.models import write_config, write_tokenizer


def test_a_shape_is_cut_to_its_first_layers(tmp_path):
    config = json.loads((write_config("tiny-llama:2", tmp_path) / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 256)
    for unknown in ("tiny", "tiny-llama:0", "tiny-llama:x"):
        with pytest.raises(ValueError, match="no model shape"):
            write_config(unknown, tmp_path)


def test_every_token_of_a_shape_has_a_text_of_its_own(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(write_config("tiny-llama", tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 4096
    assert tokenizer.decode([0, 17, 4095]) == "<0> <17> <4095>"
    assert tokenizer("<17> <4> never", add_special_tokens=False)["input_ids"] == [17, 4, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
