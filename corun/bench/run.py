"""``corun bench run``: every mode over every workload, each mode in a process of its own.

A directory holds one benchmark: ``plan.json`` says which, ``requests/`` the request sets, and one
file a run. A run's file appears when the run is over, so a run that was stopped is started anew,
and finished ones are kept. A directory with another plan in it is refused.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corun.bench import machine
from corun.bench.cells import DEFAULT_WORKLOAD, Cell, cells
from corun.bench.mode_child import Child, run_children
from corun.bench.mode_process import MODES, parse_mode
from corun.bench.model_requests import build_for
from corun.bench.requests import RequestSet
from corun.bench.run_child import Item, Spec
from corun.bench.run_directory import claim, is_kept, requests_file, run_file
from corun.bench.run_order import Process, add_together, groups, slots
from corun.bench.shared_gpu import shared_engine_args
from corun.bench.workload import WORKLOADS

CHILD = "corun.bench.run_child"


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
    add_together(
        parser,
        "start all engines, or N at a time, at once: one a mode, which its repeats share. They run "
        "one after the other, side by side in each cell",
    )
    parser.add_argument(
        "--sweep-rows",
        metavar="N,N",
        help="the benchmark with each of these max_num_seqs, in DIR/rows-N (the cost of padding)",
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


@dataclass(slots=True)
class Outcome:
    """What became of a benchmark: run files made and kept, and engines that failed, with why."""

    made: int = 0
    kept: int = 0
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """A process to start: its engine's name, what it runs, and the number of each run's turn."""

    name: str
    spec: Spec
    turns: tuple[int, ...]


def run(args: argparse.Namespace) -> int:
    """Benchmark; 0, or 2 where a mode failed."""
    from corun.commands.model_names import check_model
    from corun.engine.arguments import current_platform

    check_model(args.model)
    modes = list(dict.fromkeys(parse_mode(mode) for mode in args.modes.split(",")))
    chosen = cells(args.workloads, args.arrivals, args.count, args.repeats, args.cell)
    repeats = max(cell.repeats for cell in chosen)
    sweep = _sweep(args)
    order = groups(modes, repeats, one_engine=args.one_engine, together=args.together, sweep=sweep)
    on_cpu = current_platform.is_cpu()
    engine_args = _engine_args(args, on_cpu=on_cpu)
    shared_engine_args(engine_args, max(map(len, order)), on_cpu=on_cpu)  # or no engine starts
    sets = _request_sets(args, chosen)
    directories = {
        rows: Path(args.out, f"rows-{rows}" if args.sweep_rows else "") for rows in sweep
    }
    for rows, directory in directories.items():
        claim(directory, _plan(args, rows, engine_args, sets), fresh=args.fresh)
        for cell, made in sets.items():
            made.save(requests_file(directory, cell))
    outcome = Outcome()
    for group in order:
        items: dict[Process, dict[int, Item]] = {}
        for slot in slots(group, list(sets)):
            process, cell, repeat = slot.process, slot.cell, slot.repeat
            directory, made = directories[process.rows], sets[cell]
            path = directory / run_file(process.mode, made.workload, cell.arrivals, repeat)
            if is_kept(path, made.digest):
                outcome.kept += 1
            elif process.name not in outcome.failed:
                turn = sum(map(len, items.values()))
                requests = str(requests_file(directory, cell))
                item = Item(requests, cell.arrivals, repeat, repeat, str(path))
                items.setdefault(process, {})[turn] = item
        if items:
            shared = shared_engine_args(engine_args, len(items), on_cpu=on_cpu)
            started = [
                Started(process.name, _spec(args, process, shared, list(own.values())), tuple(own))
                for process, own in items.items()
            ]
            _execute(started, args.timeout, outcome)
    print(f"{outcome.made} runs made, {outcome.kept} kept from before, in {args.out}")
    print(f"for figures and tables: corun bench report {args.out}")
    for name, why in outcome.failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    return 2 if outcome.failed else 0


def _sweep(args: argparse.Namespace) -> list[int | None]:
    """What ``--sweep-rows`` asks for, or else ``--rows``."""
    if args.sweep_rows is None:
        return [None]
    parts = args.sweep_rows.split(",")
    if args.rows is not None or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--sweep-rows is numbers of rows such as 8,64,256, without --rows, not "
            f"{args.sweep_rows!r}"
        )
    return list(dict.fromkeys(map(int, parts)))


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


def _engine_args(args: argparse.Namespace, *, on_cpu: bool) -> dict[str, Any]:
    """Keywords of vLLM's LLM that all modes share."""
    from corun.commands.verify import engine_args
    from corun.engine.arguments import CPU_TOKENS, GPU_TOKENS

    shared: dict[str, Any] = {
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS),
        "enable_prefix_caching": False,
    }
    if not on_cpu:
        shared["gpu_memory_utilization"] = args.memory
    return shared | engine_args(args)


def _plan(
    args: argparse.Namespace,
    rows: int | None,
    engine_args: dict[str, Any],
    sets: Mapping[Cell, RequestSet],
) -> dict[str, Any]:
    """What every run in a directory has in common. Modes and cells may be added later."""
    return {
        "format": "corun-bench-plan/1",
        "model": args.model,
        "rows": rows or args.rows,
        "temperature": args.temperature,
        "logprobs": not args.no_logprobs,
        "seeded": not args.unseeded,
        "seed": args.seed,
        "random_weights": args.random_weights,
        "engine_args": engine_args,
        "versions": machine.versions(),
        "requests": {cell.name: made.digest for cell, made in sets.items()},
    }


def _spec(
    args: argparse.Namespace, process: Process, engine_args: dict[str, Any], items: list[Item]
) -> Spec:
    from corun.engine.arguments import CPU_ROWS, GPU_ROWS, current_platform

    return Spec(
        model=args.model,
        mode=process.mode,
        rows=process.rows or args.rows or (CPU_ROWS if current_platform.is_cpu() else GPU_ROWS),
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


def _execute(started: Sequence[Started], timeout_s: float, outcome: Outcome) -> None:
    """Start all of them at once, and let them take their turns."""
    children = [Child(CHILD, one.spec.mode, asdict(one.spec), one.turns) for one in started]
    for one, why in zip(started, run_children(children, timeout_s), strict=True):
        if why is not None:
            outcome.failed[one.name] = why
        outcome.made += sum(os.path.exists(item.out) for item in one.spec.items)
