"""Ranks that measure together: none tries what the others do not, and a difference counts for all.

Two processes with a real process group, as vLLM's workers have one; a rank that fell out of step
would wait for the other until the time limit.
"""

import multiprocessing
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from corun.certify import lockstep
from corun.certify.compositions import Trial, last_row
from corun.certify.pool import plain_pool
from corun.certify.probe import RowProbe
from corun.certify.search import ClassSearch, find_classes
from corun.certify.trial import TrialBench
from corun.engine.probes import ranks as module
from corun.engine.probes.ranks import GroupRanks, ranks_of
from corun.rows import Rows

LIMIT_S = 240
LARGEST, ODD = 300, 70
WIDTH = 1000  # enough for few draws of each row count
SIZES = [40, 9]


def rank_process(rank, address, results):
    """Search the classes of an operation, and run trials, on one of two ranks."""
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    world = torch.distributed.group.WORLD
    group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=world)
    calls = []

    def operation(x):
        calls.append(len(x))
        torch.distributed.all_reduce(torch.zeros(1))  # as a rank's part of a layer has them
        time.sleep(0.0005 * rank)  # the second rank's clock would end the search earlier
        return x * 2 + (rank == 1 and len(x) == ODD)

    def run(step, place):
        calls.append(step)
        torch.distributed.all_reduce(torch.zeros(1))
        beside = rank == 1 and len(step) > 1
        return [torch.full((p.tokens, 3000), float(beside)) for p in step]

    with lockstep.among(ranks_of(group)):
        first = lockstep.now()
        search = ClassSearch(
            "op", RowProbe(operation, plain_pool(WIDTH, torch.float32, "cpu")), LARGEST
        )
        claim = find_classes([search], LARGEST, budget_s=0.1, dense=80)[0]
        bench = TrialBench("fake", run, SIZES)
        trials = [
            Trial("decode_is_prefill", ((last_row(SIZES, 0),),), decode=False),
            Trial("decode_rows", ((last_row(SIZES, 0), last_row(SIZES, 1)),), decode=True),
        ] * 60
        claims = bench.work(iter(trials), 0.05)
    results.put((rank, first, claim.to_mapping(), [c.to_mapping() for c in claims], calls))
    torch.distributed.destroy_process_group()


def failing_process(rank, address, results):
    """The second of two ranks fails; the first one asks for a total."""
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    group = SimpleNamespace(ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
    module.PATIENCE = timedelta(seconds=1)
    try:
        results.put((rank, GroupRanks(group).total([1]) if rank == 0 else None))
    except RuntimeError as e:
        results.put((rank, str(e)))
    results.close()
    results.join_thread()
    os._exit(0)  # the group is of no use any more


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two found."""
    return [rest for _, *rest in both(rank_process, tmp_path_factory.mktemp("group"))]


def both(target, directory):
    """What two processes put into their queue, in the order of their ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    address = f"file://{directory / 'meeting'}"
    made = [context.Process(target=target, args=(r, address, results)) for r in range(2)]
    for process in made:
        process.start()
    found = sorted(results.get(timeout=LIMIT_S) for _ in made)
    for process in made:
        process.join(LIMIT_S)
    assert [process.exitcode for process in made] == [0, 0]
    return found


def test_they_read_one_clock_and_make_the_same_calls(ranks):
    one, other = ranks
    assert one[0] == other[0]
    assert one[3] == other[3]  # though the second is slower
    assert len(one[3]) > 160


def test_a_row_count_that_differs_on_one_rank_differs_on_all(ranks):
    one, other = ranks
    assert one[1] == other[1]
    same, apart = one[1]["classes"]
    assert apart == [[ODD, ODD]]
    assert ODD - 1 in Rows.of(range(same[0][0], same[0][1] + 1))
    assert one[1]["variant"] == []


def test_a_trial_that_differs_on_one_rank_is_refuted_on_all(ranks):
    one, other = ranks
    assert one[2] == other[2]
    held = {claim["name"]: (claim["holds"], claim["trials"]) for claim in one[2]}
    assert held["decode_rows"] == (False, 1)
    assert held["decode_is_prefill"][0]
    example = next(c["example"] for c in one[2] if c["name"] == "decode_rows")
    assert example.startswith("3000 values of the row decoded at position 39, beside 1 others")


def test_a_rank_does_not_wait_forever_for_one_that_failed(tmp_path):
    (_, told), _ = both(failing_process, tmp_path)
    assert "another rank gave no answer" in told


def test_one_rank_has_its_own_clock_and_counts():
    assert not lockstep.several()
    assert lockstep.total([3, 0]) == [3, 0]
    assert lockstep.now() <= time.perf_counter() <= lockstep.now()
    alone = ranks_of(SimpleNamespace(world_size=1))
    assert not isinstance(alone, GroupRanks)
    with lockstep.among(SimpleNamespace(several=True, now=lambda: 7.0)):
        assert lockstep.several()
        assert lockstep.now() == 7.0
    assert not lockstep.several()
