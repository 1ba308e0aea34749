"""``corun localize MODEL``: name the first module whose output depends on co-runners."""

import argparse

from corun.commands.model_names import check_model
from corun.commands.verify import add_model_arguments, engine_args
from corun.config import CoRunConfig
from corun.starting import say_starting

QUIET = True

EPILOG = """\
A request runs alone and then in a crowd, on one eager engine in this process, and its rows of every
module's output are compared bit by bit in execution order. Exit status: 0 nothing differs, 1 a
module or the sampler was named, 2 could not run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    add_model_arguments(
        parser,
        policy_help="default off: plain vLLM",
        rows_help="requests in the crowd, and max_num_seqs; default 8 on a CPU, 64 on a GPU",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=24, metavar="N", help="output tokens; default 24"
    )
    parser.add_argument(
        "--requests", type=int, default=4, metavar="N", help="try up to N requests; default 4"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the workload; default 0")


def run(args: argparse.Namespace) -> int:
    """Localize; 0 nothing differs, 1 something does, 2 could not run."""
    check_model(args.model)
    from corun.verify.localize import LocalizeOptions, localize, print_findings

    options = LocalizeOptions(
        model=args.model,
        config=CoRunConfig(policy=args.policy or "off"),
        rows=args.rows,
        max_tokens=args.max_tokens,
        requests=args.requests,
        seed=args.seed,
        random_weights=args.random_weights,
        engine_args=engine_args(args),
    )
    say_starting("localize")
    report = localize(options)
    if args.json:
        from corun.jobs.files import write_json

        write_json(args.json, report.to_mapping())
    print_findings(report)
    return report.exit_status
