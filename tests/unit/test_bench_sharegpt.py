"""corun.bench.sharegpt: conversations in ShareGPT's format."""

import json

import numpy as np
import pytest

from corun.bench import sharegpt
from corun.bench.requests import build
from corun.bench.workload import parse_workload


def tokenize(text):
    """A token for each character."""
    return [ord(c) for c in text]


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def turns(*pairs):
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in pairs]}


GOOD = [turns(("human", f"ask{i}" * (i + 1)), ("gpt", "b" * (i + 2))) for i in range(12)]
USELESS = [
    turns(),
    turns(("human", "only asks")),
    turns(("gpt", "answers"), ("human", "first")),
    turns(("human", ""), ("gpt", "to nothing")),
    turns(("human", "no answer"), ("gpt", "")),
    turns(("human", None), ("gpt", "x")),
    {"conversations": None},
    {"conversations": ["x", "y"]},
    "text",
    None,
]


def write(tmp_path, entries):
    path = tmp_path / "talk.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


def test_first_question_in_and_first_answers_length_out(tmp_path):
    entry = turns(("human", "abc"), ("gpt", "four"), ("human", "more"), ("gpt", "and more"))
    talk = sharegpt.read(write(tmp_path, [entry]), 1, rng(), tokenize)
    assert talk.prompts == (tuple(b"abc"),)
    assert talk.n_out == (4,)


def test_a_system_turn_and_other_names_of_the_speakers(tmp_path):
    entry = turns(("system", "be kind"), ("user", "ab"), ("assistant", "c"))
    talk = sharegpt.read(write(tmp_path, [entry]), 1, rng(), tokenize)
    assert (talk.prompts, talk.n_out) == ((tuple(b"ab"),), (1,))


def test_each_conversation_is_drawn_once_and_useless_ones_are_counted(tmp_path):
    path = write(tmp_path, GOOD + USELESS)
    talk = sharegpt.read(path, 12, rng(), tokenize)
    expected = {tuple(f"ask{i}".encode() * (i + 1)): i + 2 for i in range(12)}
    assert dict(zip(talk.prompts, talk.n_out, strict=True)) == expected
    assert len(talk.prompts) == 12
    passed_over = int(talk.source.rsplit(", ", 1)[1].split()[0])
    assert 0 < passed_over <= len(USELESS)
    assert sharegpt.read(path, 4, rng(), tokenize).prompts == talk.prompts[:4]
    assert sharegpt.read(path, 12, rng(1), tokenize).prompts != talk.prompts


def test_only_the_drawn_conversations_are_tokenized(tmp_path):
    calls = []
    sharegpt.read(write(tmp_path, GOOD), 2, rng(), lambda text: calls.append(text) or [1])
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "holds 0 usable conversations among 0"),
        (USELESS, "holds 0 usable conversations among 10 .*ask for fewer"),
        (GOOD[:2], "holds 2 usable"),
        ({"conversations": []}, "must hold a list"),
        ("{not json", "cannot read the conversations"),
    ],
)
def test_bad_files_are_refused(tmp_path, entries, message):
    with pytest.raises(ValueError, match=message):
        sharegpt.read(write(tmp_path, entries), 3, rng(), tokenize)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .* give the path"):
        sharegpt.read(tmp_path / "absent.json", 1, rng(), tokenize)


def test_long_conversations_are_cut_and_counted(tmp_path):
    entries = [
        turns(("human", "abcdefghij" * 10), ("gpt", "x" * 30)),
        turns(("human", "short"), ("gpt", "yes")),
    ]
    spec = parse_workload(f"sharegpt:{write(tmp_path, entries)}")
    made = build(spec, count=2, vocabulary=500, seed=0, max_model_len=64, tokenize=tokenize)
    by_size = sorted(made.requests, key=lambda r: len(r.prompt_token_ids))
    assert by_size[0].prompt_token_ids == tuple(b"short") and by_size[0].max_tokens == 3
    assert by_size[1].prompt_token_ids == tuple((b"abcdefghij" * 10)[:34])
    assert by_size[1].max_tokens == 30
    assert made.source.endswith("1 of 2 cut to fit 64 tokens")
    assert made.workload == "sharegpt:talk.json" and str(tmp_path) not in made.source


def test_a_tokenizer_is_needed(tmp_path):
    spec = parse_workload(f"sharegpt:{write(tmp_path, GOOD)}")
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        build(spec, count=1, vocabulary=500, seed=0, max_model_len=64)
