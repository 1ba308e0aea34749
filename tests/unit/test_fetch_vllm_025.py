"""The tool behind `make test-compat`: what it takes out of a wheel; never half of it is left."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fetch_vllm_025 as tool

FILES = ("vllm/__init__.py", "vllm/_C.abi3.so", f"{tool.INFO}/METADATA")


@pytest.fixture
def pip(monkeypatch):
    """A pip that 'downloads' a small wheel; returns the list of its calls."""
    calls = []

    def run(command, check):
        assert check and command[:4] == [sys.executable, "-m", "pip", "download"]
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "vllm-0.25.0-cp38-abi3-any.whl", "w") as wheel:
            for name in FILES:
                wheel.writestr(name, name)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def call(monkeypatch, output: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_vllm_025.py", "--output", str(output)])
    return tool.main()


def test_only_the_python_part_is_kept_and_fetched_once(tmp_path, monkeypatch, pip):
    output = tmp_path / "build" / "vllm"
    assert call(monkeypatch, output) == call(monkeypatch, output) == 0
    kept = {str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()}
    assert kept == {FILES[0], FILES[2]}
    assert len(pip) == 1 and "vllm==0.25.0" in pip[0] and "--no-deps" in pip[0]
    assert list(output.parent.iterdir()) == [output]


def test_a_download_that_fails_leaves_nothing_and_says_so(tmp_path, monkeypatch, capsys):
    def run(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", run)
    assert call(monkeypatch, tmp_path / "build" / "vllm") == 2
    assert "could not download vllm==0.25.0" in capsys.readouterr().err
    assert not list((tmp_path / "build").iterdir())
