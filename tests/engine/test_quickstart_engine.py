"""The quickstart on the real model: plain vLLM changes bits with the batch, CoRun does not."""

import re

from corun.quickstart.__main__ import main

ROW = r"│ {name} +│ +(\d+) of 16 │ +(\d+) of 16 │ +([\d,]+) of ([\d,]+) │"


def row(printed: str, name: str) -> tuple[int, ...]:
    """A table row: same tokens, same logprobs, equal logprob values, and of how many."""
    found = re.search(ROW.format(name=re.escape(name)), printed)
    assert found, printed
    return tuple(int(number.replace(",", "")) for number in found.groups())


def test_only_corun_keeps_every_bit(model_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([model_path, "--max-tokens", "3"]) == 0
    printed = capsys.readouterr().out
    _, plain_requests, plain_equal, plain_values = row(printed, "plain vLLM")
    assert plain_requests < 16
    assert plain_equal < plain_values
    tokens, requests, equal, values = row(printed, "CoRun (isolate)")
    assert (tokens, requests) == (16, 16)
    assert equal == values > 16 * 3
