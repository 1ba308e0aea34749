import os
import platform
import sys
from pathlib import Path

import pytest

import corun
from corun.bench import machine, mode_names
from corun.bench.mode_process import MODES, config_of, environment, parse_mode, policy_of
from corun.config import MEASURE, CoRunConfig


def test_modes_are_known_by_name_and_runner():
    for text in (*MODES, "std@v1", "isolate@v2"):
        assert parse_mode(text) == text
    for bad in ("off", "fast", "std@v3", "@v1", ""):
        with pytest.raises(ValueError, match="no mode"):
            parse_mode(bad)
    assert {policy_of(mode) for mode in ("std", "bi@v1")} == {"off"}
    assert policy_of("certified@v1") == policy_of("certified+split@v1") == "certified"
    assert {mode_names.split(mode)[0] for mode in MODES} >= set(mode_names.LABELS)


def test_the_settings_of_a_mode():
    assert config_of("std", "file.json") == CoRunConfig("off")
    assert config_of("isolate@v1", None) == CoRunConfig("isolate")
    assert config_of("certified", "a") == CoRunConfig("certified", certificate="a")
    split = CoRunConfig("certified", certificate="a", split_decode=True)
    assert config_of("certified+split@v2", "a") == split


def test_a_mode_decides_its_own_environment():
    shell = {
        "HOME": "/h",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "CUBLASLT_WORKSPACE_SIZE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CORUN_POLICY": "isolate",
        "CORUN_CACHE": "/c",
        "PYTHONPATH": "/p",
    }
    root = str(Path(corun.__file__).parents[1])
    plain = environment("std", shell)
    assert plain["HOME"] == "/h" and plain["CORUN_CACHE"] == "/c"
    assert plain["PYTHONPATH"].split(os.pathsep) == [root, "/p"]
    kept = {"HOME", "CORUN_CACHE", "PYTHONPATH"}
    assert not set(shell) - kept & set(plain)
    invariant = environment("bi@v1", shell)
    assert invariant["VLLM_BATCH_INVARIANT"] == "1"
    assert invariant["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    changed = {name for name in {*plain, *invariant} if plain.get(name) != invariant.get(name)}
    assert changed == {"VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"}
    assert shell["VLLM_BATCH_INVARIANT"] == "1"


def test_the_machine_is_described(monkeypatch):
    pytest.importorskip("vllm")
    found = machine.hardware()
    assert found == machine.hardware() and found["device"] and found["cores"] == os.cpu_count()
    assert machine.versions()["python"] == platform.python_version()
    assert machine.versions()["vllm"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/corun", "bench", "steps", "a b"])
    assert machine.command() == "corun bench steps 'a b'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/cli.py", "bench"])
    assert machine.command() == "python -m corun.cli bench"


def test_only_certified_may_rest_on_nothing():
    assert config_of("certified", MEASURE).certificate == MEASURE
    assert config_of("certified+split", MEASURE).certificate == MEASURE
    assert config_of("isolate", MEASURE) == config_of("isolate", None)
    assert config_of("isolate", "file").certificate == "file"
