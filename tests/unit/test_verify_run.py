"""``corun verify`` over fake engines: its verdicts, exit statuses and reports."""

import io
import json

import pytest
from fake_engine import FakeEngine, FakeLLM
from rich.console import Console

from corun import cli
from corun.commands.verify import parse_engine_args
from corun.config import CoRunConfig
from corun.verify import run
from corun.verify.report import BROKE, CANNOT_RUN, KEPT
from corun.verify.run import VerifyOptions, verify
from corun.verify.summary import print_summary
from corun.verify.workload import Limits

DOMAIN = {"weights": "w", "decode_rows": 16}


def corun_report(**changed):
    return {
        "plan": {"policy": "isolate"},
        "steps": {"prefill": 3, "decode": 9},
        "violations": [],
        "domain": DOMAIN,
        **changed,
    }


@pytest.fixture
def started(monkeypatch):
    """Sets up fake engines; returns what to start them with and the list of those started."""
    engines: list[FakeLLM] = []
    made: list = []

    def open_engine(model, config, *, random_weights, **args):
        assert config.strict is False
        engines.append(made[len(engines)]())
        engines[-1].closed, engines[-1].args = False, args
        return engines[-1]

    def close_engine(llm):
        llm.closed = True

    monkeypatch.setattr(run, "open_engine", open_engine)
    monkeypatch.setattr(run, "close_engine", close_engine)
    monkeypatch.setattr(run, "defaults", lambda config, rows: {"max_num_seqs": rows or 16})
    monkeypatch.setattr(run, "limits_of", lambda llm: Limits(16, 4096, None, False))
    monkeypatch.setattr(run, "tokenizer_of", lambda llm: None)
    monkeypatch.setattr(run, "sampling_params", dict)
    monkeypatch.setattr(run, "versions", lambda: {"vllm": "0"})
    monkeypatch.setattr(run, "device", lambda: "fake")
    return engines, made


def go(started, *makers, policy="isolate", **options):
    engines, made = started
    made[:] = makers
    chosen = {"quick": True, **options}
    report = verify(VerifyOptions("m", CoRunConfig(policy=policy), **chosen), progress=False)
    assert all(llm.closed for llm in engines)
    assert json.loads(json.dumps(report.to_mapping(), allow_nan=False))["exit_status"] == (
        report.exit_status
    )
    out = io.StringIO()
    print_summary(report, Console(file=out, width=200, highlight=False, soft_wrap=True))
    return report, out.getvalue()


def good(**engine):
    return FakeLLM(FakeEngine(rows=16, **engine), corun_report())


def test_equal_outputs_are_kept_and_counted(started):
    report, text = go(started, good, good)
    assert report.exit_status == KEPT and report.verdict == "kept"
    everything = report.comparison
    assert everything.token_values == everything.token_values_equal > 1000
    assert everything.logprob_values == everything.logprob_values_equal > 1000
    assert len(started[0]) == 2
    assert {r.engine for r in report.results} == {1, 2}
    assert {r.suite for r in report.results} == {"paper", "adversarial"}
    crossings = report.crossings()
    assert crossings[8] is None
    assert "--rows 64" in crossings[64]
    assert report.longest > 2000
    assert f"{everything.token_values:,} token ids" in text
    assert "policy isolate: kept" in text
    assert report.to_mapping()["row_crossings"]["8"] == {"exercised": True, "why_not": None}
    assert "paper: the batch" not in text


def leaky(target, position, rows):
    return -0.125 if target == "paper-3" and position == 5 and rows > 1 else 0.0


def test_one_bit_that_depends_on_co_runners_is_broken_and_named(started):
    report, text = go(started, lambda: good(leak=leaky), good, suite="paper", restarts=1)
    assert report.exit_status == BROKE
    everything = report.comparison
    assert everything.logprob_values - everything.logprob_values_equal == 2  # two orders of a batch
    assert everything.token_values == everything.token_values_equal
    assert (everything.first.request, everything.first.step) == ("paper-3", 5)
    assert everything.first_token is None
    assert "first different logprob: request paper-3, completion 0, step 5" in text
    assert "0x" in text and "text so far: '<" in text
    assert report.to_mapping()["total"]["first"]["text_before"].startswith("<")


def test_plain_vllm_needs_no_report_and_has_no_audit(started):
    report, _ = go(started, lambda: FakeLLM(FakeEngine(rows=16)), policy="off", suite="paper")
    assert report.exit_status == KEPT
    assert report.audits == [] and report.domain is None
    assert len(started[0]) == 1  # the paper's suite has no restarts


def test_a_worker_without_a_report_could_not_run(started):
    report, text = go(started, lambda: FakeLLM(FakeEngine(rows=16)), suite="paper")
    assert report.exit_status == CANNOT_RUN
    assert "has no CoRun report" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"violations": ["step 4 was wrong"]}, "step 4 was wrong"),
        ({"steps": {"prefill": 0, "decode": 0}}, "saw no step"),
    ],
)
def test_what_the_audit_says_breaks_the_contract(started, changed, message):
    llm = FakeLLM(FakeEngine(rows=16), corun_report(**changed))
    report, text = go(started, lambda: llm, suite="paper")
    assert report.comparison.identical
    assert report.exit_status == BROKE
    assert message in text


def test_a_restart_into_another_domain_breaks_the_contract(started):
    other = FakeLLM(FakeEngine(rows=16), corun_report(domain={"weights": "x"}))
    report, text = go(started, good, lambda: other, suite="paper", restarts=1)
    assert report.exit_status == BROKE
    assert "another domain" in text


