"""``corun certify`` over fake engines: the check under a plan that the measured engine cannot take.

The certificate forbids something, so a second engine is started under the plan and checked.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from certificates import DOMAIN, certificate
from fake_engine import FakeEngine, FakeLLM

from corun.certify import store
from corun.certify.certificate import Certificate
from corun.certify.planner import verdicts
from corun.certify.run import CertifyOptions, certify
from corun.config import MEASURE
from corun.engine.arguments import SUBJECT_KEY
from corun.verify import engine as engine_module
from corun.verify import localize as localize_module
from corun.verify import run as verify_run
from corun.verify.localize import JOINED, MODULE, NOTHING, Finding, LocalizeReport
from corun.verify.trace_diff import ModuleDifference, TraceDiff
from corun.verify.workload import Limits

ROWS, TOKENS = 16, 64
NAMED = "layers.3.down_proj (Linear) in decode, 7 of 99 values"
FORBIDS = certificate(largest=TOKENS, requests=ROWS, broken=["mixed"], engine=None)
REPORT = {
    "plan": {"policy": "certified"},
    "steps": {"prefill": 3, "decode": 9},
    "violations": [],
    "domain": {"weights": "w"},
}


class MeasuredLLM:
    """The engine that measures, finding `found`. It cannot be checked, only asked."""

    def __init__(self, found):
        self.found, self.calls = found, []
        config = SimpleNamespace(
            additional_config={SUBJECT_KEY: DOMAIN},
            scheduler_config=SimpleNamespace(
                max_num_seqs=ROWS, max_num_scheduled_tokens=None, max_num_batched_tokens=TOKENS
            ),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=[], cudagraph_mode=SimpleNamespace(name="NONE")
            ),
            model_config=SimpleNamespace(max_model_len=1024),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def collective_rpc(self, method, args):
        self.calls.append((method, args))
        return [self.found.to_mapping()]


class Engines:
    """Hands out the measuring engine, then `checked`; keeps what each was asked for."""

    def __init__(self, checked):
        self.measured, self.checked = MeasuredLLM(FORBIDS), checked
        self.asked, self.open = [], []

    def start(self, model, config, *, random_weights, **args):
        llm = (self.measured, self.checked)[len(self.asked)]
        named = config.certificate
        trial = None if named == MEASURE else json.loads(Path(named).read_text())
        self.asked.append((config, trial, (model, random_weights, args)))
        if isinstance(llm, Exception):
            raise llm
        assert not self.open, "two engines at a time"
        self.open.append(llm)
        return llm


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Sets up the fake engines: called with the one to check, returns `Engines`."""
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(verify_run, "limits_of", lambda llm: Limits(ROWS, 4096, None, False))
    monkeypatch.setattr(verify_run, "tokenizer_of", lambda llm: None)
    monkeypatch.setattr(verify_run, "sampling_params", dict)

    def set_up(checked):
        made = Engines(checked)
        monkeypatch.setattr(engine_module, "open_engine", made.start)
        monkeypatch.setattr(engine_module, "close_engine", made.open.remove)
        return made

    return set_up


@pytest.fixture
def localized(monkeypatch):
    """Stands in for ``corun localize``: keeps the options, finds a module."""
    asked = []
    first = ModuleDifference(
        "layers.3.down_proj", "Linear", 3, "decode", 9, 0, (1, 99), (5, 99), 7, 99, 0.5
    )

    def localize(options):
        asked.append(options)
        found = Finding(JOINED, MODULE, "request-1", TraceDiff(first, 99, 1, 1), 1, 99)
        return LocalizeReport("m", "certified", findings=[found])

    monkeypatch.setattr(localize_module, "localize", localize)
    return asked


def checked(**engine):
    return FakeLLM(FakeEngine(rows=ROWS, **engine), REPORT)


def go(**options):
    return certify(CertifyOptions("m", budget_s=3.0, **options), progress=False)


