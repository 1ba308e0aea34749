"""The policy alone under every set of grants, with random traffic on a small simulated engine."""

from collections import Counter
from dataclasses import replace

import pytest
from held_simulator import asking, check
from held_watch import GRANTS, name_of
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from scheduler_traces import BLOCK_SIZE, traces

from corun.plan import Grants
from corun.schedule.held import Choice, HeldPolicy, Kind
from corun.schedule.ledger import KVGeometry, KVGroup
from corun.schedule.step_check import violation


def test_properties_under_random_traffic_for_every_set_of_grants():
    seen = {grants: Counter() for grants in GRANTS}

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(trace=traces(), lag=st.integers(0, 1), more=st.sampled_from((0, 0, 8, 24)))
    def run(trace, lag, more):
        trace = replace(trace, budget=trace.budget + more, arrivals=trace.arrivals[:4])
        for grants, counts in seen.items():
            note(name_of(grants))
            watch = check(trace, grants, lag)
            counts.update(watch.counts, traces=1)

    run()
    for _ in range(2):  # what is rare may be missing among the first traces
        if any(exercised(counts) != wanted(grants) for grants, counts in seen.items()):
            run()
    for grants, counts in seen.items():
        assert counts["traces"] >= 400
        assert exercised(counts) == wanted(grants)


def exercised(counts):
    """What the traces met."""
    return {name for name in ("packed", "mixed", "cut", "preempted") if counts[name]}


def wanted(grants):
    """What they meet under these grants, and nothing else."""
    shared = grants.batched_prefill or grants.mixed
    met = {
        "packed": grants.batched_prefill,
        "mixed": grants.mixed,
        "cut": grants.free_chunks and shared,
        "preempted": grants.preemption,
    }
    return {name for name, does in met.items() if does}


PACK = Grants(batched_prefill=True)
MIXED = Grants(batched_prefill=True, mixed=True)


def policy(grants: Grants, *, capacity: int = 100, max_running: int = 4, step: int = 16):
    geometry = KVGeometry((KVGroup(BLOCK_SIZE),), capacity, 64)
    return HeldPolicy(geometry, max_running, grants, step)


def choose(made: HeldPolicy, running: list, waiting: list, free_blocks: int = 0):
    """(decoding, partial, starting) by name."""
    queue = iter(waiting)
    choice = made.choose(running, lambda: next(queue, None), free_blocks)
    groups = (choice.decoding, choice.partial, choice.starting)
    return choice, tuple("".join(r.request_id for r in group) for group in groups)


def test_several_prompts_share_a_step_and_nobody_overtakes():
    waiting = [asking("a", 6), asking("b", 5), asking("c", 6), asking("d", 2)]
    assert choose(policy(PACK), [], waiting)[1] == ("", "", "ab"), "c would need 17 tokens"
    assert choose(policy(Grants()), [], waiting)[1] == ("", "", "a")
    assert choose(policy(PACK, max_running=1), [], waiting)[1] == ("", "", "a")
    # 10, 9 and 10 tokens may be held: 3 blocks each.
    assert choose(policy(PACK, capacity=5), [], waiting)[1] == ("", "", "a")


def test_a_chunk_joins_whole_or_not_at_all_unless_it_may_be_cut():
    running = [asking("p", 20, computed=16)]
    long = [asking("a", 40)]
    assert choose(policy(PACK), running, long)[1] == ("", "p", "")
    free = Grants(batched_prefill=True, free_chunks=True)
    assert choose(policy(free), running, long)[1] == ("", "p", "a")
    assert choose(policy(free, step=5), running, long)[1] == ("", "p", ""), "one token is left"


def test_a_chunk_of_one_token_runs_in_a_step_of_its_own_unless_mixed():
    waiting = [asking("a", 6), asking("b", 1), asking("c", 6)]
    assert choose(policy(PACK), [], waiting)[1] == ("", "", "a")
    assert choose(policy(PACK), [], waiting[1:])[1] == ("", "", "b")
    assert choose(policy(PACK), [asking("p", 17, computed=16)], waiting)[1] == ("", "p", "")
    assert choose(policy(MIXED), [], waiting)[1] == ("", "", "abc")


