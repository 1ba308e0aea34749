"""corun.jobs.lines and corun.jobs.params: what an input line may say."""

import json

import pytest

from corun.jobs.lines import BadLine, Job, parse, parse_line
from corun.jobs.params import PARAMETERS, checked


def line(**keys):
    return parse_line(0, json.dumps(keys), {})


def test_three_kinds_of_prompt():
    chat = [{"role": "user", "content": "hi"}]
    for kind, prompt in (("prompt", "hi"), ("prompt_token_ids", [1, 2]), ("messages", chat)):
        job = line(**{kind: prompt})
        assert isinstance(job, Job)
        assert (job.kind, job.prompt, job.id, job.params) == (kind, prompt, None, {})


def test_parameters_at_the_top_in_params_and_from_defaults():
    text = json.dumps({"prompt": "x", "temperature": 0.5, "params": {"top_k": 3, "n": None}})
    job = parse_line(0, text, {"top_k": 9, "n": 4, "max_tokens": 8})
    assert job.params == {"top_k": 3, "n": 4, "max_tokens": 8, "temperature": 0.5}


def test_parameters_are_normalised():
    job = line(prompt="x", stop="a", logit_bias={"7": 1}, bad_words=["b"])
    assert job.params == {"stop": ["a"], "logit_bias": {7: 1.0}, "bad_words": ["b"]}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "exactly one of"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "exactly one of"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": 3}, "'prompt' must be a string"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, -2]}, "token ids"),
        ({"prompt_token_ids": [True]}, "token ids"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "'role'"),
        ({"messages": [{"role": "user"}]}, "'content'"),
        ({"prompt": "a", "temprature": 1}, "unknown key(s) 'temprature'"),
        ({"prompt": "a", "params": {"topk": 1}}, "unknown sampling parameter(s) 'topk'"),
        ({"prompt": "a", "params": []}, "'params' must be an object"),
        ({"prompt": "a", "n": 1, "params": {"n": 2}}, "'n' given both"),
        ({"prompt": "a", "id": 1.5}, "'id' must be"),
        ({"prompt": "a", "temperature": "hot"}, "'temperature' must be a number"),
        ({"prompt": "a", "max_tokens": 1.0}, "'max_tokens' must be an integer"),
        ({"prompt": "a", "max_tokens": True}, "'max_tokens' must be an integer"),
        ({"prompt": "a", "seed": 2**63}, "'seed' must be an integer from -2**63 to 2**63 - 1"),
        ({"prompt": "a", "seed": -(2**63) - 1}, "'seed' must be an integer from -2**63"),
        ({"prompt": "a", "seed": 1.5}, "'seed' must be an integer from -2**63"),
        ({"prompt": "a", "ignore_eos": 1}, "'ignore_eos' must be true or false"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "'logit_bias' must be a mapping"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "needs 'messages'"),
    ],
)
def test_bad_lines_say_why(keys, reason):
    bad = line(**keys)
    assert isinstance(bad, BadLine)
    assert reason in bad.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("", "empty"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_not_an_object(text, reason):
    bad = parse_line(4, text, {})
    assert isinstance(bad, BadLine)
    assert reason in bad.reason
    assert str(bad).startswith("line 5: ")


def test_reasons_never_quote_the_prompt():
    for text in ('{"prompt": "SECRET", "n": "x"}', '{"prompt": "SECRET', '{"prompt": ["SECRET"]}'):
        bad = parse_line(0, text, {})
        assert isinstance(bad, BadLine)
        assert "SECRET" not in str(bad)


def test_parse_keeps_numbers_and_bad_lines_keep_ids():
    data = b'\xef\xbb\xbf{"prompt": "a"}\n\n{"id": "k", "prompt": 1}\n{"prompt": "\xff"}\r\n\n\n'
    lines = parse(data, {})
    assert [type(x).__name__ for x in lines] == ["Job", "BadLine", "BadLine", "BadLine"]
    assert [x.index for x in lines] == [0, 1, 2, 3]
    assert lines[2].id == "k"
    assert lines[3].reason == "not UTF-8"
    assert parse(b"\n \n", {}) == []


def test_checked_drops_nulls_and_knows_what_vllm_knows():
    assert checked({"top_p": None, "seed": -1}) == {"seed": -1}
    with pytest.raises(ValueError, match="unknown sampling parameter"):
        checked({"beam_width": 2})
    vllm = pytest.importorskip("vllm.sampling_params")
    assert set(PARAMETERS) <= set(vllm.SamplingParams.__struct_fields__)
