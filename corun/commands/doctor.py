"""``corun doctor``: what is installed, what CoRun holds in vLLM, and which policy would run."""

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from corun.commands.model_names import check_model
from corun.commands.options import add_json_option
from corun.commands.verify import add_engine_arguments, engine_args
from corun.config import POLICIES, CoRunConfig
from corun.engine import violation_note

QUIET = True
COMMAND_HOLDERS = ("corun.engine.offline", "corun.engine.server")
INSTALL = "install 'corun-vllm[gpu]' on a machine with a GPU, or 'corun-vllm[cpu]'"


EPILOG = """\
With MODEL it says which kept certificate is that engine's (give the engine arguments that you
start it with), and which policy would run. No engine is started. Exit status: 0 CoRun can run
here, else 2.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="explain the policy for this model"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, help="the one to explain (default: CORUN_POLICY, else auto)"
    )
    add_json_option(parser)
    add_engine_arguments(parser, rows_help="max_num_seqs of the engine to explain")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 if CoRun can run here, else 2."""
    given = engine_args(args)
    if args.rows is not None:
        given["max_num_seqs"] = args.rows
    if args.model:
        check_model(args.model)
    elif given or args.random_weights:
        raise ValueError("engine arguments explain nothing without a MODEL")
    if args.json != "-":
        print("corun doctor: looking at vLLM ...", file=sys.stderr, flush=True)
    with _unlogged():
        findings = examine(args.policy, os.environ, args.model, given)
    if args.json == "-":
        print(json.dumps(findings, indent=2))
    else:
        from corun.commands.doctor_table import show

        show(findings)
        if args.json:
            from corun.jobs.files import write_json

            write_json(args.json, findings)
    return 0 if findings["can_run"] else 2


@contextmanager
def _unlogged() -> Iterator[None]:
    """No log lines but errors: what they would tell is in the findings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def examine(
    policy: str | None,
    environ: MutableMapping[str, str],
    model: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that ``corun doctor`` says, as JSON values.

    policy: the one to explain; None for CORUN_POLICY, else auto. environ: not changed. model,
    given: the engine to explain it for, and its arguments. "problems" lists what keeps CoRun from
    running here; "can_run" is whether there are none.
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
        "variables": {
            k: v
            for k, v in sorted(environ.items())
            if k.startswith("CORUN_") and k != violation_note.FILE_VARIABLE
        },
        "certificates": _certificates(),
        "policy": _policy(policy, environ, problems, model, given or {}),
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


def _certificates() -> list[dict[str, Any]]:
    """The certificates that are kept here."""
    from corun.commands.kept import kept

    try:
        from corun.engine.explain import here
    except ImportError:
        return kept({})
    return kept(here())


def _policy(
    asked: str | None,
    environ: MutableMapping[str, str],
    problems: list[str],
    model: str | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """What was asked for, what runs (None: cannot tell, or nothing), why, and by which file."""
    found = {"asked": asked, "model": model, "runs": None, "certificate": None}
    try:
        config = CoRunConfig.from_env(environ) or CoRunConfig()
        config = replace(config, policy=asked) if asked else config
        found["asked"] = config.policy
        if model is None or config.policy == "off":
            found["runs"], found["reason"] = _policy_of_any_model(config.policy)
        else:
            found |= _policy_of(model, config, given)
    except ImportError as e:  # "vllm" and "seams" say more
        found["reason"] = f"cannot tell: {e}"
    except (OSError, RuntimeError, ValueError) as e:
        reason = " ".join(str(e).split())
        problems.append(reason)
        found["reason"] = reason
    return found


def _policy_of_any_model(policy: str) -> tuple[str | None, str]:
    from corun.certify import store
    from corun.engine.choose import without_model

    if policy != "auto":
        return without_model(policy)
    if not store.count():
        return "isolate", "no certificate is kept here; 'corun certify MODEL' makes one"
    return None, "depends on the model's certificate; 'corun doctor MODEL' tells"


def _policy_of(model: str, config: CoRunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    from corun.engine.explain import explain

    plan, file = explain(model, config, given)
    return {
        "runs": plan.policy,
        "reason": plan.reason,
        "certificate": str(file) if file.exists() else None,
    }


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
