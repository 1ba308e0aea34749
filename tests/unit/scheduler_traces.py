"""Random traffic for schedulers.

The same traces drive the policy alone (test_isolate.py, test_held.py) and vLLM's own scheduler
under it (test_scheduler_real.py, test_held_real.py).
"""

from dataclasses import dataclass

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
