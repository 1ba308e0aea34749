"""Plays a scenario on a vLLM engine: adds, steps, aborts, and keeps what comes out.

The engine is vLLM's LLMEngine (``llm.llm_engine``), driven through the methods that ``LLM`` itself
uses; they have the same signatures in vLLM 0.25 and 0.32. Nothing is retried.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from corun.verify.record import Record, record_of
from corun.verify.scenario import Arrival, Request, Scenario


class Engine(Protocol):
    """What is used of vLLM's LLMEngine."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Queue a request under `request_id`."""

    def abort_request(self, request_ids: list[str]) -> None:
        """End requests by the ids they were added under."""

    def step(self) -> list[Any]:
        """One engine step; RequestOutputs of the requests that got a token."""

    def has_unfinished_requests(self) -> bool:
        """Whether anything is queued or running."""


@dataclass(slots=True)
class Played:
    """What a scenario produced.

    records: one for each request that ran to its end, by name. steps: engine steps taken.
    most_rows, least_rows: most and fewest sequences that got a token in one step; least counts
    only steps in which any did. aborted: requests aborted while unfinished. refused: what the
    engine said of requests that it would not take, by name.
    """

    records: dict[str, Record] = field(default_factory=dict)
    steps: int = 0
    most_rows: int = 0
    least_rows: int = 0
    aborted: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def play(
    engine: Engine,
    scenario: Scenario,
    make_params: Callable[[Mapping[str, Any]], Any],
    on_finished: Callable[[str], None] = lambda name: None,
) -> Played:
    """Play `scenario` from idle to idle.

    make_params: SamplingParams from a Request's ``params``. on_finished: called with each request's
    name when its output is complete. RuntimeError if a request that was not aborted never finishes.
    """
    played = Played()
    live: dict[str, _Live] = {}
    pending = list(scenario.events)
    clock = 0
    while pending or engine.has_unfinished_requests():
        if pending and not engine.has_unfinished_requests():
            clock = max(clock, pending[0].step)  # nothing to step through until the next event
        while pending and pending[0].step <= clock:
            event = pending.pop(0)
            if isinstance(event, Arrival):
                request_id = f"{scenario.name}/{event.request.name}"
                try:
                    _add(engine, request_id, event.request, make_params)
                except ValueError as refusal:
                    played.refused[event.request.name] = str(refusal)
                else:
                    live[request_id] = _Live(event.request)
            elif live.pop(request_id := f"{scenario.name}/{event.name}", None) is not None:
                engine.abort_request([request_id])
                played.aborted += 1
        if not engine.has_unfinished_requests():
            continue
        outputs = engine.step()
        clock += 1
        played.steps += 1
        _collect(outputs, live, played, on_finished)
    if live:
        raise RuntimeError(f"scenario {scenario.name}: no output for {sorted(_names(live))}")
    return played


def sampling_params(params: Mapping[str, Any]) -> Any:
    """vLLM's SamplingParams from a Request's keywords."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    given = dict(params)
    if structured := given.get("structured_outputs"):
        given["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**given)


@dataclass(slots=True)
class _Live:
    request: Request
    completions: dict[int, Any] = field(default_factory=dict)


def _add(
    engine: Engine,
    request_id: str,
    request: Request,
    make_params: Callable[[Mapping[str, Any]], Any],
) -> None:
    prompt = {"prompt_token_ids": list(request.prompt)}
    engine.add_request(request_id, prompt, make_params(request.params))


def _collect(
    outputs: Iterable[Any],
    live: dict[str, _Live],
    played: Played,
    on_finished: Callable[[str], None],
) -> None:
    rows = 0
    for output in outputs:
        rows += len(output.outputs)
        if (state := live.get(output.request_id)) is None:
            continue  # a last output of a request that was aborted
        # With n > 1 vLLM returns each completion in outputs of its own.
        for completion in output.outputs:
            state.completions[completion.index] = completion
        if output.finished:
            request = state.request
            played.records[request.name] = record_of(
                request.name,
                request.params.get("seed"),
                output,
                list(state.completions.values()),
            )
            del live[output.request_id]
            on_finished(request.name)
    if rows:
        played.most_rows = max(played.most_rows, rows)
        played.least_rows = min(played.least_rows or rows, rows)


def _names(live: Mapping[str, _Live]) -> list[str]:
    return [state.request.name for state in live.values()]
