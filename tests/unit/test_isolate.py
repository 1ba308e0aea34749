"""The policy with no grant (``isolate``), and the ledger that every policy reserves with."""

import pytest
from held_simulator import Request, asking, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_traces import BLOCK_SIZE, traces

from corun.plan import Grants
from corun.schedule.held import HeldPolicy, Kind
from corun.schedule.ledger import BlockLedger, KVGeometry, KVGroup, never_fits_message


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(trace=traces(), lag=st.integers(0, 1))
def test_properties_under_random_traffic(trace, lag):
    check(trace, Grants(), lag)


def policy_with(capacity: int = 100, max_running: int = 4) -> HeldPolicy:
    return HeldPolicy(KVGeometry((KVGroup(BLOCK_SIZE),), capacity, 64), max_running)


def start(policy: HeldPolicy, running: list, request: Request) -> None:
    choice = policy.choose(running, lambda: request)
    assert choice.kind is Kind.START and choice.requests == [request]
    policy.executed(choice, True)
    running.append(request)
    request.num_computed_tokens = request.num_prompt_tokens


def test_a_partial_prompt_anywhere_in_running_goes_first():
    policy, running = policy_with(), []
    for i in range(3):
        start(policy, running, asking(f"r{i}", 8))
    running[1].num_computed_tokens = 4
    waiting = asking("w", 4)
    choice = policy.choose(running, lambda: waiting)
    assert choice.kind is Kind.CONTINUE and choice.requests == [running[1]]


def test_a_prompt_under_way_is_not_a_prefill():
    policy, running = policy_with(), []
    start(policy, running, asking("r", 8))
    choice = policy.choose(running, lambda: None)
    assert choice.kind is Kind.DECODE and choice.requests == running


def test_the_head_is_not_asked_for_without_a_slot():
    policy, running = policy_with(max_running=1), []
    start(policy, running, asking("r", 8))

    def head():
        raise AssertionError("asked for a head that could not start")

    assert policy.choose(running, head).kind is Kind.DECODE


def test_a_head_that_does_not_fit_waits_and_starts_when_the_other_ends():
    policy, running = policy_with(capacity=5), []
    start(policy, running, asking("a", 8, 4))  # 12 tokens: 3 blocks
    waiting = asking("b", 8, 4)
    assert policy.choose(running, lambda: waiting).kind is Kind.DECODE
    running.clear()
    assert policy.choose(running, lambda: waiting).kind is Kind.START


def test_an_engine_that_cannot_run_a_prompt_decodes_the_others_next():
    policy, running = policy_with(), []
    start(policy, running, asking("a", 8))
    start(policy, running, asking("b", 8))
    running[1].num_computed_tokens = 4
    stuck = policy.choose(running, lambda: None)
    policy.executed(stuck, False)
    choice = policy.choose(running, lambda: None)
    assert choice.kind is Kind.DECODE and choice.requests == [running[0]]
    policy.executed(choice, True)
    assert policy.choose(running, lambda: None).kind is Kind.CONTINUE


def test_endless_one_token_prompts_do_not_starve_a_running_request():
    policy, running = policy_with(max_running=3), []
    start(policy, running, asking("long", 8, 8))
    starts = 0
    for i in range(100):
        short = asking(f"s{i}", 4, 1)
        choice = policy.choose(running, lambda short=short: short)
        policy.executed(choice, True)
        starts = starts + 1 if choice.kind is Kind.START else 0
        assert starts <= 3
    assert starts < 100


def test_one_token_prompts_alone_never_wait_for_a_decode_step():
    policy = policy_with(max_running=2)
    for i in range(10):
        short = asking(f"s{i}", 4, 1)
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
