"""``corun verify MODEL``: check that outputs do not depend on co-runners, to the bit."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from corun.commands.model_names import check_model
from corun.commands.options import add_json_option, add_split_option, given_settings
from corun.config import POLICIES, CoRunConfig
from corun.starting import say_starting

QUIET = True

EPILOG = """\
Every request runs alone first; then beside others in every scenario, on one engine and, after full
restarts, on further ones. Token ids and the raw bits of every returned logprob are compared.
Nothing is ever retried. Exit status: 0 all equal and every step inside the plan, 1 not, 2 could not
run. With --policy off it shows what plain vLLM does.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    add_model_arguments(
        parser,
        policy_help="default: CORUN_POLICY, else auto; off: plain vLLM",
        rows_help="max_num_seqs; default 32 on a CPU, 256 on a GPU",
    )
    parser.add_argument(
        "--suite",
        choices=("paper", "adversarial", "all"),
        default="all",
        help="paper: 32 prompts alone and in a batch of 32; default all",
    )
    parser.add_argument(
        "--certificate", metavar="FILE", help="a certificate to plan by; default: the kept one"
    )
    add_split_option(parser)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="output tokens; default 48")
    parser.add_argument(
        "--restarts", type=int, metavar="N", help="full engine restarts; default 2, quick 1"
    )
    parser.add_argument(
        "--restart-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="as --engine-arg, for the engines after a restart: does a setting reach the bits?",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workload; default 0")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def add_model_arguments(
    parser: argparse.ArgumentParser, *, policy_help: str, rows_help: str
) -> None:
    """Flags that say which engine to start (shared with ``corun localize``)."""
    parser.add_argument("model", metavar="MODEL", help="a model's name or directory")
    parser.add_argument("--policy", choices=POLICIES, help=policy_help)
    add_json_option(parser)
    add_engine_arguments(parser, rows_help=rows_help)


def add_engine_arguments(parser: argparse.ArgumentParser, *, rows_help: str) -> None:
    """Flags that say how to start the engine (also those of ``corun certify``)."""
    parser.add_argument("--dtype", metavar="TYPE", help="bfloat16, float16, float32, ...")
    parser.add_argument("--rows", type=int, metavar="N", help=rows_help)
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="random weights N(0, 0.02), for a directory with only a config.json",
    )
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another of vLLM's engine arguments (VALUE is JSON, or else a string); repeatable",
    )


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of vLLM's LLM from ``--engine-arg`` and ``--dtype``. ValueError names a bad one."""
    found = known(parse_engine_args(args.engine_arg))
    if args.dtype is not None:
        found["dtype"] = args.dtype
    return found


def known(given: dict[str, Any]) -> dict[str, Any]:
    """`given`, keywords of vLLM's LLM. ValueError names one that it does not take."""
    if given:  # to look them up takes seconds
        from corun.verify.engine import check_names

        check_names(given)
    return given


def parse_engine_args(given: Sequence[str], flag: str = "--engine-arg") -> dict[str, Any]:
    """``["name=value", ...]`` as a dict; values are JSON where they parse, else strings."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"{flag} {text!r} is not NAME=VALUE, as in max_model_len=4096")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def run(args: argparse.Namespace) -> int:
    """Verify; 0 kept, 1 broke, 2 could not run."""
    check_model(args.model)
    from corun.verify.run import VerifyOptions, verify
    from corun.verify.summary import print_summary

    # All at once: what the environment says may only be legal together with a flag.
    config = replace(CoRunConfig.from_env() or CoRunConfig(), **given_settings(args))
    options = VerifyOptions(
        model=args.model,
        config=config,
        suite=args.suite,
        max_tokens=args.max_tokens,
        rows=args.rows,
        restarts=args.restarts,
        seed=args.seed,
        quick=args.quick,
        random_weights=args.random_weights,
        engine_args=engine_args(args),
        restart_args=known(parse_engine_args(args.restart_arg, "--restart-arg")),
    )
    say_starting("verify", shown=not args.no_progress)
    report = verify(options, progress=not args.no_progress)
    if args.json:
        from corun.jobs.files import write_json

        write_json(args.json, report.to_mapping())
    print_summary(report)
    return report.exit_status
