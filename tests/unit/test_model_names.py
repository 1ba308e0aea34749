"""Model names: what cannot be a model is told in one line, before vLLM is imported."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import corun
from corun import cli
from corun.commands.model_names import check_model

ONLINE: dict[str, str] = {}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "other", "org/local"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "m.gguf").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nope", "there is no ./nope"),
        ("/nope", "there is no /nope"),
        ("~nope", "there is no ~nope"),
        ("models/org/nope", "there is no models/org/nope"),
        ("file.txt", "is a file"),
        ("other", "holds no config.json"),
        ("./other", "holds no config.json"),
        ("org/local", "holds no config.json"),  # vLLM, too, takes what exists for a path
    ],
)
def test_paths_that_are_no_model(folder, name, words):
    with pytest.raises(ValueError, match=words) as stopped:
        check_model(name, ONLINE)
    assert "\n" not in str(stopped.value)
    assert "config.json, or a Hub name" in str(stopped.value)


@pytest.mark.parametrize(
    "name",
    ["model", "./model", "m.gguf", "Qwen/Qwen3-8B", "gpt2", "s3://bucket/a/b", "org/repo:Q4_K_M"],
)
def test_models_and_hub_names_pass(folder, name):
    check_model(name, ONLINE)


def test_mistrals_form_passes(folder):
    (folder / "other" / "params.json").write_text("{}")
    check_model("other", ONLINE)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_only_what_is_in_the_cache(folder, monkeypatch, variable):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    offline = {variable: "1"}
    with pytest.raises(ValueError, match=f"org/name is neither.*{variable} forbids a download"):
        check_model("org/name", offline)
    check_model("org/name", {variable: "0"})
    check_model("org/name", {**offline, "VLLM_USE_MODELSCOPE": "True"})
    check_model("model", offline)
    snapshot = folder / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(ValueError, match="neither"):
        check_model("org/name", offline)  # a download that brought nothing
    (snapshot / "config.json").write_text("{}")
    check_model("org/name", offline)
    check_model("org/name:Q4_K_M", offline)


ARGUMENTS = {
    "certify": (),
    "verify": (),
    "localize": (),
    "serve": (),
    "doctor": (),
    "generate": ("-i", "in.jsonl", "-o", "out.jsonl"),
}


@pytest.mark.parametrize("command", ARGUMENTS)
def test_every_command_tells_at_once(folder, command, capsys, monkeypatch):
    monkeypatch.delenv("CORUN_DEBUG", raising=False)
    assert cli.main([command, "./nope", *ARGUMENTS[command]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"corun {command}: there is no ./nope")
    assert error.count("\n") == 1


def test_it_imports_no_engine():
    program = (
        "import sys; from corun import cli; status = cli.main(['verify', './nope']);"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules], status)"
    )
    root = str(Path(corun.__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if k != "CORUN_DEBUG"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": root},
        check=True,
    )
    assert done.stdout == "[] 2\n"
    assert time.monotonic() - started < 20  # a stalled machine; it takes about 0.3 s
