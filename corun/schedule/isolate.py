"""The ``isolate`` policy: who runs in the next step (paper, Algorithm 1). Pure Python.

A step is one of three kinds: CONTINUE (the next chunk of a prompt that is partly done), START (the
first chunk of a waiting request) or DECODE (one token for every running request). CONTINUE and
START hold one request and nothing else. Three corrections to the algorithm as published:

* a partial prompt is looked for at every place of ``running``, not only at its head;
* what must fit is prompt + max_tokens, beside the same for every running request, so that nothing
  is ever preempted; while the head does not fit, nobody overtakes it;
* prompts run before decode, so a stream of prompts that end at once (max_tokens=1) could hold back
  the running requests for ever: after ``max_running`` starts in a row one decode step must come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from corun.schedule.ledger import BlockLedger, KVGeometry


class Schedulable(Protocol):
    """What the policy reads of a request (vLLM's Request has all of it); lengths in tokens."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int


RequestT = TypeVar("RequestT", bound=Schedulable)


class Kind(Enum):
    """What a step does."""

    CONTINUE = "continue"
    START = "start"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Choice(Generic[RequestT]):
    """The next step: its kind, and the requests that may run in it (one unless kind is DECODE)."""

    kind: Kind
    requests: list[RequestT]


def refusal(
    geometry: KVGeometry,
    prompt_tokens: int,
    max_tokens: int,
    *,
    streaming: bool = False,
    multimodal: bool = False,
) -> str | None:
    """Why ``isolate`` can never run such a request, in words for its sender; None if it can.

    streaming: its prompt arrives in pieces. multimodal: it has images, audio or video.
    """
    if streaming:
        return (
            "CoRun's isolate policy does not take streaming input: how far a request has got when "
            "the next piece arrives depends on other requests. Send the whole prompt at once"
        )
    if multimodal:
        return (
            "CoRun's isolate policy does not take images, audio or video: the room left in the "
            "encoder cache, which all requests share, would decide where a prompt is cut"
        )
    return geometry.never_fits_message(prompt_tokens, max_tokens)


class IsolatePolicy:
    """The policy and its ledger. Call ``choose`` before each step and ``executed`` after it."""

    def __init__(self, geometry: KVGeometry, max_running: int) -> None:
        """max_running: the most requests that may run at once (``max_num_seqs``)."""
        if max_running < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {max_running}")
        self.max_running = max_running
        self.ledger = BlockLedger(geometry)
        self._starts_since_decode = 0
        self._stalled = False

    def choose(
        self, running: Sequence[RequestT], head: Callable[[], RequestT | None]
    ) -> Choice[RequestT]:
        """The next step.

        running: the requests that have started, in the engine's order. head: returns the first
        waiting request that is ready to start, or None; called only if one could start now.
        """
        if len(self.ledger) != len(running):
            self.ledger.release_all_but({request.request_id for request in running})
        # A prompt that is scheduled to its end is done with, even while its result is still under
        # way (asynchronous scheduling): the request's next token is a decode token.
        partial = [r for r in running if r.num_computed_tokens < r.num_prompt_tokens]
        if not self._stalled:
            if partial:
                return Choice(Kind.CONTINUE, partial[:1])
            request = head() if self._may_start(running) else None
            if request is not None and self.ledger.fits(
                request.num_prompt_tokens, request.max_tokens
            ):
                return Choice(Kind.START, [request])
        decoding = [r for r in running if r not in partial] if partial else list(running)
        return Choice(Kind.DECODE, decoding)

    def executed(self, choice: Choice[RequestT], scheduled: bool) -> None:
        """Record what became of a choice; scheduled: whether the engine ran anything of it."""
        if choice.kind is Kind.DECODE:
            self._starts_since_decode = 0
        elif choice.kind is Kind.START and scheduled:
            (request,) = choice.requests
            others_wait = len(self.ledger) > 0
            self.ledger.reserve(request.request_id, request.num_prompt_tokens, request.max_tokens)
            self._starts_since_decode += others_wait
        # An engine that could not run a prompt now is asked to decode next, or it would be asked
        # for the same prompt for ever while the requests that hold what it needs stand still.
        self._stalled = choice.kind is not Kind.DECODE and not scheduled

    def _may_start(self, running: Sequence[RequestT]) -> bool:
        return len(running) < self.max_running and self._starts_since_decode < self.max_running
