"""``corun bench run``: every mode over every workload, each mode in a process of its own.

A directory holds one benchmark: ``plan.json`` says which, ``requests/`` the request sets, and one
file a run. A run's file appears when the run is over, so a run that was stopped is started anew,
and finished ones are kept. A directory with another plan in it is refused.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corun.bench import machine
from corun.bench.cells import DEFAULT_WORKLOAD, Cell, cells
from corun.bench.mode_child import run_child
from corun.bench.mode_process import MODES, parse_mode
from corun.bench.model_requests import build_for
from corun.bench.records import read_run
from corun.bench.requests import RequestSet
from corun.bench.run_child import Item, Spec
from corun.bench.workload import WORKLOADS
from corun.jobs.files import write_json

CHILD = "corun.bench.run_child"
PLAN_FILE = "plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``corun bench run``."""
    from corun.commands.verify import add_engine_arguments

    parser.add_argument("model", metavar="MODEL", help="a model's name or directory")
    parser.add_argument("--out", required=True, metavar="DIR", help="where results go")
    parser.add_argument(
        "--modes", default="std,bi,isolate", help=f"with commas, of {', '.join(MODES)}"
    )
    parser.add_argument("--workloads", help=f"with commas: {WORKLOADS}; default {DEFAULT_WORKLOAD}")
    parser.add_argument(
        "--arrivals", default="all", help="with commas: all, closed:N, poisson:RATE; default all"
    )
    parser.add_argument("--count", type=int, default=300, help="requests of a workload")
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        metavar="'WORKLOAD ARRIVALS COUNT'",
        help="a workload under one kind of arrivals with a number of requests of its own, as in "
        "'1024/128 closed:8 24' (24x2: in 2 repeats); repeatable, with or without --workloads",
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of each, in other orders; default 2"
    )
    parser.add_argument(
        "--one-engine", action="store_true", help="repeats share their mode's one engine"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the request sets; default 0")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument(
        "--no-logprobs", action="store_true", help="return no logprobs, and compare tokens only"
    )
    parser.add_argument(
        "--unseeded",
        action="store_true",
        help="no seeds from the user (vLLM's V1 runner is faster so, and cannot repeat itself)",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="max_num_batched_tokens")
    parser.add_argument("--max-model-len", type=int, default=8192, metavar="N")
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--certificate", metavar="FILE", help="for certified and pack")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds a process may take (default 3600)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete what DIR holds, start anew")
    add_engine_arguments(parser, rows_help="max_num_seqs; default 32 on a CPU, 256 on a GPU")


@dataclass(frozen=True, slots=True)
class Process:
    """One engine start: a mode, and the repeats that it makes."""

    mode: str
    repeats: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What became of a benchmark: run files made and kept, and modes that failed, with why."""

    made: int = 0
    kept: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def processes(modes: Sequence[str], repeats: int, *, one_engine: bool) -> list[Process]:
    """Engine starts in order; each repeat begins with another mode: none is always the first."""
    if one_engine:
        return [Process(mode, tuple(range(repeats))) for mode in modes]
    found = []
    for repeat in range(repeats):
        turn = repeat % len(modes)
        found += [Process(mode, (repeat,)) for mode in (*modes[turn:], *modes[:turn])]
    return found


def run_file(mode: str, workload: str, arrivals: str, repeat: int) -> str:
    """The name of a run's file."""
    return f"run-{_plain('-'.join((workload, arrivals, mode, str(repeat))))}.json"


def run(args: argparse.Namespace) -> int:
    """Benchmark; 0, or 2 where a mode failed."""
    from corun.commands.model_names import check_model

    check_model(args.model)
    modes = [parse_mode(mode) for mode in args.modes.split(",")]
    chosen = cells(args.workloads, args.arrivals, args.count, args.repeats, args.cell)
    engine_args = _engine_args(args)
    sets = _request_sets(args, chosen)
    directory = Path(args.out)
    _claim(directory, _plan(args, engine_args, sets), fresh=args.fresh)
    files = {cell: _requests_file(directory, cell) for cell in chosen}
    for cell, made in sets.items():
        made.save(files[cell])
    outcome = Outcome()
    repeats = max(cell.repeats for cell in chosen)
    for process in processes(modes, repeats, one_engine=args.one_engine):
        items = []
        for cell, made in sets.items():
            for repeat in (r for r in process.repeats if r < cell.repeats):
                name = run_file(process.mode, made.workload, cell.arrivals, repeat)
                if _is_kept(directory / name, made.digest):
                    outcome.kept += 1
                    continue
                out = str(directory / name)
                items.append(Item(str(files[cell]), cell.arrivals, repeat, repeat, out))
        if items and process.mode not in outcome.failed:
            _execute(_spec(args, process.mode, engine_args, items), args.timeout, outcome)
    print(f"{outcome.made} runs made, {outcome.kept} kept from before, in {directory}")
    print(f"for figures and tables: corun bench report {directory}")
    for mode, why in outcome.failed.items():
        print(f"{mode} failed: {why}", file=sys.stderr)
    return 2 if outcome.failed else 0


