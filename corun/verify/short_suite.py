"""A suite for a CPU, where a step takes a twentieth of a second. Pure Python.

It is what ``corun certify`` plays on the engine that it checks. Most of the time goes into requests
alone, one token a step; so these are short, and each is met again in four kinds of company. Some
ask for their prompt's logprobs too: many rows of prefill are compared for no further step.
"""

from random import Random

from corun.verify.prompts import PromptSource
from corun.verify.scenario import Request, at_once, staggered
from corun.verify.workload import PAPER_SEED, PAPER_TEMPERATURE, Limits, Suite

TOKENS = 8  # as in the paper, Section V-B
LENGTHS = (1, 9, 17, 33, 65, 100)  # of prompts


def short_suite(source: PromptSource, limits: Limits) -> Suite:
    """Six requests of 1 to 100 prompt tokens. ValueError where the engine has room for none."""
    room = limits.model_len - TOKENS
    if room < 1:
        raise ValueError(
            f"the engine holds {limits.model_len} tokens a request, too few for {TOKENS} output "
            "tokens; raise max_model_len"
        )
    targets = tuple(
        _request(source, f"short-{i}", min(length, room), prompt_too=i % 2 == 1)
        for i, length in enumerate(LENGTHS)
    )
    rng = Random("short")
    scenarios = (
        at_once("together", targets),
        at_once("together, shuffled", rng.sample(targets, len(targets))),
        staggered("staggered", targets, (), rng, gap=1),
        staggered("staggered more", targets, (), rng, gap=3),
    )
    return Suite("short", targets, scenarios, (), ())


def _request(source: PromptSource, name: str, length: int, *, prompt_too: bool) -> Request:
    params = {
        "temperature": PAPER_TEMPERATURE,
        "seed": PAPER_SEED,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": 2,
        **({"prompt_logprobs": 0} if prompt_too else {}),
    }
    return Request(name, source.prompt(name, length), params)
