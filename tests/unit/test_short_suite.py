"""The suite that ``corun certify`` plays on a CPU: short, but met in four kinds of company."""

import pytest

from corun.verify.prompts import RandomPrompts
from corun.verify.scenario import Arrival
from corun.verify.short_suite import LENGTHS, TOKENS, short_suite
from corun.verify.workload import Limits

SOURCE = RandomPrompts(1000, seed=0)


def test_every_request_is_compared_in_four_kinds_of_company():
    suite = short_suite(SOURCE, Limits(32, 8192, None, True))
    names = {target.name for target in suite.targets}
    assert [len(target.prompt) for target in suite.targets] == list(LENGTHS)
    assert len({scene.name for scene in suite.scenarios}) == len(suite.scenarios) == 4
    for scene in suite.scenarios:
        assert set(scene.targets) == names
    orders = {tuple(r.name for r in scene.requests) for scene in suite.scenarios}
    assert len(orders) > 2
    late = [
        max(event.step for event in scene.events if isinstance(event, Arrival))
        for scene in suite.scenarios
    ]
    assert late[:2] == [0, 0]
    # The last comes when others decode: its prompt runs beside their rows.
    assert all(0 < step < 3 * TOKENS for step in late[2:])


def test_tokens_and_rows_of_prompts_are_compared():
    suite = short_suite(SOURCE, Limits(32, 8192, None, True))
    tokens = len(suite.targets) * TOKENS
    assert all(t.params["max_tokens"] == TOKENS for t in suite.targets)
    assert all(t.params["ignore_eos"] for t in suite.targets)
    prompts = sum(len(t.prompt) - 1 for t in suite.targets if "prompt_logprobs" in t.params)
    logprobs = sum(1 + t.params["logprobs"] for t in suite.targets) * TOKENS + prompts
    assert len(suite.scenarios) * tokens == 192
    assert len(suite.scenarios) * logprobs > 900


def test_a_small_engine_gets_shorter_prompts_or_a_clear_error():
    suite = short_suite(SOURCE, Limits(2, 40, None, True))
    assert max(len(target.prompt) for target in suite.targets) == 40 - TOKENS
    with pytest.raises(ValueError, match=r"holds 8 tokens a request.*max_model_len"):
        short_suite(SOURCE, Limits(2, TOKENS, None, True))
