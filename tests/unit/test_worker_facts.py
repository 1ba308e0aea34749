"""A worker refuses a certificate that was measured in another kind of process."""

import json

import pytest

pytest.importorskip("vllm")
from dataclasses import replace
from types import SimpleNamespace

import torch
from plans import certified

from corun.engine import worker_facts
from corun.engine.probes import spot_check
from corun.rows import Rows


def test_what_a_process_says_is_json_and_repeats():
    here = worker_facts.this_process()
    assert json.loads(json.dumps(here)) == here == worker_facts.this_process()
    assert here["threads"] == torch.get_num_threads()
    worker_facts.check(here)


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        ({"threads": 77}, "threads: 77, here"),
        ({"matmul": {"float32_cpu": "bf16"}}, "matmul: {'float32_cpu': 'bf16'}, here"),
    ],
)
def test_another_process_is_refused_by_what_differs(measured, word):
    other = {**worker_facts.this_process(), **measured}
    with pytest.raises(RuntimeError, match="VLLM_ENABLE_V1_MULTIPROCESSING") as raised:
        worker_facts.check(other)
    assert word in str(raised.value) and "corun certify" in str(raised.value)


def test_a_certificate_that_says_nothing_of_its_worker_is_refused():
    with pytest.raises(RuntimeError, match="threads: None, here"):
        worker_facts.check({})


def test_a_start_checks_the_process_before_it_compares_values(monkeypatch):
    plan = certified(Rows.span(1, 4), Rows.span(1, 4))
    monkeypatch.setattr(spot_check, "find", lambda *given: [])
    monkeypatch.setattr(spot_check, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    here = worker_facts.this_process()
    assert spot_check.run(None, None, None, replace(plan, worker=here)) == 0
    elsewhere = replace(plan, worker={**here, "threads": here["threads"] + 1})
    with pytest.raises(RuntimeError, match="another kind of worker"):
        spot_check.run(None, None, None, elsewhere)
