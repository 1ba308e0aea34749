"""Drives one engine through one request set, as its arrival process says, and keeps the times.

The engine is vLLM's LLMEngine (``llm.llm_engine``), through the methods that ``LLM`` itself uses.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from corun.bench.arrivals import Arrivals
from corun.bench.requests import BenchRequest
from corun.contract import digest

POLL_S = 0.001


class Engine(Protocol):
    """What is used of vLLM's LLMEngine."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Queue a request."""

    def step(self) -> list[Any]:
        """One engine step; RequestOutputs of the requests that got tokens."""

    def has_unfinished_requests(self) -> bool:
        """Whether anything is queued or running."""


@dataclass(slots=True)
class Answer:
    """One request as it went. Times in seconds since the run began.

    tokens, logprobs: the sampled tokens, and the logprob of each (None where none were asked for).
    """

    request: BenchRequest
    arrival_s: float
    first_token_s: float | None = None
    finish_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Its entry in a run file."""
        assert self.first_token_s is not None and self.finish_s is not None
        return {
            "id": self.request.id,
            "n_in": len(self.request.prompt_token_ids),
            "n_out": len(self.tokens),
            "arrival_s": self.arrival_s,
            "first_token_s": self.first_token_s,
            "finish_s": self.finish_s,
            "digest": digest(self.tokens, self.logprobs),
        }


@dataclass(frozen=True, slots=True)
class Driven:
    """A run's answers in the request set's order. began: on the ``perf_counter`` clock."""

    answers: tuple[Answer, ...]
    began: float
    wall_s: float


def shuffled(requests: Sequence[BenchRequest], order_seed: int) -> list[BenchRequest]:
    """The order in which requests arrive: as they are for 0, else shuffled by the seed."""
    if not order_seed:
        return list(requests)
    rng = np.random.Generator(np.random.PCG64(order_seed))
    return [requests[i] for i in rng.permutation(len(requests))]


def drive(
    engine: Engine,
    requests: Sequence[BenchRequest],
    arrivals: Arrivals,
    make_params: Callable[[BenchRequest], Any],
    *,
    order_seed: int = 0,
    times_seed: int = 0,
) -> Driven:
    """Answer `requests` from idle to idle.

    make_params: vLLM's SamplingParams of a request, with streamed (DELTA) outputs. order_seed: see
    ``shuffled``. times_seed: of the arrival times. RuntimeError where a request got no full answer.
    """
    order = shuffled(requests, order_seed)
    closed = arrivals.kind == "closed"
    times = None if closed else arrivals.times(len(order), times_seed)
    answers: dict[str, Answer] = {}
    added = unfinished = 0
    began = time.perf_counter()

    def due() -> bool:
        if added == len(order):
            return False
        if times is None:
            return unfinished < arrivals.concurrency
        return times[added] <= time.perf_counter() - began

    while added < len(order) or engine.has_unfinished_requests():
        while due():
            request = order[added]
            # What waits for the loop to come round is waiting time, not a later arrival.
            arrived = time.perf_counter() - began if times is None else times[added]
            answers[request.id] = Answer(request, arrived)
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            engine.add_request(request.id, prompt, make_params(request))
            added, unfinished = added + 1, unfinished + 1
        if not engine.has_unfinished_requests():
            time.sleep(POLL_S)
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        unfinished -= sum(_take(answers[output.request_id], output, now) for output in outputs)
    wall_s = time.perf_counter() - began
    for answer in answers.values():
        _check(answer)
    return Driven(tuple(answers[r.id] for r in requests), began, wall_s)


def _take(answer: Answer, output: Any, now: float) -> bool:
    """Add an output's tokens to `answer`; whether it is the last."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    if tokens and answer.first_token_s is None:
        answer.first_token_s = now
    answer.tokens += tokens
    if completion.logprobs is not None:
        answer.logprobs = answer.logprobs or []
        answer.logprobs += [
            position[token].logprob
            for token, position in zip(tokens, completion.logprobs, strict=True)
        ]
    if output.finished:
        answer.finish_s = now
    return bool(output.finished)


def _check(answer: Answer) -> None:
    wanted, found = answer.request.max_tokens, len(answer.tokens)
    if answer.finish_s is None or found != wanted:
        raise RuntimeError(
            f"request {answer.request.id} got {found} of {wanted} tokens; nothing is recorded"
        )
