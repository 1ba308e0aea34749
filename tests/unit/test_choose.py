"""Which plan runs: configuration, certificates kept here, and a certificate that was named."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from certificates import DIFFERS, DOMAIN, certificate

from corun.certify import store
from corun.certify.certificate import CertificateError
from corun.config import MEASURE, CoRunConfig
from corun.engine import choose as choose_module
from corun.engine.choose import choose, without_model
from corun.engine.split_schedule import SPLIT_BEYOND
from corun.plan import Grants
from corun.rows import Rows

ROWS, TOKENS, COMPILED = 8, 64, 8192
SPLIT = {"beyond": SPLIT_BEYOND}


@pytest.fixture(autouse=True)
def asked(monkeypatch, tmp_path):
    """A cache of its own, and the subject of every engine; returns what subjects were asked for."""
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    seen = []

    def subject(args, model_config, tokens, *, split=False):
        seen.append(tokens)
        return {**DOMAIN, "split_decode": SPLIT} if split else dict(DOMAIN)

    monkeypatch.setattr(choose_module, "subject", subject)
    return seen


def chosen(
    policy="auto",
    named=None,
    *,
    rows=ROWS,
    tokens=TOKENS,
    eager=False,
    split=False,
    longest=1024,
    **compilation,
):
    config = CoRunConfig(policy, certificate=named, split_decode=split)
    # What is read of vLLM's EngineArgs and ModelConfig beside the subject.
    args = SimpleNamespace(
        enforce_eager=eager,
        compilation_config=SimpleNamespace(
            **{"compile_sizes": None, "compile_ranges_endpoints": None, **compilation}
        ),
    )
    model = SimpleNamespace(max_model_len=longest)
    return choose(config, args, model, rows, tokens, compiled_for=COMPILED)


def written(tmp_path, made):
    path = tmp_path / "named.json"
    path.write_text(json.dumps(made.to_mapping()))
    return str(path)


def test_without_a_certificate_auto_is_isolate_and_says_how_to_get_more(asked):
    plan = chosen()
    assert (plan.policy, plan.decode_rows, plan.max_prefill_tokens) == ("isolate", ROWS, TOKENS)
    assert "corun certify" in plan.reason
    assert asked == [COMPILED]
    assert plan.certificate is None
    assert chosen("isolate").reason == "you asked for it"


@pytest.mark.parametrize("policy", ["pack", "certified"])
def test_policies_that_need_a_certificate_say_so(policy):
    with pytest.raises(ValueError, match=rf"'{policy}' needs a certificate.*corun certify"):
        chosen(policy)
    with pytest.raises(ValueError, match=rf"'{policy}' needs a certificate.*corun certify"):
        without_model(policy)


def test_a_kept_certificate_is_used():
    store.save(certificate())
    plan = chosen()
    assert plan.policy == "certified"
    assert plan.certificate == certificate().digest
    assert plan.grants == Grants.everything()
    assert chosen("pack").policy == "pack"
    assert chosen("pack").certificate == certificate().digest
    assert chosen("isolate").policy == "isolate"


def test_auto_takes_what_the_certificate_allows():
    store.save(certificate(engine=DIFFERS))
    assert chosen().policy == "pack"
    with pytest.raises(ValueError, match="disagreed with the probes"):
        chosen("certified")
    store.save(certificate(engine=DIFFERS, broken=["batched_prefill"]))
    assert chosen().policy == "isolate"
    with pytest.raises(ValueError, match="batched prefill does not hold"):
        chosen("pack")


def test_the_engine_asked_for_may_be_too_large_for_it():
    store.save(certificate())
    with pytest.raises(ValueError, match="at most 64 tokens, not 128"):
        chosen("certified", tokens=128)
    assert chosen(tokens=128, rows=9).policy == "isolate"


def test_a_kept_certificate_of_no_use_stops_the_start():
    store.save(certificate()).write_text("{")
    for policy in ("auto", "certified", "pack"):
        with pytest.raises(CertificateError, match="delete it"):
            chosen(policy)


def test_a_named_certificate_comes_first(tmp_path):
    store.save(certificate(engine=DIFFERS))
    assert chosen("certified", written(tmp_path, certificate())).policy == "certified"


def test_a_named_certificate_must_be_of_this_engine(tmp_path):
    foreign = certificate(domain={**DOMAIN, "device": "H200"})
    with pytest.raises(CertificateError, match=r"named\.json.*device: 'H200', here 'd'"):
        chosen("auto", written(tmp_path, foreign))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"version": 99}'])
def test_a_named_certificate_that_cannot_be_used(tmp_path, text):
    path = tmp_path / "named.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CertificateError):
        chosen("auto", str(path))


def test_an_engine_that_is_measured_is_free(asked):
    plan = chosen("certified", MEASURE)
    assert plan.policy == "certified"
    assert plan.grants.free
    assert plan.step_rows == Rows.span(1, TOKENS)
    assert plan.sample_rows == Rows.span(1, ROWS)
    assert plan.certificate is None
    assert asked == []  # nothing is looked up


APART = [{"compile_sizes": [1, 8]}, {"compile_ranges_endpoints": [64]}]


@pytest.mark.parametrize("args", APART)
def test_engines_that_no_certificate_covers(args):
    store.save(certificate())
    assert chosen(**args).policy == "isolate"
    assert chosen("isolate", **args).policy == "isolate"
    for policy in ("pack", "certified"):
        with pytest.raises(ValueError, match="use 'isolate' or 'auto'"):
            chosen(policy, **args)


@pytest.mark.parametrize("sizes", APART)
def test_kernels_of_their_own_for_some_sizes_are_not_measured(sizes):
    with pytest.raises(ValueError, match=rf"{next(iter(sizes))}=.*remove that setting"):
        chosen("certified", MEASURE, **sizes)
    assert chosen("certified", MEASURE, eager=True, **sizes).certificate is None


def test_a_plan_says_what_worker_its_certificate_was_measured_in():
    worker = {"threads": 2}
    store.save(replace(certificate(), worker=worker))
    assert chosen("certified").worker == worker == chosen("pack").worker
    assert chosen("isolate").worker == {}


def test_what_can_be_said_without_a_model():
    assert without_model("auto") == (
        "isolate",
        "or what a model's own certificate allows (0 kept here)",
    )
    assert without_model("off")[0] == "off"
    store.save(certificate())
    assert without_model("certified")[0] == "certified"
    assert "1 kept here" in without_model("pack")[1]


def test_split_decode_needs_a_certificate_of_its_own(tmp_path):
    made = certificate()
    split = certificate(domain={**DOMAIN, "split_decode": SPLIT})
    plain, other = written(tmp_path, made), str(tmp_path / "split.json")
    Path(other).write_text(json.dumps(split.to_mapping()))
    assert chosen("certified", plain).split_beyond == 0
    assert chosen("certified", other, split=True).split_beyond == SPLIT_BEYOND
    assert chosen("auto", other, split=True).split_beyond == SPLIT_BEYOND
    for named, asked in ((plain, True), (other, False)):
        with pytest.raises(CertificateError, match="split_decode"):
            chosen("certified", named, split=asked)
    assert "--split-decode" in chosen("auto", split=True).reason
    assert chosen("auto", split=True).policy == "isolate"
    measured = chosen("certified", MEASURE, split=True)
    assert measured.split_beyond == SPLIT_BEYOND
    assert chosen("certified", MEASURE).split_beyond == 0


def test_pack_does_not_rest_on_a_certificate_of_split_decode(tmp_path):
    split = certificate(domain={**DOMAIN, "split_decode": SPLIT}, step=[range(1, 4), [64]])
    named = written(tmp_path, split)
    plan = chosen("auto", named, split=True)
    assert (plan.policy, plan.split_beyond) == ("isolate", 0)
    assert "measured with split_decode" in plan.reason
