"""corun.bench.requests: request sets, their digest, and their file."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.bench.arrivals import Arrivals
from corun.bench.requests import FORMAT, BenchRequest, RequestSet, build, load
from corun.bench.workload import parse_workload

SYNTHETIC = st.sampled_from(["5/3", "40/1", "burstgpt", "codeedit"])


def make(name="burstgpt", *, count=6, vocabulary=1000, seed=3, max_model_len=256):
    return build(
        parse_workload(name),
        count=count,
        vocabulary=vocabulary,
        seed=seed,
        max_model_len=max_model_len,
    )


@given(SYNTHETIC, st.integers(1, 12), st.integers(21, 5000), st.integers(0, 2**70),
       st.integers(43, 900))  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_every_request_fits_and_leaves_special_ids_out(name, count, vocabulary, seed, longest):
    made = make(name, count=count, vocabulary=vocabulary, seed=seed, max_model_len=longest)
    assert [r.id for r in made.requests] == [str(i) for i in range(count)]
    for request in made.requests:
        assert request.prompt_token_ids and request.max_tokens >= 1
        assert len(request.prompt_token_ids) + request.max_tokens <= longest
        assert min(request.prompt_token_ids) >= 10
        assert max(request.prompt_token_ids) < vocabulary - 10
        assert 0 <= request.seed < 2**31
    assert (
        made.digest
        == make(name, count=count, vocabulary=vocabulary, seed=seed, max_model_len=longest).digest
    )


@given(SYNTHETIC, st.integers(1, 10), st.integers(1, 10), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_fewer_requests_are_the_beginning_of_more(name, few, extra, seed):
    long = make(name, count=few + extra, seed=seed)
    assert make(name, count=few, seed=seed).requests == long.requests[:few]


def test_the_same_on_every_machine():
    """Pinned: with another digest, new results cannot be compared with recorded ones."""
    digests = {
        name: make(name, count=8, vocabulary=151936, seed=2026, max_model_len=8192).digest[:16]
        for name in ("1024/128", "burstgpt", "codeedit")
    }
    assert digests == {
        "1024/128": "acdd8fa10cd5b799",
        "burstgpt": "76b286fea73bf31f",
        "codeedit": "f1e8db0c4cf3ddd6",
    }


def test_seeds_and_requests_differ():
    made = make(count=50)
    assert len({r.prompt_token_ids[:8] for r in made.requests}) == 50
    assert len({r.seed for r in made.requests}) == 50
    assert made.digest != make(count=50, seed=4).digest


def test_another_longest_length_changes_only_what_it_cuts():
    wide, narrow = make(count=60, max_model_len=40_000), make(count=60, max_model_len=1024)
    cut = 0
    for one, other in zip(wide.requests, narrow.requests, strict=True):
        if len(one.prompt_token_ids) + one.max_tokens > 1024:
            cut += 1
            kept = len(other.prompt_token_ids)
            assert kept + other.max_tokens == 1024
            assert other.prompt_token_ids == one.prompt_token_ids[:kept]
        else:
            assert other == one
    assert 5 < cut < 55
    assert f"{cut} of 60 cut to fit 1024 tokens" in narrow.source
    assert "0 of 60 cut" in wide.source


def test_a_grid_is_exact_and_never_cut():
    made = make("1024/128", max_model_len=1152)
    assert {(len(r.prompt_token_ids), r.max_tokens) for r in made.requests} == {(1024, 128)}
    with pytest.raises(ValueError, match="needs 1152 tokens a request, the engine holds 1151"):
        make("1024/128", max_model_len=1151)


def test_a_trace_by_name(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("Model,Request tokens,Response tokens\nGPT-4,30,4\nX,20,0\n")
    made = make(f"burstgpt:{path}", count=1)
    assert (len(made.requests[0].prompt_token_ids), made.requests[0].max_tokens) == (30, 4)
    assert made.workload == "burstgpt:t.csv"
    assert "1 failed" in made.source and str(tmp_path) not in made.source


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "ask for 1 or more"),
        ({"count": -3}, "ask for 1 or more"),
        ({"seed": -1}, "give 0 or more"),
        ({"max_model_len": 1}, "2 tokens"),
        ({"vocabulary": 20}, "use a model with more than 20"),
    ],
)
def test_senseless_numbers_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)


requests = st.builds(
    BenchRequest,
    id=st.text(max_size=5),
    prompt_token_ids=st.lists(st.integers(0, 2**20), max_size=8).map(tuple),
    max_tokens=st.integers(1, 2**20),
    seed=st.integers(0, 2**31 - 1),
)


@given(st.lists(requests, max_size=5).map(tuple), st.data())
@settings(deadline=None)
def test_the_digest_sees_every_field_and_the_order(made, data):
    one = RequestSet("w", "s", 0, made)
    assert one.digest == RequestSet("other", "words", 9, made).digest
    if not made:
        return
    at = data.draw(st.integers(0, len(made) - 1))
    request = made[at]
    others = [
        dataclasses.replace(request, id=request.id + "x"),
        dataclasses.replace(request, prompt_token_ids=(*request.prompt_token_ids, 1)),
        dataclasses.replace(request, max_tokens=request.max_tokens + 1),
        dataclasses.replace(request, seed=request.seed + 1),
    ]
    for other in others:
        changed = (*made[:at], other, *made[at + 1 :])
        assert RequestSet("w", "s", 0, changed).digest != one.digest
    if made[::-1] != made:
        assert RequestSet("w", "s", 0, made[::-1]).digest != one.digest


def test_saved_and_loaded(tmp_path):
    made = make()
    path = tmp_path / "set.json"
    made.save(path)
    assert load(path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["set.json"]
    value = json.loads(path.read_text())
    assert list(value) == ["format", "workload", "source", "seed", "digest", "requests"]
    assert (value["format"], value["digest"]) == (FORMAT, made.digest)
    assert set(value["requests"][0]) == {
        "id", "prompt_token_ids", "max_tokens", "seed", "arrival_s"
    }  # fmt: skip
    assert {r["arrival_s"] for r in value["requests"]} == {None}


def test_arrivals_are_saved_beside_the_requests(tmp_path):
    made = make()
    times = Arrivals("poisson", 2.0).times(6, 1)
    made.save(tmp_path / "set.json", times)
    value = json.loads((tmp_path / "set.json").read_text())
    assert [r["arrival_s"] for r in value["requests"]] == times
    assert load(tmp_path / "set.json") == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v["requests"][0]["prompt_token_ids"].append(5),
            "was changed after it was saved",
        ),
        (lambda v: v["requests"].pop(), "was changed"),
        (lambda v: v.update(digest="0"), "was changed"),
        (lambda v: v["requests"][0].pop("seed"), "is damaged"),
        (lambda v: v.update(requests=None), "is damaged"),
        (lambda v: v.update(requests=["x"]), "is damaged"),
        (lambda v: v.update(format="corun-bench-requests/0"), "is not a request set"),
    ],
)
def test_changed_files_are_refused(tmp_path, change, message):
    path = tmp_path / "set.json"
    make().save(path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=f"{message}.*build it again"):
        load(path)


@pytest.mark.parametrize("text", ["", "[1", "[]", "3"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "set.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="build it again"):
        load(path)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the request set"):
        load(tmp_path / "absent.json")
