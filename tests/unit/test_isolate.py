"""The isolate policy alone, under random traffic on a small simulated engine."""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_traces import BLOCK_SIZE, NOT_PAUSED, PAUSED_ALL, Arrival, Trace, Watch, traces

from corun.schedule.held import HeldPolicy as IsolatePolicy
from corun.schedule.held import Kind
from corun.schedule.ledger import BlockLedger, KVGeometry, KVGroup, never_fits_message
from corun.schedule.refusal import refusal


@dataclass(eq=False)
class Request:
    """The four fields that the policy reads, and the simulator's own."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    arrival: Arrival
    number: int
    num_computed_tokens: int = 0
    outputs: int = 0


def blocks_held(trace: Trace, length: int, computed_before: int = 0) -> int:
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

    def __init__(self, trace: Trace, lag: int) -> None:
        self.trace, self.lag = trace, lag
        self.policy = IsolatePolicy(geometry(trace), trace.max_running)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.under_way: deque[list[Request]] = deque()
        self.now = 0
        self.refused: dict[str, str] = {}
        self.finished: dict[str, int] = {}
        reservations = {
            f"r{i}": self.policy.ledger.geometry.reservation(a.prompt, a.max_tokens)
            for i, a in enumerate(trace.arrivals)
        }
        self.watch = Watch(trace, reservations, trace.budget)

    def order(self, r: Request):
        return (r.arrival.priority, r.number) if self.trace.by_priority else r.number

    def blocked(self, r: Request) -> bool:
        return self.now < r.arrival.step + r.arrival.blocked_for

    def head(self) -> Request | None:
        if self.trace.pause_at(self.now) != NOT_PAUSED:
            return None
        return min((r for r in self.waiting if not self.blocked(r)), key=self.order, default=None)

    def arrive(self) -> None:
        for i, a in enumerate(self.trace.arrivals):
            if a.step != self.now:
                continue
            request = Request(f"r{i}", a.prompt, a.max_tokens, a, i)
            if message := refusal(self.policy.ledger.geometry, a.prompt, a.max_tokens):
                self.refused[request.request_id] = message
            else:
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

    def can_decode(self, r: Request) -> bool:
        limit = self.trace.length(r.arrival) - r.num_prompt_tokens
        return r.num_computed_tokens - r.num_prompt_tokens + 1 < limit

    def step(self) -> None:
        self.arrive()
        self.abort(late=False)
        pause = self.trace.pause_at(self.now)
        batch: dict[Request, int] = {}
        if pause != PAUSED_ALL:
            choice = self.policy.choose(self.running, self.head)
            batch = self.run(choice)
            self.policy.executed(choice, bool(batch))
            offered_in_vain = choice.kind is not Kind.DECODE and not batch
        blocked = {r.request_id for r in self.waiting if self.blocked(r)}
        if pause != PAUSED_ALL and offered_in_vain:
            self.watch.stall()
        else:
            self.watch.step({r.request_id: n for r, n in batch.items()}, blocked, pause)
        self.watch.check_running([r.request_id for r in self.running])
        self.check_blocks(batch)
        self.under_way.append([r for r in batch if r.num_computed_tokens >= r.num_prompt_tokens])
        self.abort(late=True)
        if len(self.under_way) > self.lag:
            self.results(self.under_way.popleft())
        self.now += 1

    def run(self, choice) -> dict[Request, int]:
        if choice.kind is Kind.DECODE:
            batch = {r: 1 for r in choice.requests if self.can_decode(r)}
        else:
            (r,) = choice.requests
            others = any(other is not r for other in self.running)
            if r.arrival.fickle == "beside others" and others:
                return {}
            if r.arrival.fickle == "at times" and self.now % 3 == 0:
                return {}
            batch = {r: min(self.trace.budget, r.num_prompt_tokens - r.num_computed_tokens)}
            if choice.kind is Kind.START:
                self.waiting.remove(r)
                self.running.append(r)
        for r, tokens in batch.items():
            r.num_computed_tokens += tokens
        return batch

    def check_blocks(self, batch: dict[Request, int]) -> None:
        ledger = self.policy.ledger
        assert ledger.reserved <= self.trace.capacity
        # A waiting engine may find the ledger one abort behind; it never holds less than is used.
        held = 0
        for r in self.running:
            held += blocks_held(
                self.trace, r.num_computed_tokens, r.num_computed_tokens - batch.get(r, 1)
            )
            assert r.request_id in ledger
        assert held <= ledger.reserved

    def results(self, sampled: list[Request]) -> None:
        for r in sampled:
            if r not in self.running:
                continue
            r.outputs += 1
            limit = self.trace.length(r.arrival) - r.num_prompt_tokens
            if r.outputs == min(r.arrival.stop_after, limit):
                self.end(r)

    def busy(self) -> bool:
        to_come = any(a.step >= self.now for a in self.trace.arrivals)
        return bool(self.running or self.waiting or to_come)

    def drain(self) -> None:
        while self.busy():
            self.step()
            assert self.watch.steps <= self.watch.most_steps(), "starved, or stuck"


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(trace=traces(), lag=st.integers(0, 1))
def test_properties_under_random_traffic(trace, lag):
    simulator = Simulator(trace, lag)
    simulator.drain()
    geo = geometry(trace)
    for i, a in enumerate(trace.arrivals):
        name = f"r{i}"
        fits = geo.blocks(min(a.prompt + a.max_tokens, trace.max_model_len)) <= trace.capacity
        assert (name in simulator.finished) == fits
        assert (name in simulator.refused) != fits
        if fits and a.abort_after is None:
            limit = trace.length(a) - a.prompt
            assert simulator.finished[name] == min(a.stop_after, limit)


def alone(prompt: int, max_tokens: int = 4, computed: int = 0, name: str = "r") -> Request:
    arrival = Arrival(0, prompt, max_tokens, max_tokens, 0, 0, None, False, None)
    return Request(name, prompt, max_tokens, arrival, 0, computed)


def policy_with(capacity: int = 100, max_running: int = 4) -> IsolatePolicy:
    return IsolatePolicy(KVGeometry((KVGroup(BLOCK_SIZE),), capacity, 64), max_running)


def start(policy: IsolatePolicy, running: list, request: Request) -> None:
    choice = policy.choose(running, lambda: request)
    assert choice.kind is Kind.START and choice.requests == [request]
    policy.executed(choice, True)
    running.append(request)
    request.num_computed_tokens = request.num_prompt_tokens


def test_a_partial_prompt_anywhere_in_running_goes_first():
    policy, running = policy_with(), []
    for i in range(3):
        start(policy, running, alone(8, name=f"r{i}"))
    running[1].num_computed_tokens = 4
    waiting = alone(4, name="w")
    choice = policy.choose(running, lambda: waiting)
    assert choice.kind is Kind.CONTINUE and choice.requests == [running[1]]


def test_a_prompt_under_way_is_not_a_prefill():
    policy, running = policy_with(), []
    start(policy, running, alone(8))
    choice = policy.choose(running, lambda: None)
    assert choice.kind is Kind.DECODE and choice.requests == running


def test_the_head_is_not_asked_for_without_a_slot():
    policy, running = policy_with(max_running=1), []
    start(policy, running, alone(8))

    def head():
        raise AssertionError("asked for a head that could not start")

    assert policy.choose(running, head).kind is Kind.DECODE


def test_a_head_that_does_not_fit_waits_and_starts_when_the_other_ends():
    policy, running = policy_with(capacity=5), []
    start(policy, running, alone(8, 4, name="a"))  # 12 tokens: 3 blocks
    waiting = alone(8, 4, name="b")
    assert policy.choose(running, lambda: waiting).kind is Kind.DECODE
    running.clear()
    assert policy.choose(running, lambda: waiting).kind is Kind.START


def test_an_engine_that_cannot_run_a_prompt_decodes_the_others_next():
    policy, running = policy_with(), []
    start(policy, running, alone(8, name="a"))
    start(policy, running, alone(8, name="b"))
    running[1].num_computed_tokens = 4
    stuck = policy.choose(running, lambda: None)
    policy.executed(stuck, False)
    choice = policy.choose(running, lambda: None)
    assert choice.kind is Kind.DECODE and choice.requests == [running[0]]
    policy.executed(choice, True)
    assert policy.choose(running, lambda: None).kind is Kind.CONTINUE


def test_endless_one_token_prompts_do_not_starve_a_running_request():
    policy, running = policy_with(max_running=3), []
    start(policy, running, alone(8, 8, name="long"))
    starts = 0
    for i in range(100):
        short = alone(4, 1, name=f"s{i}")
        choice = policy.choose(running, lambda short=short: short)
        policy.executed(choice, True)
        starts = starts + 1 if choice.kind is Kind.START else 0
        assert starts <= 3
    assert starts < 100


def test_one_token_prompts_alone_never_wait_for_a_decode_step():
    policy = policy_with(max_running=2)
    for i in range(10):
        short = alone(4, 1, name=f"s{i}")
        choice = policy.choose([], lambda short=short: short)
        assert choice.kind is Kind.START
        policy.executed(choice, True)


def test_no_room_for_anybody_is_an_error():
    with pytest.raises(ValueError, match="max_num_seqs"):
        policy_with(max_running=0)


GROUP = KVGroup(16)


@pytest.mark.parametrize(
    ("tokens", "group", "blocks"),
    [
        (0, GROUP, 0),
        (1, GROUP, 1),
        (16, GROUP, 1),
        (17, GROUP, 2),
        (160, KVGroup(16, max_blocks=4), 4),
        (33, KVGroup(16, max_blocks=4), 3),
        (33, KVGroup(16, extra_blocks=2), 5),
        (1000, KVGroup(1024), 1),
    ],
)
def test_blocks_of_a_group(tokens, group, blocks):
    assert group.blocks(tokens) == blocks


def test_reservation_sums_the_groups_and_stops_at_max_model_len():
    geo = KVGeometry((GROUP, KVGroup(8, 2)), 100, 64)
    assert geo.reservation(30, 10) == 3 + 2
    assert geo.reservation(30, 10_000) == 4 + 2
    assert KVGeometry.from_mapping(geo.to_mapping()) == geo


@given(
    st.lists(
        st.builds(KVGroup, st.integers(1, 32), st.none() | st.integers(1, 8), st.integers(0, 2)),
        max_size=3,
    ),
    st.integers(0, 64),
    st.integers(1, 300),
)
def test_longest_sequence_is_the_edge_of_what_fits(groups, capacity, max_model_len):
    geo = KVGeometry(tuple(groups), capacity, max_model_len)
    longest = geo.longest_sequence()
    assert longest == 0 or geo.never_fits_message(longest, 0) is None
    assert longest == max_model_len or geo.never_fits_message(longest + 1, 0) is not None


def test_a_refusal_names_the_numbers_and_what_to_do():
    message = never_fits_message(900, 200, groups=[GROUP], capacity=63, max_model_len=2048)
    for number in ("900", "max_tokens 200", "1100 tokens", "69 KV cache blocks", "has 63"):
        assert number in message
    assert "lower max_tokens to 108 or less" in message
    assert never_fits_message(900, 108, groups=[GROUP], capacity=63, max_model_len=2048) is None
    longer = never_fits_message(1200, 5, groups=[GROUP], capacity=63, max_model_len=2048)
    assert "shorten the request to 1008 tokens" in longer


def test_ledger_gives_back_what_ended_and_nothing_else():
    ledger = BlockLedger(KVGeometry((GROUP,), 10, 1000))
    ledger.reserve("a", 16, 16)
    ledger.reserve("b", 64, 16)
    assert (ledger.reserved, len(ledger)) == (7, 2)
    assert not ledger.fits(64, 1) and ledger.fits(32, 16)
    ledger.release_all_but({"b"})
    assert (ledger.reserved, "a" in ledger, "b" in ledger) == (5, False, True)
    with pytest.raises(AssertionError):
        ledger.reserve("b", 1, 1)
    with pytest.raises(AssertionError):
        ledger.reserve("c", 200, 1)
