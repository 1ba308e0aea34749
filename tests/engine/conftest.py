"""One real engine at a time on the CPU (SmolLM2-135M-Instruct), shared by the tests of a module."""

import json
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

LAYERS = 6  # of the real model's 30: a step takes a third of the time
DEFAULT_MODEL = Path(__file__).parents[2] / ".model" / "smollm2-135m-instruct"
SMALL = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 2048,
    "max_num_seqs": 8,
}


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model_path() -> str:
    """The real model's directory; 'make model' makes it."""
    path = Path(os.environ.get("CORUN_TEST_MODEL", DEFAULT_MODEL))
    if not (path / "config.json").is_file():
        pytest.fail(f"no model at {path}: run 'make model', or set CORUN_TEST_MODEL")
    return str(path)


@pytest.fixture(scope="session")
def shallow_model(model_path, tmp_path_factory) -> str:
    """The real model's first layers, for tests of what does not depend on how many there are."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("model") / "shallow"
    shutil.copytree(model_path, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    weights = load_file(Path(model_path) / "model.safetensors")
    dropped = tuple(f"model.layers.{i}." for i in range(LAYERS, config["num_hidden_layers"]))
    kept = {name: w for name, w in weights.items() if not name.startswith(dropped)}
    assert len(kept) < len(weights)
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)
