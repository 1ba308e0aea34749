"""``corun bench``: measure modes side by side, and make the figures from the recorded files."""

import argparse
import importlib
from typing import NamedTuple

EPILOG = """\
run: every mode over the same request sets, each mode in its own process. steps: the time of a
decode step by operator type. operators: single operators, standard and batch-invariant. serve: over
HTTP, through vLLM's own 'vllm bench serve'. report: figures and one HTML page from all of them.
"""


class Part(NamedTuple):
    """A subcommand: the module that implements it and its line of help."""

    module: str
    help: str


PARTS = {
    "run": Part("corun.bench.run", "throughput, latency and determinism of modes side by side"),
    "report": Part("corun.bench.report", "figures and an HTML page from a directory of results"),
    "steps": Part("corun.bench.step_times", "the time of a decode step by operator type"),
    "operators": Part("corun.bench.operators", "operators, standard against batch-invariant"),
    "serve": Part("corun.bench.server", "the same workloads over HTTP"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their flags."""
    parser.epilog = EPILOG
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, part in PARTS.items():
        sub = parts.add_parser(name, help=part.help, description=part.help, allow_abbrev=False)
        importlib.import_module(part.module).add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Run the chosen part; its exit status."""
    return int(importlib.import_module(PARTS[args.part].module).run(args))
