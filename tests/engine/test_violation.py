"""A step outside the plan, found in another process, stops ``corun generate`` with status 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import corun
from corun.engine.plugins import plugin_installed

# A plugin of vLLM's, so that every process of the engine loads it: some step is called wrong.
BREAKS = """
from corun.plan import Plan

seen = []


def violation(self, step):
    seen.append(step)
    return "a step that this test forbids" if len(seen) == 5 else None


def register():
    Plan.violation = violation
"""


def break_the_plan(folder):
    (folder / "breaks_the_plan.py").write_text(BREAKS)
    metadata = folder / "breaks_the_plan-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: breaks-the-plan\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbreaks = breaks_the_plan:register\n"
    )


@pytest.mark.skipif(not plugin_installed(), reason="the engine's processes would not load CoRun")
def test_a_violation_in_the_engines_process_is_status_1(shallow_model, tmp_path):
    break_the_plan(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "The tide is", "max_tokens": 12}))
    unwanted = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS", "CORUN_DEBUG")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    paths = (str(tmp_path), str(Path(corun.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    command = [sys.executable, "-m", "corun.cli", "generate", shallow_model, "-i", "in.jsonl"]
    done = subprocess.run(
        [*command, "-o", "out.jsonl", "--policy", "isolate", "--max-num-seqs", "4"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    message = "corun generate: CoRun: step 5 was a step that this test forbids, outside the plan"
    assert message in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
