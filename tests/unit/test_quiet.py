"""Quiet commands: vLLM's log is down to errors, CoRun's own lines stay, the user's wishes rule."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import corun
from corun.commands.quiet import CONFIG_VARIABLE, LOGGING, TORCH, quiet


def test_variables_while_it_lasts():
    env = {"PATH": "x"}
    with quiet(environ=env):
        assert json.loads(Path(env[CONFIG_VARIABLE]).read_text()) == LOGGING
        assert {k: env[k] for k in TORCH} == TORCH
        file = env[CONFIG_VARIABLE]
    assert env == {"PATH": "x"}
    assert not Path(file).exists()


def test_this_processs_loggers_are_as_before():
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm.corun")]
    own = logging.NullHandler()
    loggers[1].addHandler(own)
    try:
        before = [(x.level, x.handlers[:], x.propagate) for x in loggers]
        with pytest.raises(ZeroDivisionError), quiet(environ={}):
            assert loggers[0].level == logging.ERROR
            assert own not in loggers[1].handlers
            raise ZeroDivisionError
        assert [(x.level, x.handlers[:], x.propagate) for x in loggers] == before
    finally:
        loggers[1].removeHandler(own)


def test_what_the_user_set_for_torch_stays():
    env = {"TORCH_LOGS": "+dynamo"}
    with quiet(environ=env):
        assert env["TORCH_LOGS"] == "+dynamo"
        assert env["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert env == {"TORCH_LOGS": "+dynamo"}


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({"VLLM_LOGGING_LEVEL": "INFO"}, ()),
        ({CONFIG_VARIABLE: "/mine.json"}, ()),
        ({"VLLM_CONFIGURE_LOGGING": "0"}, ()),
        ({}, ("--dtype", "float32", "--log-level", "DEBUG")),
        ({}, ("--log_level=DEBUG",)),
        ({}, ("--logging-config.log_level", "DEBUG")),
    ],
)
def test_the_users_choice_is_left_alone(variables, flags):
    env = dict(variables)
    with quiet(flags, env):
        assert env == variables
    assert env == variables


def test_other_flags_are_no_choice():
    env: dict[str, str] = {}
    with quiet(("--logprobs-mode", "raw_logprobs"), env):
        assert CONFIG_VARIABLE in env


LINES = """
import logging
logging.getLogger("vllm.engine").warning("a vllm warning")
logging.getLogger("vllm.engine").error("a vllm error")
logging.getLogger("vllm.corun").info("a line of corun")
logging.getLogger("torch._library.triton").warning("a torch warning")
import warnings
warnings.warn("a python warning", FutureWarning)
"""
# Here as vLLM reads it: by the variable, in this process and in one that it starts.
HERE = f"""
from corun.commands.quiet import quiet
import subprocess, sys
with quiet():
    import torch
    exec({LINES!r})
    # What each of vLLM's processes does first (0.25: when it is imported).
    child = "import vllm.logger as v; v._configure_vllm_root_logger(); import torch\\n" + {LINES!r}
    print("child", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_what_is_left():
    pytest.importorskip("vllm")
    chosen = ("VLLM_LOGGING_LEVEL", CONFIG_VARIABLE, "VLLM_CONFIGURE_LOGGING", *TORCH)
    environment = {k: v for k, v in os.environ.items() if k not in chosen}
    environment["PYTHONPATH"] = str(Path(corun.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", HERE], capture_output=True, text=True, env=environment, check=True
    )
    here, child = done.stderr.split("child\n")
    for text in (here, child):
        assert "a line of corun\n" in text
        assert "warning" not in text
    assert "ERROR [vllm.engine:" in here
    assert done.stdout == ""
