"""``corun doctor``: what it finds, what it calls a problem, and its exit status."""

import io
import json
import os

import pytest
from certificates import DIFFERS, certificate
from rich.console import Console

from corun import cli
from corun.certify import store
from corun.commands import doctor
from corun.commands.doctor_table import show
from corun.commands.kept import write_name
from corun.engine import plugins, seams

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in ("VLLM_PLUGINS", "CORUN_POLICY", "VLLM_BATCH_INVARIANT", seams.UNTESTED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # pytest's own logging stays as it is
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def found_seams(monkeypatch):
    """Makes every seam look found and the plugin installed; returns the list of seams."""
    monkeypatch.setattr(plugins, "plugin_installed", lambda: True)
    statuses = [seams.SeamStatus("corun.engine.x", "vllm.y", "z", True, "")]
    monkeypatch.setattr(seams, "check_all", lambda holders: statuses)
    return statuses


def printed(findings):
    stream = io.StringIO()
    show(findings, Console(file=stream, width=200))
    return stream.getvalue()


def test_a_good_machine(found_seams, monkeypatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.32.0")
    findings = doctor.examine(None, {})
    assert findings["problems"] == []
    assert findings["can_run"] is True
    assert findings["vllm"] == {"version": "0.32.0", "tested": True}
    assert (findings["policy"]["asked"], findings["policy"]["runs"]) == ("auto", "isolate")
    assert "no certificate is kept here" in findings["policy"]["reason"]
    assert findings["certificates"] == []
    text = printed(findings)
    assert "CoRun can run here." in text
    assert "1 of 1 found" in text
    json.dumps(findings)


def test_no_vllm(found_seams, monkeypatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "")
    findings = doctor.examine(None, {})
    assert not findings["can_run"]
    assert any("corun-vllm[cpu]" in p for p in findings["problems"])


def test_an_untested_version(found_seams, monkeypatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.99.0")
    assert any("not with 0.99.0" in p for p in doctor.examine(None, {})["problems"])
    allowed = doctor.examine(None, {seams.UNTESTED_VARIABLE: "1"})
    assert allowed["can_run"]
    assert allowed["vllm"]["tested"] is False


def test_a_missing_seam(found_seams):
    found_seams.append(seams.SeamStatus("corun.engine.x", "vllm.gone", "w", False, "no w"))
    findings = doctor.examine(None, {})
    assert findings["problems"] == ["1 of 2 vLLM symbols that CoRun holds are not there"]
    assert "missing: vllm.gone w (corun.engine.x): no w" in printed(findings)


@pytest.mark.parametrize(
    ("value", "blocked"), [(None, False), ("", True), ("other", True), ("other,corun", False)]
)
def test_blocked_plugins(found_seams, value, blocked):
    environ = {} if value is None else {"VLLM_PLUGINS": value}
    assert doctor.examine(None, environ)["plugin"]["blocked"] is blocked
    assert doctor.examine(None, environ)["can_run"] is not blocked
    plugins.ensure_plugin(environ)
    assert not plugins.plugin_blocked(environ)
    assert environ.get("VLLM_PLUGINS") == (f"{value},corun".lstrip(",") if blocked else value)


def test_a_package_that_is_not_installed(found_seams, monkeypatch):
    monkeypatch.setattr(plugins, "plugin_installed", lambda: False)
    findings = doctor.examine(None, {})
    assert findings["plugin"]["installed"] is False
    assert any("pip install" in p for p in findings["problems"])
    with pytest.raises(ValueError, match="pip install"):
        plugins.ensure_plugin({})


def test_policies_are_explained(found_seams):
    assert doctor.examine("off", {})["policy"]["runs"] == "off"
    assert doctor.examine(None, {"CORUN_POLICY": "isolate"})["policy"]["asked"] == "isolate"
    assert doctor.examine("off", {"CORUN_POLICY": "isolate"})["policy"]["asked"] == "off"
    wrong = doctor.examine(None, {"CORUN_POLICY": "islate"})
    assert wrong["problems"] == [wrong["policy"]["reason"]]
    assert "'islate'" in wrong["problems"][0]


@pytest.mark.parametrize(
    ("name", "value", "stops"),
    [
        ("VLLM_BATCH_INVARIANT", "1", True),
        ("VLLM_USE_FLASHINFER_SAMPLER", "1", True),
        ("VLLM_MOE_SKIP_PADDING", "1", True),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", False),
    ],
)
def test_hazards_of_the_environment(found_seams, name, value, stops):
    environ = {name: value}
    findings = doctor.examine(None, environ)
    assert [h["name"] for h in findings["hazards"]] == [name]
    assert "nset it" in findings["hazards"][0]["advice"]
    assert findings["can_run"] is not stops
    assert environ == {name: value}  # only looked at
    assert name in printed(findings)


def test_variables_and_exit_status(found_seams, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CORUN_STRICT", "0")
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.32.0")
    assert cli.main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    assert json.loads((tmp_path / "d.json").read_text())["variables"]["CORUN_STRICT"] == "0"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    capsys.readouterr()
    assert cli.main(["doctor", "--json", "-"]) == 2
    assert json.loads(capsys.readouterr().out)["plugin"]["blocked"] is True


def domain(**changed):
    """The subject of a certificate of this machine."""
    from corun.engine.explain import here

    return {"model": "0123abcd", "dtype": "torch.bfloat16", **here(), **changed}


def test_auto_depends_on_the_kept_certificates(found_seams):
    good, other, differs = (
        store.save(certificate(domain=domain(**changed), engine=engine))
        for changed, engine in (
            ({}, certificate().engine),
            ({"device": "another"}, certificate().engine),
            ({"dtype": "torch.float16"}, DIFFERS),
        )
    )
    write_name(good, "org/name")
    damaged = good.with_name("damaged.json")
    damaged.write_text("{")
    findings = doctor.examine(None, {})
    found = {c["file"]: c for c in findings["certificates"]}
    assert set(found) == {str(f) for f in (good, other, differs, damaged)}
    every = ["certified", "pack", "isolate"]
    assert (found[str(good)]["model"], found[str(good)]["allows"]) == ("org/name", every)
    assert found[str(good)]["differs"] == []
    assert found[str(other)]["model"] == "a model of shape 0123abcd"
    assert found[str(other)]["differs"] == ["device"]
    assert found[str(differs)]["allows"] == ["pack", "isolate"]
    assert "cannot be read" in found[str(damaged)]["error"]
    assert findings["can_run"]
    assert findings["policy"]["runs"] is None
    assert "depends on the model's certificate" in findings["policy"]["reason"]
    text = printed(findings)
    for words in (
        "auto -> it depends",
        "org/name",
        "allows certified, pack, isolate",
        "not for this machine: other device",
        "of no use",
    ):
        assert words in text
    assert doctor.examine("isolate", {})["policy"]["runs"] == "isolate"
    json.dumps(findings)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    """A model's directory without weights: nothing loads them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "model")


def test_a_model_without_a_certificate(found_seams, model, monkeypatch):
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    before = dict(os.environ)
    policy = doctor.examine(None, {}, model)["policy"]
    assert (policy["asked"], policy["runs"], policy["certificate"]) == ("auto", "isolate", None)
    assert "no certificate" in policy["reason"]
    findings = doctor.examine("certified", {}, model)
    assert findings["policy"]["runs"] is None
    assert not findings["can_run"]
    assert findings["problems"] == [findings["policy"]["reason"]]
    assert "needs a certificate" in findings["problems"][0]
    assert "-> -" in printed(findings)
    assert doctor.examine("off", {}, model)["policy"]["runs"] == "off"
    assert dict(os.environ) == before  # nothing is pinned for an engine that does not start


@pytest.mark.parametrize(
    ("made", "runs"), [({}, "certified"), ({"engine": DIFFERS, "broken": ["mixed"]}, "pack")]
)
def test_a_model_with_its_certificate(found_seams, model, made, runs):
    from corun.config import CoRunConfig
    from corun.engine.explain import explain

    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    _, file = explain(model, CoRunConfig("isolate"), given)
    # What the engine's own start would look for: the certificate's place says its subject.
    wanted = subject_of(model, given)
    saved = store.save(certificate(domain=wanted, **made))
    assert saved == file
    findings = doctor.examine(None, {}, model, given)
    policy = findings["policy"]
    assert (policy["runs"], policy["certificate"]) == (runs, str(file))
    text = "".join(printed(findings).split())
    assert saved.name in text
    assert f"auto->{runs}" in text
    assert doctor.examine("isolate", {}, model, given)["policy"]["certificate"] == str(file)
    # Another engine: it has none.
    other = doctor.examine(None, {}, model, {**given, "dtype": "float32"})["policy"]
    assert (other["runs"], other["certificate"]) == ("isolate", None)


def subject_of(model, given):
    """The subject that an engine which is being measured would be given."""
    from vllm.engine.arg_utils import EngineArgs

    from corun.config import MEASURE, CoRunConfig
    from corun.engine.arguments import SUBJECT_KEY, settle
    from corun.engine.explain import _environment_kept

    args = EngineArgs(model=model, **given)
    with _environment_kept():
        settle(args, CoRunConfig("certified", certificate=MEASURE))
    return args.additional_config[SUBJECT_KEY]


def test_the_command_takes_a_model_and_engine_arguments(found_seams, model, capsys, monkeypatch):
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.32.0")
    monkeypatch.delenv("CORUN_DEBUG", raising=False)
    flags = ["--dtype", "float32", "--rows", "4", "--engine-arg", "max_num_batched_tokens=32"]
    assert cli.main(["doctor", model, *flags, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert "looking at vLLM" not in printed.err  # JSON by itself
    told = json.loads(printed.out)
    assert (told["policy"]["model"], told["policy"]["runs"]) == (model, "isolate")
    assert "CORUN_VIOLATION_FILE" not in told["variables"]
    assert cli.main(["doctor", model, "--engine-arg", "max_num_batched_tokens=2", "--rows=4"]) == 2
    assert "below max_num_seqs" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["doctor", "--rows", "4"]) == 2
    assert "without a MODEL" in capsys.readouterr().err
