"""The mixed sampling parameters of the adversarial suite. Pure Python.

Each entry is a way to sample that has its own code path in vLLM; together in one batch they also
take the paths that depend on what co-runners asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

Params = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mix:
    """One way to sample.

    name: for reports. needs_tokenizer: whether vLLM refuses it without one. make: (random numbers,
    vocabulary size, max_tokens) to SamplingParams keywords, without max_tokens and seed.
    """

    name: str
    needs_tokenizer: bool
    make: Callable[[Random, int, int], Params]


def _fixed(name: str, needs_tokenizer: bool = False, **params: Any) -> Mix:
    return Mix(name, needs_tokenizer, lambda _rng, _vocab, _max: dict(params))


def _logit_bias(rng: Random, vocab: int, _max_tokens: int) -> Params:
    bias = {rng.randrange(vocab): rng.choice((-5.0, -1.0, 1.5, 3.0)) for _ in range(8)}
    return {"temperature": 0.7, "logit_bias": bias, "logprobs": 2}


def _allowed(rng: Random, vocab: int, _max_tokens: int) -> Params:
    allowed = sorted({rng.randrange(vocab) for _ in range(300)})
    return {"temperature": 1.0, "allowed_token_ids": allowed, "logprobs": 3}


def _min_tokens(rng: Random, vocab: int, max_tokens: int) -> Params:
    stops = sorted({rng.randrange(vocab) for _ in range(64)})
    return {
        "temperature": 1.0,
        "min_tokens": max(1, max_tokens // 2),
        "stop_token_ids": stops,
        "logprobs": 0,
    }


MIXES: tuple[Mix, ...] = (
    _fixed("seeded", temperature=0.6, logprobs=0),
    _fixed("greedy, top-20 logprobs", temperature=0.0, logprobs=20),
    _fixed("top-k", temperature=0.8, top_k=40, logprobs=1),
    _fixed("top-p", temperature=1.0, top_p=0.9, logprobs=5),
    _fixed("min-p", temperature=0.9, min_p=0.05, logprobs=0),
    _fixed("prompt logprobs", temperature=0.6, logprobs=0, prompt_logprobs=5),
    _fixed("n=2", temperature=0.9, n=2, logprobs=4),
    _fixed(
        "presence and frequency penalties",
        temperature=0.7,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        logprobs=20,
    ),
    _fixed("repetition penalty", temperature=0.6, repetition_penalty=1.2, top_k=100, logprobs=0),
    Mix("logit bias", False, _logit_bias),
    _fixed(
        "bad words", True, temperature=0.8, bad_words=["the", "and", "of a", "river"], logprobs=1
    ),
    Mix("min tokens and stop tokens", False, _min_tokens),
    _fixed(
        "structured output",
        True,
        temperature=0.8,
        structured_outputs={"regex": r"(yes|no|perhaps)( [a-z]{1,12}){4,40}\."},
        logprobs=1,
    ),
    Mix("allowed tokens", False, _allowed),
    _fixed(
        "top-k, top-p and min-p", temperature=1.2, top_k=64, top_p=0.95, min_p=0.02, logprobs=20
    ),
    _fixed("stop string", True, temperature=0.9, stop=[". The", "\n\n"], logprobs=0),
    _fixed("greedy with penalties", temperature=0.0, presence_penalty=1.0, logprobs=2),
)


def mixes_for(has_tokenizer: bool) -> tuple[Mix, ...]:
    """The ways to sample that a model with or without a tokenizer can take."""
    return tuple(mix for mix in MIXES if has_tokenizer or not mix.needs_tokenizer)


def params_for(
    mix: Mix, rng: Random, vocab_size: int, max_tokens: int, seed: int
) -> Mapping[str, Any]:
    """SamplingParams keywords of a request that samples like `mix`."""
    return {**mix.make(rng, vocab_size, max_tokens), "max_tokens": max_tokens, "seed": seed}
