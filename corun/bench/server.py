"""The server benchmark: request sets over HTTP, through vLLM's own ``vllm bench serve``.

Each mode has a server of its own, started with ``corun serve`` (plain vLLM is its policy "off"),
and answers every workload under every arrival process. What vLLM's client reports is kept as it is.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from corun.bench import machine, mode_names
from corun.bench.mode_process import MODES, SPLIT, environment, parse_mode, policy_of
from corun.bench.model_requests import build_for
from corun.bench.send import ClientError, Load, send
from corun.bench.server_process import Server, ServerError, running
from corun.bench.workload import WORKLOADS, Workload, parse_arrivals, parse_workload
from corun.jobs.files import write_json

FORMAT = "corun-bench-server/1"
SERVED = tuple(mode for mode in MODES if not mode.startswith("nosplit"))
"""The modes that users can serve; those of the ablation are made for 'corun bench run' alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``corun bench serve``."""
    parser.add_argument("model", metavar="MODEL", help="a model's name or directory")
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument(
        "--modes", default="std,isolate", help=f"of {', '.join(SERVED)}; default std,isolate"
    )
    parser.add_argument("--workloads", default="1024/128", help=f"with commas: {WORKLOADS}")
    parser.add_argument(
        "--arrivals", default="all", help="with commas: all, closed:N, poisson:RATE; default all"
    )
    parser.add_argument("--count", type=int, default=100, help="requests of a workload")
    parser.add_argument("--seed", type=int, default=0, help="of the request set; default 0")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument(
        "--unseeded", action="store_true", help="do not send each request's sampling seed"
    )
    parser.add_argument("--warmups", type=int, default=8, help="requests before the measurement")
    parser.add_argument("--certificate", metavar="FILE", help="for certified and pack")
    parser.add_argument(
        "--random-weights", action="store_true", help="for a directory without weights"
    )
    parser.add_argument(
        "--server-args", default="", metavar="FLAGS", help="more flags of vllm serve, quoted"
    )
    parser.add_argument(
        "--client-args",
        metavar="FLAGS",
        help="flags of vllm bench serve, quoted, instead of --workloads and --arrivals: "
        "one of its own data sets, as '--dataset-name random --num-prompts 100'",
    )
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds; default 600")
    parser.add_argument("--timeout", type=float, default=1800.0, help="of one client; default 1800")
    parser.add_argument("--logs", metavar="DIR", help="where servers' logs go; default beside FILE")


def run(args: argparse.Namespace) -> int:
    """Benchmark every mode; 0, or 2 where one failed."""
    from corun.commands.model_names import check_model

    check_model(args.model)
    modes = [_served(mode) for mode in args.modes.split(",")]
    arrivals = [parse_arrivals(name).name for name in args.arrivals.split(",")]
    workloads = [parse_workload(name) for name in args.workloads.split(",")]
    head = _head(args)
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for mode in modes:
        try:
            with closing(measure(mode, workloads, arrivals, args)) as entries:
                for entry in entries:
                    runs.append(entry)
                    write_json(args.out, {**head, "runs": runs, "failed": failed})
        except (ServerError, ClientError) as e:
            failed[mode] = str(e)
            print(f"{mode}: {e}", file=sys.stderr)
    if not runs:
        raise RuntimeError("no mode could be measured; nothing was written")
    write_json(args.out, {**head, "runs": runs, "failed": failed})
    print(summary(runs), f"written to {args.out}", sep="\n")
    return 2 if failed else 0


def _served(text: str) -> str:
    mode = parse_mode(text)
    if mode_names.split(mode)[0] not in SERVED:
        raise ValueError(f"{text} is not served; choose of {', '.join(SERVED)}")
    return mode


def serve_command(mode: str, args: argparse.Namespace) -> list[str]:
    """The command line that serves `mode`, without host and port."""
    policy = policy_of(mode)
    command = [sys.executable, "-m", "corun.cli", "serve", args.model, "--policy", policy]
    if args.certificate and policy != "off":
        command += ["--certificate", args.certificate]
    if mode_names.split(mode)[0] == SPLIT:
        command.append("--split-decode")
    if args.random_weights:
        from corun.engine.random_weights import LOAD_FORMAT

        command += ["--load-format", LOAD_FORMAT]
    return command + shlex.split(args.server_args)


def measure(
    mode: str, workloads: Sequence[Workload], arrivals: Sequence[str], args: argparse.Namespace
) -> Generator[dict[str, Any], None, None]:
    """Start the server of `mode` and send it every load; the entries of the file's "runs"."""
    env = environment(mode)
    command = serve_command(mode, args)
    with running(command, env, _log(args, mode), start_limit_s=args.start_timeout) as server:
        card = server.get("/v1/models")["data"][0]
        with _loads(workloads, arrivals, card["max_model_len"], args) as loads:
            for load in loads:
                result, flags = send(server, load, card["id"], args)
                yield {
                    "mode": mode,
                    "workload": load.workload,
                    "arrivals": load.arrivals,
                    "server": _shown(command),
                    "client": _shown(["vllm", "bench", "serve", *flags]),
                    "start_s": server.start_s,
                    "report": _report(server) if policy_of(mode) != "off" else None,
                    **result,
                }


