"""Who runs in the next step, held to what a plan grants (paper, Algorithm 1). Pure Python.

A step holds prompts' chunks (prompts go first), or one decode token for every running request. With
no grant this is the paper's ``isolate``: a chunk of one prompt and nothing else, or a decode step.
Corrections to the algorithm as published:

* a partial prompt is looked for at every place of ``running``, not only at its head;
* what must fit is prompt + max_tokens, beside the same for every running request, so that nothing
  is ever preempted; while the head does not fit, nobody overtakes it;
* prompts run before decode, so a stream of prompts that end at once (max_tokens=1) could hold back
  the running requests for ever: after ``max_running`` starts in a row one decode step must come.

What each grant adds:

* batched_prefill: chunks of several prompts in a step, partial prompts first, then waiting ones, in
  order; the first that does not fit ends it;
* free_chunks: the last of them may be cut where the step is full. Without it a prompt is cut only
  at multiples of ``step_tokens``, so a chunk joins a step whole or not at all;
* mixed: every running request's decode token beside the chunks. A chunk that is too long for what
  the decode tokens leave gets a step without them;
* preemption: no reservation. A start needs free blocks for what is to be computed at once, and a
  request that lost its KV cache waits and starts again, its output then part of its prompt;
* prefix_cache: a hit can only shorten a start's chunk.

A chunk of one token has the decode shape, so unless mixed it runs in a step of its own.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice, tee
from typing import Generic, Protocol, TypeVar

from corun.plan import Grants
from corun.schedule.ledger import BlockLedger, KVGeometry


class Schedulable(Protocol):
    """What the policy reads of a request (vLLM's Request has all of it); lengths in tokens.

    The last two are read only where preemption is granted. num_tokens: prompt and known output.
    num_output_placeholders: output that is still under way (asynchronous scheduling).
    """

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    num_tokens: int
    num_output_placeholders: int


RequestT = TypeVar("RequestT", bound=Schedulable)


class Kind(Enum):
    """What a step does with prompts."""

    CONTINUE = "continue"
    START = "start"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Choice(Generic[RequestT]):
    """The requests that may run in the next step, each list in the engine's order.

    decoding: a token each. partial: started prompts, whose next chunk it is. starting: waiting
    requests, whose first chunk it is.
    """

    decoding: list[RequestT]
    partial: list[RequestT]
    starting: list[RequestT]

    @property
    def kind(self) -> Kind:
        """START if somebody starts, else CONTINUE if a prompt goes on, else DECODE."""
        if self.starting:
            return Kind.START
        return Kind.CONTINUE if self.partial else Kind.DECODE

    @property
    def requests(self) -> list[RequestT]:
        """All of them."""
        return [*self.decoding, *self.partial, *self.starting]


class HeldPolicy:
    """The policy and its ledger. Call ``choose`` before each step and ``executed`` after it."""

    def __init__(
        self,
        geometry: KVGeometry,
        max_running: int,
        grants: Grants = Grants(),  # noqa: B008 (frozen)
        step_tokens: int = sys.maxsize,
    ) -> None:
        """max_running: the most requests that may run at once (``max_num_seqs``).

        step_tokens: the longest step, and so the longest chunk, in tokens. Only needed where a step
        may hold a prompt and somebody else; alone, a prompt is cut by the engine.
        """
        if max_running < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {max_running}")
        if step_tokens < max_running:
            raise ValueError(
                f"a step of {step_tokens} tokens cannot hold a token of each of {max_running} "
                "requests. Raise max_num_batched_tokens or lower max_num_seqs"
            )
        self.max_running = max_running
        self.grants = grants
        self.step_tokens = step_tokens
        self.ledger = BlockLedger(geometry)
        # A prefix cache hit ends at a block's end; with several block sizes, at a multiple of this.
        self._hit_unit = math.gcd(*(group.block_size for group in geometry.groups)) or 1
        self._starts_since_decode = 0
        self._others_run = False
        self._stalled = False

    def choose(
        self,
        running: Sequence[RequestT],
        next_ready: Callable[[], RequestT | None],
        free_blocks: int = 0,
    ) -> Choice[RequestT]:
        """The next step.

        running: the requests that have started, in the engine's order. next_ready: returns the next
        waiting request, in the engine's order, that is ready to start, or None; called only if one
        more could start now. free_blocks: KV cache blocks that nobody holds; read only where
        preemption is granted.
        """
        if len(self.ledger) != len(running) and not self.grants.preemption:
            self.ledger.release_all_but({request.request_id for request in running})
        self._others_run = bool(running)
        partial = [r for r in running if self.in_prefill(r)]
        decoding = [r for r in running if r not in partial] if partial else list(running)
        if self._stalled:
            return Choice(decoding, [], [])
        # Every start counts, so that a step's starts cannot pass the limit on starts in a row.
        starts = self.max_running - max(len(running), self._starts_since_decode)
        waiting = tee(islice(iter(next_ready, None), max(starts, 0)), 2)
        if self.grants.mixed and decoding:
            room = self.step_tokens - len(decoding)
            chosen = Choice(decoding, *self._prompts(partial, waiting[0], room, free_blocks))
            if chosen.kind is not Kind.DECODE:
                return chosen
        chosen = Choice([], *self._prompts(partial, waiting[1], self.step_tokens, free_blocks))
        return Choice(decoding, [], []) if chosen.kind is Kind.DECODE else chosen

    def executed(
        self, choice: Choice[RequestT], scheduled: bool, started: int | None = None
    ) -> None:
        """Record what became of a choice.

        scheduled: whether the engine ran anything of it. started: how many of ``choice.starting``
        it started, from the first on; None for all of them, if it ran anything.
        """
        begun = choice.starting[:started] if scheduled else []
        if not self.grants.preemption:
            for r in begun:
                self.ledger.reserve(r.request_id, r.num_prompt_tokens, r.max_tokens)
        if choice.decoding or choice.kind is Kind.DECODE:
            self._starts_since_decode = 0
        elif self._others_run:
            self._starts_since_decode += len(begun)
        # An engine that could not run a prompt now is asked to decode next, or it would be asked
        # for the same prompt for ever while the requests that hold what it needs stand still.
        self._stalled = choice.kind is not Kind.DECODE and not scheduled

    def in_prefill(self, request: RequestT) -> bool:
        """Whether a started request has more to compute than its next token.

        A prompt that is scheduled to its end is done with, even while its result is still under way
        (asynchronous scheduling): the request's next token is a decode token.
        """
        end = request.num_prompt_tokens
        if self.grants.preemption:
            end = max(end, self._known_tokens(request) - 1)
        return request.num_computed_tokens < end

    def _known_tokens(self, request: RequestT) -> int:
        """The tokens of a request that there are to compute."""
        if not self.grants.preemption:
            return request.num_prompt_tokens
        return request.num_tokens + request.num_output_placeholders

    def _prompts(
        self,
        partial: Sequence[RequestT],
        waiting: Iterator[RequestT],
        room: int,
        free_blocks: int,
    ) -> tuple[list[RequestT], list[RequestT]]:
        """Partial and waiting prompts whose chunks fit together into `room` tokens."""
        going_on: list[RequestT] = []
        starting: list[RequestT] = []
        blocks = self.ledger.geometry.capacity - self.ledger.reserved
        if self.grants.preemption:
            blocks = free_blocks
        offered = chain(((r, False) for r in partial), ((r, True) for r in waiting))
        for request, starts in offered:
            blocks -= self._blocks_to_start(request) if starts else 0
            chunk = self._chunk(request, room)
            alone = not self.grants.mixed and self._may_be_one_token(request, chunk, starts)
            if blocks < 0 or chunk == 0 or (alone and (going_on or starting)):
                break
            (starting if starts else going_on).append(request)
            room -= chunk
            if alone or room == 0 or not self.grants.batched_prefill:
                break
        return going_on, starting

    def _chunk(self, request: RequestT, room: int) -> int:
        """The length of a prompt's next chunk, in tokens; 0 if it must not be in this step."""
        whole = min(self._known_tokens(request) - request.num_computed_tokens, self.step_tokens)
        if whole <= room:
            return whole
        return room if self.grants.free_chunks else 0

    def _may_be_one_token(self, request: RequestT, chunk: int, starts: bool) -> bool:
        """Whether the chunk is one token long, or would be behind some prefix cache hit."""
        hit = starts and self.grants.prefix_cache
        return chunk == 1 or (hit and (self._known_tokens(request) - 1) % self._hit_unit == 0)

    def _blocks_to_start(self, request: RequestT) -> int:
        geometry = self.ledger.geometry
        if self.grants.preemption:
            return geometry.blocks(self._known_tokens(request))
        return geometry.reservation(request.num_prompt_tokens, request.max_tokens)
