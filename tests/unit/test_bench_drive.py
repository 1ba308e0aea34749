"""The benchmark's driver, on an engine that answers by rule."""

from types import SimpleNamespace

import pytest

from corun.bench import drive as drive_module
from corun.bench.arrivals import Arrivals
from corun.bench.drive import drive, shuffled
from corun.bench.requests import BenchRequest
from corun.contract import digest


def requests(count, tokens=3):
    return [BenchRequest(str(i), (1, 2, i), tokens, 7) for i in range(count)]


class Clock:
    """A perf_counter that moves when the engine steps, or the driver sleeps."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Engine:
    """One token a step for each request, in one second; token and logprob follow from the request.

    short: ends its answers one token early.
    """

    def __init__(self, clock, short=False):
        self.clock, self.short = clock, short
        self.live, self.added, self.most = {}, [], 0

    def add_request(self, request_id, prompt, params):
        self.live[request_id] = [0, params]
        self.added.append((request_id, prompt["prompt_token_ids"], self.clock.now - 100))
        self.most = max(self.most, len(self.live))

    def has_unfinished_requests(self):
        return bool(self.live)

    def step(self):
        self.clock.now += 1
        outputs = []
        for name, state in list(self.live.items()):
            state[0] += 1
            done = state[0] == state[1] - self.short
            if done:
                del self.live[name]
            token = 10 * int(name) + state[0]
            logprobs = [{token: SimpleNamespace(logprob=-0.5 * state[0])}]
            completion = SimpleNamespace(token_ids=[token], logprobs=logprobs)
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=done))
        return outputs


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(drive_module, "time", clock)
    return clock


def run(clock, given, arrivals, **kwargs):
    engine = Engine(clock, kwargs.pop("short", False))
    return engine, drive(engine, given, arrivals, lambda r: r.max_tokens, **kwargs)


def test_all_at_once(clock):
    engine, driven = run(clock, requests(3), Arrivals("all"))
    assert [name for name, _, _ in engine.added] == ["0", "1", "2"]
    assert engine.added[1][1] == [1, 2, 1]
    assert driven.wall_s == 3
    second = driven.answers[1].to_mapping()
    assert second == {
        "id": "1",
        "n_in": 3,
        "n_out": 3,
        "arrival_s": 0.0,
        "first_token_s": 1,
        "finish_s": 3,
        "digest": digest([11, 12, 13], [-0.5, -1.0, -1.5]),
    }


def test_a_closed_loop_holds_its_concurrency(clock):
    engine, driven = run(clock, requests(5), Arrivals("closed", 2))
    assert engine.most == 2
    assert driven.wall_s == 9  # three rounds of two, two, one
    assert [answer.arrival_s for answer in driven.answers] == [0, 0, 3, 3, 6]


def test_poisson_times_are_kept_while_the_engine_is_busy(clock):
    arrivals = Arrivals("poisson", 0.5)
    engine, driven = run(clock, requests(6), arrivals, times_seed=3)
    times = arrivals.times(6, 3)
    assert [answer.arrival_s for answer in driven.answers] == times
    # None was given to the engine before its time.
    assert all(at >= due for (_, _, at), due in zip(engine.added, times, strict=True))
    assert all(a.first_token_s >= a.arrival_s for a in driven.answers)


def test_another_order_gives_the_same_answers_under_the_same_names(clock):
    given = requests(8)
    order = shuffled(given, 4)
    assert order != given
    assert sorted(order, key=lambda r: r.id) == given
    assert shuffled(given, 0) == given
    engine, other = run(clock, given, Arrivals("all"), order_seed=4)
    assert [name for name, _, _ in engine.added] == [r.id for r in order]
    _, first = run(clock, given, Arrivals("all"))
    for a, b in zip(first.answers, other.answers, strict=True):
        assert a.to_mapping()["digest"] == b.to_mapping()["digest"]


def test_an_answer_that_is_too_short_is_no_result(clock):
    with pytest.raises(RuntimeError, match="request 0 got 2 of 3 tokens"):
        run(clock, requests(2), Arrivals("all"), short=True)
