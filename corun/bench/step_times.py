"""The paper's Fig. 1b and Fig. 4: the time of a decode step by operator type, mode by mode.

Each mode runs in a process of its own, with its engine inside that process so that the profiler
sees it (``corun.bench.step_profile``).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from corun.bench import machine
from corun.bench.mode_child import Child, run_children
from corun.bench.mode_process import MODES, parse_mode
from corun.bench.run_order import add_together, group_size
from corun.bench.shared_gpu import shared_engine_args
from corun.bench.step_child import Shape, Spec
from corun.bench.turns import rotated
from corun.jobs.files import write_json

FORMAT = "corun-bench-steps/1"
CHILD = "corun.bench.step_child"


def parse_context(text: str, rows: int) -> list[int]:
    """Tokens of context of each of `rows` requests, from "1024", or "128-8192": spread evenly.

    The spread is even in the logarithm, as request lengths are. ValueError for anything else.
    """
    low, dash, high = text.partition("-")
    try:
        least, most = int(low), int(high if dash else low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise ValueError(f"context {text!r} is neither a number of tokens nor LEAST-MOST")
    ratio = most / least
    return [round(least * ratio ** (i / max(rows - 1, 1))) for i in range(rows)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``corun bench steps``."""
    from corun.commands.verify import add_engine_arguments

    parser.add_argument("model", metavar="MODEL", help="a model's name or directory")
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument(
        "--modes", default="std,bi,isolate", help=f"of {', '.join(MODES)}; default std,bi,isolate"
    )
    parser.add_argument("--requests", default="32", help="requests that decode, as 1,32,256")
    parser.add_argument(
        "--context",
        default="1024",
        help="tokens that each request holds, as 1024 or, spread over the requests, 128-8192; "
        "several with commas",
    )
    parser.add_argument("--steps", type=int, default=16, help="steps to time, and to profile")
    add_together(
        parser,
        "start the engines of all modes, or of N at a time, at once; they are then measured one "
        "after the other",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds that a mode may take (default 600)"
    )
    parser.add_argument("--certificate", metavar="FILE", help="for certified and pack")
    add_engine_arguments(parser, rows_help="max_num_seqs; default: the most requests")


def shapes_of(requests: str, context: str) -> list[Shape]:
    """Every combination of ``--requests`` and ``--context``. ValueError says what is wrong."""
    parts = requests.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--requests is counts such as 1,32, not {requests!r}")
    return [Shape(c, parse_context(c, int(n))) for n in parts for c in context.split(",")]


def run(args: argparse.Namespace) -> int:
    """Measure every mode and write one file; 0, or 2 where a mode failed."""
    from corun.commands.model_names import check_model
    from corun.commands.verify import engine_args
    from corun.engine.arguments import current_platform

    check_model(args.model)
    modes = list(dict.fromkeys(parse_mode(mode) for mode in args.modes.split(",")))
    shapes = shapes_of(args.requests, args.context)
    if args.steps < 1:
        raise ValueError("--steps must be 1 or more")
    rows = args.rows or max(len(shape.lengths) for shape in shapes)
    chosen = engine_args(args)
    on_cpu = current_platform.is_cpu()
    size = group_size(args.together, len(modes))
    shared_engine_args(chosen, size, on_cpu=on_cpu)  # or no engine starts
    steps: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for start in range(0, len(modes), size):
        group = modes[start : start + size]
        shared = shared_engine_args(chosen, len(group), on_cpu=on_cpu)
        specs = [
            Spec(
                model=args.model,
                mode=mode,
                rows=rows,
                shapes=shapes,
                steps=args.steps,
                random_weights=args.random_weights,
                certificate=args.certificate,
                engine_args=shared,
            )
            for mode in group
        ]
        for mode, found in zip(group, measure_apart(specs, args.timeout), strict=True):
            if isinstance(found, str):
                failed[mode] = found
                print(f"{mode}: {found}", file=sys.stderr)
            else:
                steps += found
    if not steps:
        raise RuntimeError("no mode could be measured; nothing was written")
    write_json(args.out, _file(args, rows, steps, failed))
    print(summary(steps), f"written to {args.out}", sep="\n")
    return 2 if failed else 0


def measure_apart(specs: Sequence[Spec], timeout_s: float) -> list[list[dict[str, Any]] | str]:
    """What processes of their own measured, each its spec, shape by shape; or why one failed.

    They start at once and take turns, see ``corun.bench.mode_child.run_children``. All specs have
    the same shapes.
    """
    with tempfile.TemporaryDirectory() as directory:
        answers = [Path(directory, f"steps-{k}.json") for k in range(len(specs))]
        turns: list[list[int]] = [[] for _ in specs]
        for number in range(len(specs[0].shapes)):
            for place, k in enumerate(rotated(range(len(specs)), number)):
                turns[k].append(number * len(specs) + place)
        children = [
            Child(CHILD, spec.mode, asdict(spec), tuple(mine), (str(answer),))
            for spec, mine, answer in zip(specs, turns, answers, strict=True)
        ]
        return [
            list(json.loads(answer.read_text())) if why is None else why
            for answer, why in zip(answers, run_children(children, timeout_s), strict=True)
        ]


def _file(
    args: argparse.Namespace, rows: int, steps: list[dict[str, Any]], failed: dict[str, str]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **machine.stamp(),
        "model": args.model,
        "settings": {
            "max_num_seqs": rows,
            "steps": args.steps,
            "weights": "random N(0, 0.02)" if args.random_weights else "as given",
            "temperature": 0.6,
            "engine_args": args.engine_arg,
        },
        "steps": steps,
        "failed": failed,
    }


def summary(steps: list[dict[str, Any]]) -> str:
    """One line for each measured step: its time, and its operators' in order of size."""
    lines = []
    for step in steps:
        parts = sorted(step["by_type"].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {us:,.0f}" for name, us in parts if us)
        lines.append(
            f"{step['mode']}: {step['rows']} requests, context {step['context']}: "
            f"{step['total_us']:,.0f} us ({shown}; unknown {len(step['unclassified'])} names)"
        )
    return "\n".join(lines)