def _request_sets(args: argparse.Namespace, chosen: Sequence[Cell]) -> dict[Cell, RequestSet]:
    """The request set of each cell; cells of one workload and count share one."""
    built: dict[tuple[str, int], RequestSet] = {}
    for cell in chosen:
        if (key := (cell.workload.name, cell.count)) not in built:
            built[key] = build_for(
                args.model,
                cell.workload,
                count=cell.count,
                seed=args.seed,
                max_model_len=args.max_model_len,
            )
    return {cell: built[cell.workload.name, cell.count] for cell in chosen}


def _requests_file(directory: Path, cell: Cell) -> Path:
    return directory / "requests" / f"{_plain(cell.workload.name)}-{cell.count}.json"


def _engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of vLLM's LLM that all modes share."""
    from corun.commands.verify import engine_args
    from corun.engine.arguments import CPU_TOKENS, GPU_TOKENS, current_platform

    on_cpu = current_platform.is_cpu()
    shared: dict[str, Any] = {
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS),
        "enable_prefix_caching": False,
    }
    if not on_cpu:
        shared["gpu_memory_utilization"] = args.memory
    return shared | engine_args(args)


def _plan(
    args: argparse.Namespace, engine_args: dict[str, Any], sets: Mapping[Cell, RequestSet]
) -> dict[str, Any]:
    """What every run in a directory has in common. Modes and cells may be added later."""
    return {
        "format": "corun-bench-plan/1",
        "model": args.model,
        "rows": args.rows,
        "temperature": args.temperature,
        "logprobs": not args.no_logprobs,
        "seeded": not args.unseeded,
        "seed": args.seed,
        "random_weights": args.random_weights,
        "engine_args": engine_args,
        "versions": machine.versions(),
        "requests": {cell.name: made.digest for cell, made in sets.items()},
    }


def _claim(directory: Path, plan: dict[str, Any], *, fresh: bool) -> None:
    """Make `directory` this benchmark's. ValueError where it holds another's results."""
    file = directory / PLAN_FILE
    if fresh and file.exists():
        for path in directory.glob("run-*.json"):
            path.unlink()
        shutil.rmtree(directory / "requests", ignore_errors=True)
        file.unlink()
    elif file.exists():
        held = json.loads(file.read_text())
        asked = json.loads(json.dumps(plan))
        asked["requests"] = {**held.get("requests", {}), **asked["requests"]}
        changed = [
            name for name in {*held, *asked} - {"requests"} if held.get(name) != asked.get(name)
        ]
        changed += [c for c, d in held.get("requests", {}).items() if asked["requests"][c] != d]
        if changed:
            raise ValueError(
                f"{directory} holds results of another benchmark ({', '.join(sorted(changed))} "
                "differ); choose another --out, or --fresh to delete them"
            )
        plan = asked
    elif directory.exists() and any(directory.glob("run-*.json")):
        raise ValueError(f"{directory} holds runs without a {PLAN_FILE}; choose another --out")
    (directory / "requests").mkdir(parents=True, exist_ok=True)
    write_json(file, plan)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-.@+" else "_" for c in name)


def _is_kept(path: Path, digest: str) -> bool:
    """Whether a run's file is there, and of these requests. RecordError where it is damaged."""
    if not path.exists():
        return False
    return read_run(path).requests_digest == digest


def _spec(
    args: argparse.Namespace, mode: str, engine_args: dict[str, Any], items: list[Item]
) -> Spec:
    from corun.engine.arguments import CPU_ROWS, GPU_ROWS, current_platform

    return Spec(
        model=args.model,
        mode=mode,
        rows=args.rows or (CPU_ROWS if current_platform.is_cpu() else GPU_ROWS),
        temperature=args.temperature,
        logprobs=not args.no_logprobs,
        seeded=not args.unseeded,
        seed=args.seed,
        random_weights=args.random_weights,
        certificate=args.certificate,
        engine_args=engine_args,
        command=machine.command(),
        items=items,
    )


def _execute(spec: Spec, timeout_s: float, outcome: Outcome) -> None:
    try:
        run_child(CHILD, spec.mode, asdict(spec), timeout_s)
    except RuntimeError as error:
        outcome.failed[spec.mode] = str(error)
    outcome.made += sum(os.path.exists(item.out) for item in spec.items)