def test_a_start_that_a_cache_hit_may_leave_one_token_of_runs_alone():
    hits = Grants(batched_prefill=True, prefix_cache=True)
    waiting = [asking("a", 6), asking("b", 5), asking("c", 6)]
    assert choose(policy(hits), [], waiting)[1] == ("", "", "a")
    assert choose(policy(hits), [], waiting[1:])[1] == ("", "", "b")
    assert choose(policy(hits), [], [waiting[0], waiting[2]])[1] == ("", "", "ac")


def test_decode_tokens_come_first_in_a_mixed_step():
    running = [asking("d", 4, computed=4), asking("e", 4, computed=4)]
    assert choose(policy(MIXED), running, [asking("a", 10), asking("b", 4)])[1] == ("de", "", "ab")
    assert choose(policy(MIXED), running, [asking("a", 10), asking("b", 5)])[1] == ("de", "", "a")
    alone = Grants(mixed=True)
    assert choose(policy(alone), running, [asking("a", 2), asking("b", 2)])[1] == ("de", "", "a")
    assert choose(policy(PACK), running, [asking("a", 2), asking("b", 2)])[1] == ("", "", "ab")


def test_a_chunk_too_long_beside_decode_gets_a_step_without_it_and_decode_is_not_starved():
    made, running = policy(MIXED), [asking("d", 4, 50, computed=4)]
    sizes = []
    for i in range(20):
        choice, names = choose(made, running, [asking(f"{i}", 16, 1)])
        assert names in {("", "", f"{i}"), ("d", "", "")}
        made.executed(choice, True)
        sizes.append(len(choice.starting))
    assert sizes == [1, 1, 1, 1, 0] * 4


def test_endless_packed_prompts_do_not_starve_decode():
    made, running = policy(PACK, max_running=8), [asking("d", 4, 50, computed=4)]
    starts = []
    for _ in range(8):
        choice, _ = choose(made, running, [asking(f"{i}", 5, 1) for i in range(4)])
        made.executed(choice, True)
        starts.append(len(choice.starting))
    assert starts == [3, 3, 2, 0] * 2


def test_what_the_engine_did_not_start_is_not_reserved():
    made = policy(PACK)
    choice, names = choose(made, [], [asking("a", 6), asking("b", 5)])
    assert names == ("", "", "ab")
    made.executed(choice, True, 1)
    assert "a" in made.ledger and "b" not in made.ledger


def test_with_preemption_a_start_needs_free_blocks_and_no_reservation():
    made = policy(Grants(preemption=True), capacity=8)
    running = [asking("d", 4, 12, computed=4)]
    running[0].outputs = 1
    waiting = [asking("a", 9, 30)]
    assert choose(made, running, waiting, 2)[1] == ("d", "", "")
    assert choose(made, running, waiting, 3)[1] == ("", "", "a")
    assert len(made.ledger) == 0


def test_a_resumed_request_computes_its_output_as_part_of_its_prompt():
    made = policy(Grants(preemption=True), step=8)
    resumed = asking("r", 3, 30)
    resumed.outputs = 9
    for computed, kind in ((8, Kind.CONTINUE), (11, Kind.DECODE)):
        resumed.num_computed_tokens = computed
        assert choose(made, [resumed], [])[0].kind is kind
    assert not policy(PACK).in_prefill(resumed)


def test_a_step_too_short_for_decode_is_an_error():
    with pytest.raises(ValueError, match="step of 3 tokens cannot hold a token of each of 4"):
        policy(PACK, step=3)


def test_violations_name_the_request():
    done, cut = asking("done", 4, computed=4), asking("cut", 20, computed=12)
    both = Choice([], [done, cut], [])
    assert "cut's prompt after 12 tokens" in violation(policy(PACK), both, {"done": 4, "cut": 12})
    free = Grants(batched_prefill=True, free_chunks=True)
    assert violation(policy(free), both, {"done": 4, "cut": 12}) is None
    assert violation(policy(PACK), both, {"cut": 12}) is None
    one = violation(policy(PACK), both, {"done": 1, "cut": 16})
    assert one == "vLLM ran one token of done's prompt beside other requests"
    decode = Choice([done, cut], [], [])
    assert "['cut']" in violation(policy(MIXED), decode, {"done": 1, "cut": 2})
