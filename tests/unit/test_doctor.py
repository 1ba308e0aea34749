"""``corun doctor``: what it finds, what it calls a problem, and its exit status."""

import io
import json

import pytest
from rich.console import Console

from corun import cli
from corun.commands import doctor
from corun.commands.doctor_table import show
from corun.engine import plugins, seams

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("VLLM_PLUGINS", "CORUN_POLICY", "VLLM_BATCH_INVARIANT", seams.UNTESTED_VARIABLE):
        monkeypatch.delenv(name, raising=False)


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
    assert findings["policy"]["reason"]
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
