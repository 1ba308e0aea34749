"""Sends a load to a server through ``vllm bench serve``, in a process of its own."""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.bench import requests
from corun.bench.mode_process import environment
from corun.bench.server_process import HOST, Server

CLIENT = "corun.bench.client"


class ClientError(RuntimeError):
    """vLLM's client did not end well, or some of its requests did not."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one client sends. requests: a saved request set; None for vLLM's own data sets."""

    workload: str
    arrivals: str
    requests: Path | None


def send(
    server: Server, load: Load, name: str, args: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Run one client; (what the file keeps of it, its flags). ClientError where it failed.

    name: the model's, as the server has it.
    """
    flags = ["--base-url", server.url, "--model", args.model, "--served-model-name", name]
    flags += ["--temperature", str(args.temperature), "--num-warmups", str(args.warmups)]
    flags += ["--seed", str(args.seed), "--ignore-eos", "--ready-check-timeout-sec", "0"]
    flags += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"]
    ours: list[str] = []
    if load.requests is None:
        flags += shlex.split(args.client_args)
    else:
        ours = ["--request-set", str(load.requests), "--arrivals", load.arrivals]
        ours += ["--unseeded"] if args.unseeded else []
    with tempfile.TemporaryDirectory() as directory:
        kept = ["--save-result", "--save-detailed", "--result-dir", directory]
        kept += ["--result-filename", "result.json"]
        command = [sys.executable, "-m", CLIENT, *ours, *flags, *kept]
        _run_client(command, args.timeout)
        server.check()
        result = json.loads(Path(directory, "result.json").read_text())
    if result.get("failed"):
        first = next((error for error in result["errors"] if error), "no reason was given")
        raise ClientError(f"{result['failed']} requests failed, the first because: {first[-1000:]}")
    return _kept(result, load), flags


def _run_client(command: list[str], timeout_s: float) -> None:
    # vLLM's client would send what is meant for this host to a proxy of the environment.
    env = environment("std") | {"NO_PROXY": HOST, "no_proxy": HOST}
    try:
        subprocess.run(command, env=env, timeout=timeout_s, check=True)
    except subprocess.CalledProcessError as e:
        raise ClientError(f"vLLM's client ended with status {e.returncode}, see above") from e
    except subprocess.TimeoutExpired as e:
        raise ClientError(f"vLLM's client did not end within {timeout_s:.0f} s") from e


def _kept(result: dict[str, Any], load: Load) -> dict[str, Any]:
    """What vLLM's client reports, and a digest of each answer's text in the order of sending."""
    texts = result["generated_texts"]
    request_set = None if load.requests is None else requests.load(load.requests)
    return {
        "requests_digest": request_set.digest if request_set else None,
        "source": request_set.source if request_set else None,
        "text_digests": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts],
        # Without what has a value for each request or each token.
        "result": {name: v for name, v in result.items() if not isinstance(v, list)},
    }
