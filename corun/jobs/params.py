"""Sampling parameters as a JSON line or a flag gives them: names and types. Pure Python.

Names and meanings are those of vLLM's ``SamplingParams``, which also checks the ranges, before the
engine starts. What only an interactive client needs (streaming, detokenizing off) is left out.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # what vLLM's HTTP server takes


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number")
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("an integer")
    return value


def _seed(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or not MIN_SEED <= value <= MAX_SEED:
        raise ValueError("an integer from -2**63 to 2**63 - 1")
    return value


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise ValueError("a string or a list of strings")
    return value


def token_ids(value: Any) -> Any:
    """`value` if it is a list of token ids (integers, none negative), else ValueError."""
    if not isinstance(value, list) or not all(
        isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value
    ):
        raise ValueError("a list of token ids (integers, none negative)")
    return value


def _bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("a mapping of token id to number")
    try:
        return {int(token): float(_number(bias)) for token, bias in value.items()}
    except (TypeError, ValueError):
        raise ValueError("a mapping of token id to number") from None


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError('a mapping such as {"json": {...}}')
    return value


PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "allowed_token_ids": token_ids,
    "bad_words": _strings,
    "frequency_penalty": _number,
    "ignore_eos": _boolean,
    "include_stop_str_in_output": _boolean,
    "logit_bias": _bias,
    "logprobs": _integer,
    "max_tokens": _integer,
    "min_p": _number,
    "min_tokens": _integer,
    "n": _integer,
    "presence_penalty": _number,
    "prompt_logprobs": _integer,
    "repetition_penalty": _number,
    "seed": _seed,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "stop": _strings,
    "stop_token_ids": token_ids,
    "structured_outputs": _mapping,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
}


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with every value of the right type; null values are dropped (they mean the default).

    ValueError names an unknown parameter or says what a parameter must be.
    """
    unknown = sorted(set(given) - set(PARAMETERS))
    if unknown:
        raise ValueError(
            f"unknown sampling parameter(s) {', '.join(map(repr, unknown))}; "
            f"known: {', '.join(PARAMETERS)}"
        )
    result = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            result[name] = PARAMETERS[name](value)
        except ValueError as e:
            raise ValueError(f"{name!r} must be {e}") from None
    return result
