"""A small simulated engine that does as the held policy says, with preemption and cache hits."""

import sys
from collections import deque
from dataclasses import dataclass

from held_watch import HeldWatch
from scheduler_traces import BLOCK_SIZE, NOT_PAUSED, PAUSED_ALL, Arrival, Trace

from corun.plan import Grants
from corun.schedule.held import Choice, HeldPolicy, Kind
from corun.schedule.ledger import KVGeometry, KVGroup
from corun.schedule.refusal import refusal
from corun.schedule.step_check import violation


@dataclass(eq=False)
class Request:
    """What the policy reads, and the simulator's own: output that was under way when preempted."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    arrival: Arrival
    number: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    outputs: int = 0
    stale: int = 0
    blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.outputs


def asking(name: str, prompt: int, max_tokens: int = 4, computed: int = 0) -> Request:
    arrival = Arrival(0, prompt, max_tokens, max_tokens, 0, 0, None, False, None)
    return Request(name, prompt, max_tokens, arrival, num_computed_tokens=computed)


def blocks_held(trace: Trace, length: int, computed_before: int) -> int:
    """Blocks behind `length` tokens, of which the last step computed all but `computed_before`."""
    full = -(-length // BLOCK_SIZE)
    if trace.window is None:
        return full
    gone = max(0, computed_before - trace.window + 1) // BLOCK_SIZE
    return full + (full - gone)


def geometry(trace: Trace) -> KVGeometry:
    groups = [KVGroup(BLOCK_SIZE)]
    if trace.window is not None:
        most = min(trace.window - 1 + trace.budget, trace.max_model_len)
        groups.append(KVGroup(BLOCK_SIZE, -(-most // BLOCK_SIZE) + 1))
    return KVGeometry(tuple(groups), trace.capacity, trace.max_model_len)


class Simulator:
    """An engine that does as the policy says. lag: results that are still under way (0 or 1)."""

    def __init__(self, trace: Trace, grants: Grants, lag: int) -> None:
        self.trace, self.grants, self.lag = trace, grants, lag
        self.geometry = geometry(trace)
        # Without a grant nobody shares a prompt's step, and the engine alone cuts the prompt.
        longest = sys.maxsize if grants == Grants() else trace.budget
        self.policy = HeldPolicy(self.geometry, trace.max_running, grants, longest)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.under_way: deque[list[Request]] = deque()
        self.now = 0
        self.finished: dict[str, int] = {}
        self.refused: list[Request] = []
        self.lost: list[Request] = []
        self.begins: dict[str, int] = {}
        reservations = {
            f"r{i}": self.geometry.reservation(a.prompt, a.max_tokens)
            for i, a in enumerate(trace.arrivals)
        }
        self.watch = HeldWatch(trace, grants, reservations, self.geometry.blocks)

    def limit(self, r: Request) -> int:
        return self.trace.length(r.arrival) - r.num_prompt_tokens

    def blocked(self, r: Request) -> bool:
        return self.now < r.arrival.step + r.arrival.blocked_for

    def ready(self):
        if self.trace.pause_at(self.now) != NOT_PAUSED:
            return
        by_priority = self.trace.by_priority
        for r in sorted(self.waiting, key=lambda r: (r.arrival.priority * by_priority, r.number)):
            if r.stale:
                return
            if not self.blocked(r):
                yield r

    def arrive(self) -> None:
        for i, a in enumerate(self.trace.arrivals):
            if a.step == self.now and not refusal(self.geometry, a.prompt, a.max_tokens):
                request = Request(f"r{i}", a.prompt, a.max_tokens, a, i)
                self.waiting.append(request)
                self.watch.arrive(request.request_id, a)

    def abort(self, late: bool) -> None:
        for r in [*self.running, *self.waiting]:
            a = r.arrival
            if a.abort_after == self.now - a.step and a.abort_late == late:
                self.end(r)

    def end(self, r: Request) -> None:
        (self.running if r in self.running else self.waiting).remove(r)
        self.finished[r.request_id] = r.outputs
        self.watch.end(r.request_id)

    def free(self) -> int:
        return self.trace.capacity - sum(r.blocks for r in self.running)

    def allocate(self, r: Request, computed: int) -> bool:
        """Blocks for a running request's first `computed` tokens; False if there are too few."""
        needed = blocks_held(self.trace, computed, r.num_computed_tokens)
        if needed - r.blocks > self.free():
            return False
        r.blocks = needed
        return True

    def will_run(self, r: Request) -> bool:
        beside = any(other is not r for other in self.running)
        if r.arrival.fickle == "beside others" and beside:
            return False
        return not (r.arrival.fickle == "at times" and self.now % 3 == 0)

    def hit(self, r: Request) -> int:
        if not self.grants.prefix_cache:
            return 0
        longest = (r.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        return (0, min(BLOCK_SIZE, longest), longest)[(r.number + self.now) % 3]

    def run(self, choice: Choice) -> dict[Request, int]:
        """As vLLM does: running requests first, whose place the last one gives up; then starts."""
        batch: dict[Request, int] = {}
        shown = [*choice.decoding, *choice.partial]
        left, i = self.trace.budget, 0
        while i < len(shown) and left > 0:
            r = shown[i]
            if r in choice.decoding:
                run = r.outputs + r.num_output_placeholders < self.limit(r)
            else:
                run = self.will_run(r)
            if not run:
                i += 1
                continue
            n = min(r.num_tokens + r.num_output_placeholders - r.num_computed_tokens, left)
            while r in shown and not self.allocate(r, r.num_computed_tokens + n):
                victim = shown.pop()
                self.lost.append(victim)
                self.running.remove(victim)
                victim.blocks = 0
                left += batch.pop(victim, 0)
            if r not in shown:
                break
            batch[r] = n
            left -= n
            i += 1
        for r in choice.starting if not self.lost else ():
            begin = self.hit(r)
            n = min(r.num_tokens - begin, left)
            free = self.free()
            if not self.will_run(r) or n == 0 or self.geometry.blocks(r.num_tokens) > free:
                break
            self.waiting.remove(r)
            self.running.append(r)
            r.num_computed_tokens = self.begins[r.request_id] = begin
            assert self.allocate(r, begin + n)
            batch[r] = n
            left -= n
        self.refused = [r for r in (*choice.partial, *choice.starting) if r not in batch]
        return batch

    def step(self) -> None:
        self.arrive()
        self.abort(late=False)
        pause = self.trace.pause_at(self.now)
        known = {r.request_id: r.num_tokens for r in (*self.running, *self.waiting)}
        unready = [r.request_id for r in self.waiting if r.stale or self.blocked(r)]
        free = self.free()
        self.refused, self.lost, self.begins = [], [], {}
        batch: dict[Request, int] = {}
        offered_in_vain = False
        if pause != PAUSED_ALL:
            ready = self.ready()
            choice = self.policy.choose(self.running, lambda: next(ready, None), free)
            batch = self.run(choice)
            self.policy.executed(choice, bool(batch), sum(r in batch for r in choice.starting))
            offered_in_vain = choice.kind is not Kind.DECODE and not batch
        tokens = {r.request_id: n for r, n in batch.items()}
        lost = [r.request_id for r in self.lost]
        if lost and not batch:
            self.watch.idle(lost)
        elif offered_in_vain:
            self.watch.stall()
        else:
            self.watch.step(
                tokens,
                known=known,
                begins=self.begins,
                unready=unready,
                pause=pause,
                preempted=lost,
                refused=[r.request_id for r in self.refused],
                free_blocks=free,
            )
        self.record(batch)
        if pause != PAUSED_ALL:
            assert self.grants.preemption or violation(self.policy, choice, tokens) is None
        assert [r.request_id for r in self.running] == [r.name for r in self.watch.running]
        if not self.grants.preemption:
            # A waiting engine may find the ledger one abort behind; what is used is in it.
            ledger = self.policy.ledger
            assert self.trace.capacity - self.free() <= ledger.reserved <= self.trace.capacity
            assert all(r.request_id in ledger for r in self.running)
        self.abort(late=True)
        if len(self.under_way) > self.lag:
            self.results(self.under_way.popleft())
        self.now += 1

    def record(self, batch: dict[Request, int]) -> None:
        sampled = []
        for r, n in batch.items():
            r.num_computed_tokens += n
            if r.num_computed_tokens == r.num_tokens + r.num_output_placeholders:
                r.num_output_placeholders += 1
                sampled.append(r)
        self.under_way.append(sampled)
        for r in self.lost:
            r.num_computed_tokens = 0
            r.stale, r.num_output_placeholders = r.num_output_placeholders, 0
            self.waiting.append(r)

    def results(self, sampled: list[Request]) -> None:
        for r in sampled:
            if r not in self.running and r not in self.waiting:
                continue
            r.outputs += 1
            if r.stale:
                r.stale -= 1
            else:
                r.num_output_placeholders -= 1
            if r.outputs == min(r.arrival.stop_after, self.limit(r)):
                self.end(r)

    def drain(self) -> None:
        last, most = max(a.step for a in self.trace.arrivals), self.watch.most_steps()
        while self.running or self.waiting or self.now <= last:
            self.step()
            assert self.watch.steps <= most, "starved, or stuck"


def check(trace: Trace, grants: Grants, lag: int) -> HeldWatch:
    """Play the trace; everybody who fits must end with all of its output."""
    simulator = Simulator(trace, grants, lag)
    simulator.drain()
    for i, a in enumerate(trace.arrivals):
        length = trace.length(a)
        fits = simulator.geometry.blocks(length) <= trace.capacity
        assert (f"r{i}" in simulator.finished) == fits
        if fits and a.abort_after is None:
            assert simulator.finished[f"r{i}"] == min(a.stop_after, length - a.prompt)
    return simulator.watch
