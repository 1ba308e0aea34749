"""Random traffic for schedulers, and the properties that ``isolate`` must keep under it.

The same traces drive the policy alone (test_isolate.py) and vLLM's own scheduler under it
(test_scheduler_real.py). `Watch` is told what each step did; it keeps its own record of every
request and shares no code with the policy.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st

NOT_PAUSED, PAUSED_NEW, PAUSED_ALL = 0, 1, 2
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Arrival:
    """One request. Steps count from its arrival; `stop_after` is the output length it stops at."""

    step: int
    prompt: int
    max_tokens: int
    stop_after: int
    priority: int
    blocked_for: int
    abort_after: int | None
    abort_late: bool  # between a step and its result
    fickle: str | None  # when the engine cannot run its prompt (policy test only)


@dataclass(frozen=True)
class Trace:
    """An engine and its traffic. window: of a second, sliding-window KV cache group, or None."""

    max_running: int
    budget: int
    max_model_len: int
    capacity: int
    window: int | None
    by_priority: bool
    arrivals: tuple[Arrival, ...]
    pauses: dict[int, int]  # step -> pause state from then on

    def pause_at(self, step: int) -> int:
        before = [s for s in self.pauses if s <= step]
        return self.pauses[max(before)] if before else NOT_PAUSED

    def length(self, arrival: Arrival) -> int:
        return min(arrival.prompt + arrival.max_tokens, self.max_model_len)


@st.composite
def traces(draw):
    max_model_len = draw(st.integers(6, 36))
    max_running = draw(st.integers(1, 4))
    step = 0
    arrivals = []
    for _ in range(draw(st.integers(1, 10))):
        step += draw(st.sampled_from((0, 0, 0, 1, 2, 7)))
        rare = draw(st.integers(0, 255))
        max_tokens = draw(st.integers(1, 12))
        arrivals.append(
            Arrival(
                step=step,
                prompt=draw(st.integers(1, max_model_len - 1)),
                max_tokens=max_tokens,
                stop_after=max_tokens if rare % 2 else 1 + rare % 5,
                priority=rare % 3,
                blocked_for=rare % 9 if rare % 5 == 0 else 0,
                abort_after=rare % 13 if rare % 7 == 0 else None,
                abort_late=rare % 4 == 0,
                fickle={0: "beside others", 1: "at times"}.get(rare % 11),
            )
        )
    pauses = {}
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, 12))
        pauses = {start: draw(st.sampled_from((PAUSED_NEW, PAUSED_ALL)))}
        pauses[start + draw(st.integers(1, 8))] = NOT_PAUSED
    return Trace(
        max_running=max_running,
        budget=draw(st.integers(max_running, 12)),
        max_model_len=max_model_len,
        capacity=draw(st.integers(3, 24)),
        window=draw(st.sampled_from((None, None, 4, 9))),
        by_priority=draw(st.booleans()),
        arrivals=tuple(arrivals),
        pauses=pauses,
    )


@dataclass
class Seen:
    """What `Watch` knows of a request; `computed` counts tokens scheduled so far."""

    name: str
    number: int
    arrival: Arrival
    reservation: int
    computed: int = 0
    started: bool = False
    ended: bool = False
    chunks: list[int] = field(default_factory=list)

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.arrival.prompt


class Watch:
    """Checks every step. chunk: the length of a whole prompt chunk in this engine, in tokens."""

    def __init__(self, trace: Trace, reservations: dict[str, int], chunk: int) -> None:
        self.trace, self.reservations, self.chunk = trace, reservations, chunk
        self.seen: dict[str, Seen] = {}
        self.running: list[Seen] = []
        self.steps = self.starts = self.starts_since_decode = 0
        self.stalled = False

    def arrive(self, name: str, arrival: Arrival) -> None:
        number = len(self.seen)
        self.seen[name] = Seen(name, number, arrival, self.reservations[name])

    def end(self, name: str) -> None:
        self.seen[name].ended = True
        self.running = [r for r in self.running if r.name != name]

    def waiting(self) -> list[Seen]:
        order = (lambda r: (r.arrival.priority, r.number)) if self.trace.by_priority else None
        rest = [r for r in self.seen.values() if not r.started and not r.ended]
        return sorted(rest, key=order) if order else rest

    def can_decode(self, r: Seen) -> bool:
        limit = self.trace.length(r.arrival) - r.arrival.prompt
        return not r.in_prefill and r.computed - r.arrival.prompt + 1 < limit

    def step(self, scheduled: dict[str, int], blocked: set[str], pause: int) -> None:
        """scheduled: tokens by request, as the engine ran it. blocked: names still blocked."""
        self.steps += 1
        requests = [self.seen[name] for name in scheduled]
        assert not any(r.ended for r in requests), "an ended request ran"
        if pause == PAUSED_ALL:
            assert not scheduled, "something ran during a pause"
            return
        partial = [r for r in self.running if r.in_prefill]
        assert len(partial) <= 1, "two prompts are in progress"
        ready = [r for r in self.waiting() if r.name not in blocked and pause == NOT_PAUSED]
        reserved = sum(r.reservation for r in self.running)
        may_start = (
            len(self.running) < self.trace.max_running
            and self.starts_since_decode < self.trace.max_running
            and ready
            and reserved + ready[0].reservation <= self.trace.capacity
        )
        if any(r.in_prefill for r in requests):
            assert len(requests) == 1, f"a prompt ran beside others: {scheduled}"
            self._prompt_step(requests[0], scheduled, partial, ready, may_start)
        else:
            assert set(scheduled.values()) <= {1}, f"a decode step took more tokens: {scheduled}"
            assert all(r in self.running for r in requests)
            if not self.stalled:
                assert not partial, f"{partial[0].name} was not continued"
                assert not may_start, f"{ready[0].name} could have started"
            expected = [r.name for r in self.running if self.can_decode(r)]
            assert list(scheduled) == expected, "decode left someone out, or changed the order"
            self.starts_since_decode, self.stalled = 0, False
        for r in requests:
            r.computed += scheduled[r.name]

    def stall(self) -> None:
        """The engine could not run the prompt it was offered: it must decode next."""
        assert not self.stalled, "offered a prompt again before anyone else could go on"
        self.steps += 1
        self.stalled = True

    def _prompt_step(self, r, scheduled, partial, ready, may_start) -> None:
        assert not self.stalled
        # The chunks of a prompt are a function of the prompt alone.
        tokens = scheduled[r.name]
        assert tokens == min(self.chunk, r.arrival.prompt - r.computed), "an odd chunk"
        r.chunks.append(tokens)
        if partial:
            assert r is partial[0], f"{r.name} ran before {partial[0].name} was through"
            return
        assert not r.started
        assert r is ready[0], f"{r.name} overtook {ready[0].name}"
        assert may_start, f"{r.name} started without room"
        self.starts_since_decode += bool(self.running)
        r.started = True
        self.starts += 1
        self.running.append(r)

    def check_running(self, names: list[str]) -> None:
        """The engine's running list must be the started requests in the order they started."""
        assert names == [r.name for r in self.running]

    def most_steps(self) -> int:
        """No request may take longer than this many steps in all (starvation, livelock)."""
        work = sum(2 + a.prompt + a.max_tokens + a.blocked_for for a in self.trace.arrivals)
        return 3 * work + max((a.step for a in self.trace.arrivals), default=0) + 60
