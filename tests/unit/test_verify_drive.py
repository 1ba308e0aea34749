"""Playing scenarios on an engine, with a fake one; and that scenarios refuse nonsense."""

from random import Random

import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corun.verify.drive import play
from corun.verify.scenario import (
    Abort,
    Arrival,
    Request,
    Scenario,
    alone,
    at_once,
    staggered,
    with_aborts,
)

# A loaded machine is slow, not wrong.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def request(name: str, tokens: int = 2, **params) -> Request:
    return Request(name, (1, 2, 3), {"max_tokens": tokens, "seed": 7, **params})


def test_arrivals_are_counted_in_steps_and_idle_time_is_skipped():
    engine = FakeEngine()
    scene = Scenario(
        "s",
        (Arrival(0, request("a", 2)), Arrival(1, request("b")), Arrival(50, request("c"))),
        ("a",),
    )
    done = []
    played = play(engine, scene, dict, done.append)
    assert engine.log == [(0, "add", "s/a"), (1, "add", "s/b"), (3, "add", "s/c")]
    assert done == ["a", "b", "c"]
    assert played.steps == 5
    assert (played.least_rows, played.most_rows) == (1, 2)
    assert len(played.records["a"].samples[0].token_ids) == 2
    assert played.records["a"].seed == 7
    assert played.records["a"].prompt_tokens == 3


def test_aborts_hit_requests_in_any_state_and_late_ones_are_not_counted():
    engine = FakeEngine(rows=1)
    scene = Scenario(
        "s",
        (
            Arrival(0, request("runs", 5)),
            Arrival(0, request("waits", 5)),
            Abort(0, "waits"),
            Abort(2, "runs"),
            Arrival(2, request("ends", 1)),
            Abort(9, "ends"),
        ),
        (),
    )
    played = play(engine, scene, dict)
    assert played.aborted == 2
    assert set(played.records) == {"ends"}
    assert ("abort" in [entry[1] for entry in engine.log if entry[2] == "s/ends"]) is False


def test_n_completions_come_in_outputs_of_their_own():
    played = play(FakeEngine(), alone(request("a", 3, n=2)), dict)
    assert [s.index for s in played.records["a"].samples] == [0, 1]
    assert [len(s.token_ids) for s in played.records["a"].samples] == [3, 3]
    assert played.most_rows == 2


def test_a_refused_request_is_reported_and_the_others_go_on():
    engine = FakeEngine(refuse=lambda name, _: name == "b")
    played = play(engine, at_once("s", [request("a"), request("b")]), dict)
    assert played.refused == {"b": "no room"}
    assert set(played.records) == {"a"}


def test_an_engine_that_loses_a_request_is_an_error():
    engine = FakeEngine()
    step = engine.step

    def lossy():
        return [o for o in step() if o.request_id != "s/b" or not o.finished]

    engine.step = lossy
    with pytest.raises(RuntimeError, match="no output for"):
        play(engine, at_once("s", [request("a"), request("b")]), dict)


@PATIENT
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 8), st.integers(0, 4))
def test_staggered_scenarios_with_aborts_finish_every_target(seed, targets, others, gap):
    rng = Random(seed)
    mine = [request(f"t{i}", rng.randint(1, 5)) for i in range(targets)]
    beside = [request(f"o{i}", rng.randint(1, 5)) for i in range(others)]
    scene = staggered("s", mine, beside, rng, gap)
    victims = [r.name for r in beside[::2]]
    scene = with_aborts(scene, victims, rng, within=3)
    assert scene.requests and scene.rows == targets + others
    engine = FakeEngine(rows=3)
    played = play(engine, scene, dict)
    assert set(scene.targets) == {r.name for r in mine} <= set(played.records)
    assert played.aborted + sum(v in played.records for v in victims) == len(victims)
    if victims:
        assert played.aborted >= 1  # the first victim goes before any step has seen it
    for r in mine:
        assert len(played.records[r.name].samples[0].token_ids) == r.params["max_tokens"]


def test_scenarios_refuse_nonsense():
    a = Arrival(1, request("a"))
    for events, targets, message in (
        ((a, Arrival(0, request("b"))), (), "order"),
        ((a, a), (), "two requests"),
        ((Abort(0, "a"), a), (), "before it comes"),
        ((a,), ("b",), "never arrive"),
        ((a, Abort(2, "a")), ("a",), "are aborted"),
    ):
        with pytest.raises(ValueError, match=message):
            Scenario("s", events, targets)
