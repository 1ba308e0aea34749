"""Turns of real processes, with engines that are only said to be there (turn_taker.py)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from corun.bench import mode_child
from corun.bench.mode_child import Child, run_children
from corun.bench.turns import rotated

HERE = str(Path(__file__).parent)
PATIENCE_S = 120.0


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, *sys.path]))
    return tmp_path / "log"


def child(log, turns, **spec):
    return Child("turn_taker", "std", {"log": str(log), **spec}, turns)


def events(log):
    """What happened in order, each as (child, event, ...), and without the process ids."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    found = [(int(k), event, *map(int, rest)) for k, event, *rest in lines]
    return [e for e in found if e[1] != "pid"], {e[0]: e[2] for e in found if e[1] == "pid"}


def runs(told):
    """The begins and ends, each turn's number once more in its place; fails where two overlap."""
    steps = [e for e in told if e[1] in ("begins", "ended", "ends", "hangs")]
    assert [e[1] for e in steps[::2]] == ["begins"] * len(steps[::2])
    assert all(a[0] == b[0] for a, b in zip(steps[::2], steps[1::2], strict=True))
    return [(e[0], e[2]) for e in steps[::2]]


def exists(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_another_is_first_each_time():
    assert [rotated("abc", by) for by in range(4)] == [
        ("a", "b", "c"),
        ("b", "c", "a"),
        ("c", "a", "b"),
        ("a", "b", "c"),
    ]


def test_turns_come_in_order_when_all_engines_are_up_and_before_any_closes(log):
    found = run_children(
        [
            child(log, (0, 5, 7), turn_s=0.05),
            child(log, (1, 3, 8), turn_s=0.01, start_s=1.0),
            child(log, (2, 4, 6), start_s=0.3),
        ],
        PATIENCE_S,
    )
    assert found == [None] * 3
    told, pids = events(log)
    assert [e[1] for e in told[:3]] == ["up"] * 3 and {e[0] for e in told[:3]} == {0, 1, 2}
    assert runs(told) == [(k, n) for n, k in enumerate((0, 1, 2, 1, 2, 0, 2, 0, 1))]
    assert {e[3] for e in told if e[1] == "begins"} == {2}
    assert [e[1] for e in told[-3:]] == ["closes"] * 3
    assert len(told) == 3 + 2 * 9 + 3
    assert not any(exists(pid) for pid in pids.values())


def test_one_child_takes_its_turns_alone(log):
    assert run_children([child(log, (0, 1))], PATIENCE_S) == [None]
    assert events(log)[0] == [
        (0, "up"),
        (0, "begins", 0, 0),
        (0, "ended", 0),
        (0, "begins", 1, 0),
        (0, "ended", 1),
        (0, "closes"),
    ]


def test_a_child_that_ends_before_it_is_ready_is_not_waited_for(log):
    found = run_children(
        [
            child(log, (0, 3)),
            child(log, (1, 4), ends="start"),
            child(log, (2, 5), start_s=0.5),
        ],
        PATIENCE_S,
    )
    assert found == [None, "its process ended with status 7, see above", None]
    told, _ = events(log)
    assert runs([e for e in told if e[0] != 1]) == [(0, 0), (2, 2), (0, 3), (2, 5)]
    assert {e[3] for e in told if e[1] == "begins"} == {1}
    assert told.index((2, "up")) < told.index((0, "begins", 0, 1))


@pytest.mark.parametrize("last", [False, True])
def test_a_child_that_ends_in_the_middle_leaves_its_turns_to_others(log, last):
    turns = (2, 5, 8) if last else (0, 3, 6)
    others = [(0, 3, 6) if last else (2, 5, 8), (1, 4, 7)]
    found = run_children(
        [child(log, turns, ends=1), *(child(log, mine) for mine in others)], PATIENCE_S
    )
    assert found == ["its process ended with status 7, see above", None, None]
    told, _ = events(log)
    made = [n for _, n in runs(told)]
    assert made == [n for n in range(9) if n != turns[2]]
    beside = {e[2]: e[3] for e in told if e[1] == "begins"}
    assert {n: b for n, b in beside.items() if n <= turns[1]} == dict.fromkeys(
        range(turns[1] + 1), 2
    )
    assert {b for n, b in beside.items() if n > turns[1]} == {1}


def test_all_may_end(log):
    found = run_children([child(log, (0,), ends="start"), child(log, (1,), ends=0)], PATIENCE_S)
    assert all("status 7" in why for why in found)
    assert runs([e for e in events(log)[0] if e[0] == 1]) == [(1, 1)]


@pytest.mark.parametrize("place", ["start", 0])
def test_a_child_that_hangs_is_ended_and_the_others_go_on(log, place):
    found = run_children([child(log, (0, 2), hangs=place), child(log, (1, 3))], 3.0)
    assert found == ["it did not end within 3 s", None]
    told, pids = events(log)
    assert [e[2] for e in told if e[:2] == (1, "ended")] == [1, 3]
    assert not exists(pids[0])


def test_time_spent_waiting_for_others_does_not_count(log):
    began = time.monotonic()
    found = run_children([child(log, (n,), turn_s=1.5) for n in range(3)], 3.5)
    assert found == [None] * 3
    assert time.monotonic() - began > 4.5


def test_a_process_that_cannot_start_leaves_no_others(log, monkeypatch):
    real = subprocess.Popen

    def start(command, **keywords):
        if len(started) == 1:
            raise OSError("no more processes")
        started.append(real(command, **keywords))
        return started[0]

    started = []
    monkeypatch.setattr(mode_child.subprocess, "Popen", start)
    with pytest.raises(OSError, match="no more"):
        run_children([child(log, (0,)), child(log, (1,))], PATIENCE_S)
    assert started[0].poll() == -signal.SIGKILL


PARENT = """
import json, sys
from corun.bench.mode_child import Child, run_children
run_children([Child(*given) for given in json.loads(sys.argv[1])], 3600)
"""


@pytest.fixture
def parent(log):
    """Starts a benchmark of its own, of two children; ends whatever a failed test left of it."""
    started = []

    def start(first, second):
        children = [
            ("turn_taker", "std", {"log": str(log), **spec}, turns)
            for spec, turns in ((first, (0, 2)), (second, (1, 3)))
        ]
        started.append(subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(children)]))
        return started[-1]

    yield start
    for pid in [*events(log)[1].values(), *(process.pid for process in started)]:
        if exists(pid):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait()


def gone(log):
    return not any(exists(pid) for pid in events(log)[1].values())


def test_an_interrupt_ends_every_child(log, parent):
    process = parent({"hangs": 0}, {})
    wait_until(lambda: (0, "hangs") in events(log)[0], "the first turn did not begin")
    assert len(events(log)[1]) == 2 and not gone(log)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) != 0
    assert gone(log)
    assert not any(e[1] == "closes" for e in events(log)[0])


@pytest.mark.parametrize("second", [{}, {"start_s": 2.0}])
def test_children_give_up_when_their_parent_is_gone(log, parent, second):
    process = parent({"turn_s": 1.0}, second)
    first_seen = (0, "up") if second else (0, "begins", 0, 1)
    wait_until(lambda: first_seen in events(log)[0], "it did not begin")
    process.kill()
    process.wait()
    wait_until(lambda: gone(log), "a child is there still")
    told, _ = events(log)
    assert [e[2] for e in told if e[1] == "begins"] == ([] if second else [0])
    assert {e[0] for e in told if e[1] == "closes"} == {0, 1}
