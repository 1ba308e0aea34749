"""vLLM's own scheduler and prefix cache where decode is split: whose rows made the KV it reuses.

A shadow of the KV cache holds, for every slot, whether a split row wrote it. Every request computes
with KV of the kind that it would have made itself. All tokens are equal, so that whatever the cache
offers is taken. No model runs. On every vLLM that CoRun supports (``make test-compat``).
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scheduler_traces import BLOCK_SIZE

pytest.importorskip("vllm")

from real_scheduler import CLASSES, Engine, asking, trace_of

from corun.engine import split_cache
from corun.engine.arguments import PLAN_KEY
from corun.engine.split_cache import AsyncSplitScheduler, SplitScheduler
from corun.plan import Grants, Plan

BEYOND = 10
FREE = (SplitScheduler, AsyncSplitScheduler)


def engine_of(build, cls, beyond=BEYOND, **trace):
    """An engine that splits decode; the held schedulers grant all but mixed steps."""
    held = trace_of(**{"budget": 16, **trace})
    grants = Grants.everything() if cls in FREE else Grants(False, True, True, True, True)
    plan = Plan("certified", 4, 16, False, "", grants, split_beyond=beyond)
    build.config.additional_config = {PLAN_KEY: plan.to_mapping()}
    build.config.cache_config.enable_prefix_caching = True
    return Engine(build(held, cls))


class Shadow:
    """Which slots of the KV cache split rows wrote, as the engine's steps go by."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.split = engine, {}
        self.started: set[str] = set()
        self.wrong: list[str] = []
        self.seen: Counter = Counter()

    def step(self) -> None:
        tokens = self.engine.schedule()
        self.started -= {*self.engine.preempted}
        self.seen["preempted"] += len(self.engine.preempted)
        for name, n in (tokens or {}).items():
            request = self.engine.requests[name]
            begin, whole = self.engine.begins[name], max(request.num_prompt_tokens, BEYOND)
            blocks = self.engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
            for at in range(begin, begin + n):
                self.split[blocks[at // BLOCK_SIZE], at % BLOCK_SIZE] = at >= whole
            self.seen["hits"] += name not in self.started and begin > 0
            self.started.add(name)
            self.seen["split"] += max(0, begin + n - max(begin, whole))
            self.seen["recomputed"] += n > 1 and begin + n > whole
            for at in range(begin + n):
                self.seen["slots"] += 1
                if self.split[blocks[at // BLOCK_SIZE], at % BLOCK_SIZE] != (at >= whole):
                    self.wrong.append(f"{name} at {at}, of {whole}")
        self.engine.results()

    def finish(self) -> None:
        for _ in range(500):
            if not (self.engine.scheduler.has_requests() or self.engine.under_way):
                return
            self.step()
        raise AssertionError("stuck")


requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 24), st.integers(0, 12)), min_size=1, max_size=8
)


def played(build, cls, asked, capacity):
    """A Shadow after requests (prompt, output, steps to the next) went through."""
    shadow = Shadow(engine_of(build, cls, capacity=capacity))
    for i, (prompt, output, wait) in enumerate(asked):
        shadow.engine.add(f"r{i}", asking(prompt, output))
        for _ in range(wait):
            shadow.step()
    shadow.finish()
    return shadow


# A long output, then a prompt in which the same tokens stand; and the other way round, with the
# first preempted while it decodes.
GIVEN = [(2, 24, 30), (30, 1, 0)]
TAKEN = [(30, 1, 6), (2, 24, 12), (30, 20, 0), (30, 20, 0), (29, 20, 0)]
# Held schedulers preempt here, and what is computed again had split rows.
CROWDED = [(3, 24, 0), (5, 16, 3), (8, 22, 3), (4, 16, 3)]


@pytest.mark.parametrize("cls", (*FREE, *CLASSES))
def test_every_request_computes_with_kv_of_its_own_kind(build, cls):
    seen: Counter = Counter()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(requests, st.sampled_from((16, 20, 60)))
    @example(GIVEN, 18)
    @example(TAKEN, 18)
    @example(CROWDED, 16)
    def run(asked, capacity):
        shadow = played(build, cls, asked, capacity)
        assert not shadow.wrong
        seen.update(shadow.seen)

    run()
    assert seen["slots"] > 10_000
    for what in ("hits", "split", "recomputed", "preempted"):
        assert seen[what], f"nothing was {what}"


@pytest.mark.parametrize("cls", FREE)
def test_the_check_sees_what_the_cap_prevents(build, cls, monkeypatch):
    for asked in (GIVEN, TAKEN):
        assert not played(build, cls, asked, 18).wrong
    with monkeypatch.context() as patched:
        patched.setattr(split_cache, "cap", lambda manager, beyond: None)
        for asked in (GIVEN, TAKEN):
            assert played(build, cls, asked, 18).wrong


def test_a_hit_ends_where_split_rows_begin(build):
    engine = engine_of(build, SplitScheduler)
    engine.add("long", asking(6, 20))
    engine.finish()
    engine.add("again", asking(26, 2))
    engine.step()
    assert engine.begins == {"again": BEYOND // BLOCK_SIZE * BLOCK_SIZE}
    engine.finish()
    engine.add("prompt", asking(26, 2))  # cached by "again", whose prompt it was
    engine.step()
    assert engine.begins == {"prompt": 25 // BLOCK_SIZE * BLOCK_SIZE}
