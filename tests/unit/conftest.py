"""What the tests of one module share."""

import pytest


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds vLLM's own schedulers: a ``real_scheduler.Builder``."""
    pytest.importorskip("vllm")
    from real_scheduler import Builder

    return Builder(tmp_path_factory.mktemp("model"))
