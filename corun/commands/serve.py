"""``corun serve``: ``vllm serve`` under a policy."""

import argparse

from corun.commands.model_names import check_model
from corun.commands.options import add_policy_options, given_settings

PASS_THROUGH = True
USAGE = "corun serve MODEL [--policy POLICY] [any flag of vllm serve]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CoRun's flags; all others, and the model, are vLLM's."""
    parser.usage = USAGE
    add_policy_options(parser)
    parser.epilog = (
        "Every answer carries the headers x-corun-seed, x-corun-policy and x-corun-domain; GET\n"
        "/corun/report shows the plan and the executed steps. vLLM's flags: --help=all, or\n"
        "--help=WORD to search them."
    )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; returns 0."""
    if not args.rest:
        raise ValueError("which model? corun serve MODEL [any flag of vllm serve]")
    if not args.rest[0].startswith("-"):
        check_model(args.rest[0])
    from corun.engine.server import serve

    serve(args.rest, given_settings(args), USAGE)
    return 0