@contextmanager
def _loads(
    workloads: Sequence[Workload], arrivals: Sequence[str], longest: int, args: argparse.Namespace
) -> Iterator[list[Load]]:
    """Every load, its request set saved for the client's process while the block runs."""
    if args.client_args is not None:
        yield [Load("as --client-args says", "as --client-args says", None)]
        return
    with tempfile.TemporaryDirectory() as directory:
        loads = []
        for i, workload in enumerate(workloads):
            path = Path(directory, f"requests-{i}.json")
            build_for(
                args.model, workload, count=args.count, seed=args.seed, max_model_len=longest
            ).save(path)
            loads += [Load(workload.name, name, path) for name in arrivals]
        yield loads


def _report(server: Server) -> dict[str, Any]:
    """Policy, domain and violations of a server under CoRun."""
    report = server.get("/corun/report")
    violations = sum(worker["violation_count"] for worker in report["workers"])
    return {"policy": report["policy"], "domain": report["domain"], "violations": violations}


def _log(args: argparse.Namespace, mode: str) -> Path:
    directory = Path(args.logs) if args.logs else Path(args.out).parent
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{Path(args.out).stem}-{mode}.log"


def _shown(command: list[str]) -> str:
    """A command line without this machine's interpreter."""
    if command[0] == sys.executable:
        command = ["corun", *command[3:]]
    return shlex.join(command)


def _head(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **machine.stamp(),
        "model": args.model,
        "settings": {
            "count": args.count,
            "seed": args.seed,
            "seeded": not args.unseeded,
            "temperature": args.temperature,
            "warmups": args.warmups,
            "random_weights": args.random_weights,
        },
    }


def equal_texts(runs: Sequence[dict[str, Any]], index: int) -> tuple[int, int] | None:
    """How many answers of run `index` have the text that they had in an earlier run; of how many.

    Earlier: the first run of the same mode and request set, under other arrivals. None without one.
    """
    this = runs[index]
    for other in runs[:index]:
        if this["requests_digest"] and all(
            this[name] == other[name] for name in ("mode", "requests_digest")
        ):
            pairs = list(zip(this["text_digests"], other["text_digests"], strict=True))
            return sum(a == b for a, b in pairs), len(pairs)
    return None


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """One line for each run."""
    lines = []
    for i, entry in enumerate(runs):
        result = entry["result"]
        line = (
            f"{entry['mode']}, {entry['workload']}, {entry['arrivals']}: "
            f"{result['output_throughput']:,.1f} output tokens/s, "
            f"TTFT {result['mean_ttft_ms']:,.0f} ms, TPOT {result['mean_tpot_ms']:,.1f} ms"
        )
        if (equal := equal_texts(runs, i)) is not None:
            line += f"; {equal[0]} of {equal[1]} texts as in its first run"
        lines.append(line)
    return "\n".join(lines)
