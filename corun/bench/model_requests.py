"""The request set of a workload for one model: its vocabulary, and for ShareGPT its tokenizer."""

from corun.bench import requests
from corun.bench.requests import RequestSet
from corun.bench.sharegpt import Tokenize
from corun.bench.workload import Workload


def build_for(
    model: str, workload: Workload, *, count: int, seed: int, max_model_len: int
) -> RequestSet:
    """``requests.build`` with what it needs to know of `model`. ValueError as there."""
    vocabulary, tokenize = _tokens_of(model, workload)
    return requests.build(
        workload,
        count=count,
        vocabulary=vocabulary,
        seed=seed,
        max_model_len=max_model_len,
        tokenize=tokenize,
    )


def _tokens_of(model: str, workload: Workload) -> tuple[int, Tokenize | None]:
    """The model's number of token ids, and for ShareGPT its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    vocabulary = int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    if workload.kind != "sharegpt":
        return vocabulary, None
    tokenizer = AutoTokenizer.from_pretrained(model)
    return vocabulary, lambda text: tokenizer(text).input_ids