def test_the_second_engine_agrees(engines):
    made = engines(checked())
    found = go(engine_args={"max_num_seqs": ROWS})
    check = found.certificate.engine
    assert check.equal and check.example is None
    assert check.tokens == check.logprobs == 4 * 6 * 8  # kinds of company, requests, tokens
    print(f"compared {check.tokens} token ids and {check.logprobs} logprobs")
    assert made.open == []
    # Measured once; the engine was neither adopted nor checked.
    assert made.measured.calls == [("corun_measure", (DOMAIN, 3.0))]
    (first, _, given), (second, trial, given_again) = made.asked
    assert (first.policy, first.certificate) == ("certified", MEASURE)
    assert given == given_again
    assert second.policy == "certified"
    # It ran under the certificate to be checked, which a start takes only as if it had been.
    trial = Certificate.from_mapping(trial)
    assert trial.engine.equal and trial.rows == FORBIDS.rows and trial.steps == FORBIDS.steps
    assert not Path(second.certificate).exists()
    assert found.file is not None and store.load(DOMAIN) == found.certificate
    assert verdicts(found.certificate, found.engine)[0].allowed


def leaky(name, position, rows):
    return -0.125 if name == "short-3" and position >= 5 and rows > 1 else 0.0


def test_the_second_engine_disagrees_and_the_first_difference_is_named(engines, localized):
    made = engines(checked(leak=leaky))
    found = go(engine_args={"max_num_seqs": ROWS, "dtype": "float32", "enforce_eager": False})
    check = found.certificate.engine
    assert not check.equal
    module, _, request = check.example.partition("; ")
    assert module == f"the first module that differs is {NAMED}"
    (asked,) = localized
    assert (asked.rows, asked.config.policy) == (ROWS, "certified")
    assert asked.engine_args["dtype"] == "float32"
    assert not {"enforce_eager", "max_num_seqs"} & set(asked.engine_args)
    assert request.startswith("request short-3, output 5, logprob: {")
    assert " alone, {" in check.example and check.example.endswith("} in company")
    assert check.logprobs == 4 * 6 * 8
    assert made.open == []
    # It is kept, and speaks against the policy at every later start.
    assert store.load(DOMAIN) == found.certificate
    verdict = verdicts(found.certificate, found.engine)[0]
    assert not verdict.allowed and "disagreed with the probes" in verdict.reason


@pytest.mark.parametrize("compiled_for", [8192, None])
def test_a_module_that_cannot_be_found_is_said_so(engines, monkeypatch, compiled_for):
    sources = []

    def localize(options):
        sources.append(options.config.certificate)
        error = "CertificateError: of another engine" if len(sources) == 1 else None
        return LocalizeReport("m", "certified", error=error, findings=[nothing] * (not error))

    nothing = Finding(JOINED, NOTHING, "request-1", TraceDiff(None, 10, 1, 1), 4, 10)
    monkeypatch.setattr(localize_module, "localize", localize)
    made = engines(checked(leak=leaky))
    found = replace(FORBIDS, domain={**DOMAIN, "compiled_for": compiled_for})
    made.measured = MeasuredLLM(found)
    example = go(keep=False).certificate.engine.example
    assert sources[0] != MEASURE
    if compiled_for:  # an eager engine does not take a certificate of compiled code
        assert example.startswith("no module of an eager engine differs")
        assert sources[1:] == [MEASURE]
    else:
        assert example.startswith("the first module that differs could not be found: Certif")
        assert len(sources) == 1


def test_a_step_outside_the_plan_is_a_disagreement(engines, localized):
    engines(FakeLLM(FakeEngine(rows=ROWS), {**REPORT, "violations": ["step 4 was wrong"]}))
    check = go(keep=False).certificate.engine
    assert not check.equal and "step 4 was wrong" in check.example
    assert store.load(DOMAIN) is None


class Interrupted(FakeEngine):
    def step(self):
        if self.steps == 40:
            raise KeyboardInterrupt
        return super().step()


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (FakeLLM(Interrupted(rows=ROWS), REPORT), KeyboardInterrupt, "^$"),
        (checked(crash=40), RuntimeError, "could not be checked: RuntimeError: the engine died"),
        (ValueError("no memory left"), ValueError, "no memory left"),
    ],
)
def test_a_check_that_does_not_end_keeps_nothing_and_leaves_nothing(engines, second, error, words):
    made = engines(second)
    with pytest.raises(error, match=words):
        go()
    assert len(made.asked) == 2 and made.open == []
    assert store.load(DOMAIN) is None
    assert not Path(made.asked[1][0].certificate).exists()
