"""The quickstart on a scripted engine: what it compares, what it shows, and its exit status."""

import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from corun.quickstart import __main__ as command
from corun.quickstart import measure, process
from corun.quickstart.measure import Measured, find_split, requests_for, run
from corun.quickstart.questions import QUESTIONS
from corun.quickstart.show import show
from corun.verify.compare import compare, total

TOKENS = 6


class Tokenizer:
    """One token a character."""

    chat_template = None

    def encode(self, text, **kwargs):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


class ChatTokenizer(Tokenizer):
    chat_template = "template"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant>"


class Engine:
    """Answers each request at once with letters; `depends` lets the batch change one answer."""

    def __init__(self, depends: bool) -> None:
        self.depends = depends
        self.queue: list = []

    def add_request(self, request_id, prompt, params):
        self.queue.append((request_id, prompt["prompt_token_ids"]))

    def has_unfinished_requests(self):
        return bool(self.queue)

    def abort_request(self, request_ids):
        raise AssertionError("the quickstart aborts nothing")

    def step(self):
        batch, self.queue = self.queue, []
        outputs = []
        for request_id, prompt in batch:
            crowded = self.depends and len(batch) > 1
            text = "abcdXY" if crowded and request_id.endswith("question-3") else "abcdef"
            logprob = -0.5 if crowded else -0.25
            answer = SimpleNamespace(
                index=0,
                token_ids=[ord(c) for c in text],
                logprobs=[{ord(c): SimpleNamespace(logprob=logprob, rank=1)} for c in text],
                finish_reason="length",
                stop_reason=None,
            )
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    finished=True,
                    prompt_token_ids=prompt,
                    prompt_logprobs=None,
                    outputs=[answer],
                )
            )
        return outputs


def measured(depends: bool, policy: str) -> Measured:
    tokenizer = Tokenizer()
    requests = requests_for(tokenizer, TOKENS)
    by_itself, crowd = run(Engine(depends), requests, dict)
    comparison = total(compare(by_itself[name], crowd[name]) for name in by_itself)
    split = find_split(by_itself, crowd, comparison, tokenizer.decode)
    steps = 0 if policy == "off" else 17
    return Measured(policy, len(requests), comparison, split, steps, 0, "corun1-0123456789abcdef")


def printed(plain: Measured, corun: Measured) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    show(console, plain, corun)
    return console.export_text()


def test_chat_models_get_their_template_and_others_a_plain_prompt():
    chat, plain = (requests_for(t, TOKENS) for t in (ChatTokenizer(), Tokenizer()))
    assert len(chat) == len(plain) == len(QUESTIONS) == 16
    decode = Tokenizer().decode
    assert decode(chat[0].prompt) == f"<user>{QUESTIONS[0]}<assistant>"
    assert decode(plain[0].prompt) == f"Question: {QUESTIONS[0]}\nAnswer:"
    assert chat[0].params == {**measure.SAMPLING, "max_tokens": TOKENS}


def test_every_request_runs_alone_and_in_the_crowd():
    finished = []
    requests = requests_for(Tokenizer(), TOKENS)
    by_itself, crowd = run(Engine(False), requests, dict, finished.append)
    assert list(by_itself) == list(crowd) == [r.name for r in requests]
    assert len(finished) == 2 * len(requests)


def test_an_engine_that_depends_on_the_batch_is_found_out():
    plain, corun = measured(True, "off"), measured(False, "isolate")
    assert (plain.comparison.tokens_equal, plain.comparison.logprobs_equal) == (15, 0)
    assert plain.split is not None
    assert not plain.kept
    assert (plain.split.token, plain.split.before) == (5, "abcd")
    assert (plain.split.alone, plain.split.crowd) == ("ef", "XY")
    assert corun.kept
    text = printed(plain, corun)
    assert "15 of 16" in text
    assert "0 of 96" in text
    assert "96 of 96" in text
    assert QUESTIONS[3] in text
    assert "another answer from token 5 on" in text
    assert "CoRun kept every bit of 96 logprobs and 96 tokens" in text


def test_a_broken_contract_is_not_called_kept():
    broken = measured(True, "isolate")
    text = printed(measured(True, "off"), broken)
    assert "kept every bit" not in text
    assert "16 requests differed" in text


def test_steps_outside_the_plan_break_the_contract_even_with_equal_bits():
    good = measured(False, "isolate")
    bad = Measured("isolate", 16, good.comparison, None, 17, 2, good.domain)
    assert not bad.kept
    assert "2 steps outside its plan" in printed(measured(True, "off"), bad)


@pytest.mark.parametrize(("corun_depends", "status"), [(False, 0), (True, 1)])
def test_exit_status_says_whether_corun_kept_the_contract(
    monkeypatch, capsys, corun_depends, status
):
    def apart(model, policy, max_tokens, title):
        return measured(True, "off") if policy == "off" else measured(corun_depends, policy)

    monkeypatch.setattr(command, "measure_apart", apart)
    assert command.main(["some/model"]) == status
    out = capsys.readouterr().out
    assert "plain vLLM" in out
    assert "a few minutes on a CPU, less on a GPU" in " ".join(out.split())


def test_an_engine_that_cannot_start_is_status_2_with_its_message(monkeypatch, capsys):
    def apart(*args):
        raise ValueError("no such model")

    monkeypatch.setattr(command, "measure_apart", apart)
    assert command.main(["some/model"]) == 2
    assert "no such model" in capsys.readouterr().err


def die(*args):
    os._exit(3)


def test_an_engine_process_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(process, "measure_with_progress", die)
    monkeypatch.setattr(process, "is_cpu_build", lambda: True)
    for name in (*process.QUIET, *process.ON_CPU):
        monkeypatch.setenv(name, "")
    with pytest.raises(RuntimeError, match="ended without a word"):
        process.measure_apart("some/model", "off", 1, "plain vLLM")