def test_settings_of_restarts_that_make_another_domain_compare_nothing(started):
    other = FakeLLM(FakeEngine(rows=16), corun_report(domain={"weights": "w", "decode_rows": 8}))
    given = {"restart_args": {"max_num_seqs": 8}, "suite": "paper", "restarts": 1}
    report, _ = go(started, good, lambda: other, **given)
    assert report.exit_status == CANNOT_RUN
    assert "with max_num_seqs=8 an engine is of another domain" in report.error
    assert {result.engine for result in report.results} == {1}


def test_settings_of_restarts_that_leave_the_domain_are_compared(started):
    given = {"restart_args": {"max_num_seqs": 8}, "suite": "paper", "restarts": 1}
    report, _ = go(started, good, good, **given)
    assert report.exit_status == KEPT
    assert {result.engine for result in report.results} == {1, 2}


def test_an_engine_that_dies_could_not_run(started):
    report, text = go(started, lambda: good(crash=40), suite="paper")
    assert report.exit_status == CANNOT_RUN
    assert "the engine died" in text


def test_a_difference_outweighs_a_crash_after_it(started):
    report, text = go(
        started, lambda: good(leak=leaky), lambda: good(crash=3), suite="paper", restarts=1
    )
    assert report.exit_status == BROKE
    assert "the engine died" in text


def test_a_request_refused_only_beside_others_breaks_the_contract(started):
    def refuse(name, present):
        return name == "paper-2" and present > 0

    report, text = go(started, lambda: good(refuse=refuse), suite="paper")
    assert report.exit_status == BROKE
    assert "refused beside others: no room" in text
    assert report.comparison.token_values > report.comparison.token_values_equal


def test_restarted_engines_may_have_other_settings(started):
    given = {"engine_args": {"max_model_len": 512}, "restart_args": {"max_num_batched_tokens": 128}}
    report, _ = go(started, good, good, **given)
    first = {"max_num_seqs": 16, "max_model_len": 512}
    assert [llm.args for llm in started[0]] == [first, first | given["restart_args"]]
    assert report.settings["engine_args"] == first
    assert report.settings["restart_args"] == given["restart_args"]


def test_a_request_refused_alone_is_left_out_and_said(started):
    report, text = go(
        started, lambda: good(refuse=lambda name, _: name == "paper-2"), suite="paper"
    )
    assert report.exit_status == KEPT
    assert "paper-2 was refused: no room" in text


def test_nothing_compared_is_not_kept(started):
    report, _ = go(started, lambda: good(refuse=lambda *_: True), suite="paper")
    assert report.comparison.requests == 0
    assert report.exit_status == CANNOT_RUN


@pytest.mark.parametrize(("flags", "shown"), [((), True), (("--no-progress",), False)])
def test_the_command_says_that_an_engine_starts(started, tmp_path, capsys, flags, shown):
    (tmp_path / "config.json").write_text("{}")
    started[1][:] = [lambda: good(crash=1)]
    assert cli.main(["verify", str(tmp_path), "--policy", "isolate", *flags]) == 2
    assert len(started[0]) == 1
    assert ("starting the engine" in capsys.readouterr().err) == shown


def test_options_are_checked():
    config = CoRunConfig()
    unused = {"restarts": 0, "restart_args": {"seed": 1}}
    for wrong in ({"suite": "none"}, {"max_tokens": 0}, {"rows": 0}, {"restarts": -1}, unused):
        with pytest.raises(ValueError):
            VerifyOptions("m", config, **wrong)
    assert VerifyOptions("m", config).engines == 3
    assert VerifyOptions("m", config, suite="paper").engines == 1
    assert VerifyOptions("m", config, quick=True).engines == 2
    assert VerifyOptions("m", config, restarts=0).engines == 1
    assert VerifyOptions("m", config).tokens == 48


def test_engine_args_are_json_or_strings():
    given = ["max_model_len=2048", "--kv-cache-dtype=auto", 'x={"a": 1}', "eager=true", "y=a=b"]
    assert parse_engine_args(given) == {
        "max_model_len": 2048,
        "kv_cache_dtype": "auto",
        "x": {"a": 1},
        "eager": True,
        "y": "a=b",
    }
    for wrong in ("max_model_len", "=3", "a b=3"):
        with pytest.raises(ValueError, match=r"--restart-arg .*NAME=VALUE"):
            parse_engine_args([wrong], "--restart-arg")


def test_a_restart_argument_that_vllm_does_not_know_is_told_before_any_engine(started):
    with pytest.raises(
        ValueError, match=r"'max_num_batched_token' \(did you mean max_num_batched_tok"
    ):
        go(started, good, good, restart_args={"max_num_batched_token": 64})
    assert not started[0]


@pytest.mark.parametrize("command", ["certify", "doctor", "localize", "verify"])
def test_no_command_starts_whose_report_could_not_be_written(command, tmp_path, capsys):
    report = tmp_path / "nodir" / "x.json"
    assert cli.main([command, str(tmp_path), "--json", str(report)]) == CANNOT_RUN
    told = capsys.readouterr().err
    assert f"{report.parent} is not a directory" in told
    assert "starting" not in told and "looking" not in told


@pytest.mark.parametrize("command", ["certify", "doctor", "localize", "verify"])
def test_no_command_starts_for_an_argument_that_vllm_does_not_have(command, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main([command, str(tmp_path), "--engine-arg", "max_num_seq=3"]) == CANNOT_RUN
    told = capsys.readouterr().err
    assert "no engine argument 'max_num_seq' (did you mean max_num_seqs?)" in told
    assert "starting" not in told
