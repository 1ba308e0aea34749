"""Options that several subcommands share."""

import argparse
from typing import Any

from corun.config import POLICIES


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--policy``, ``--certificate``, ``--no-strict``, ``--step-log`` (all unset)."""
    group = parser.add_argument_group("CoRun")
    group.add_argument(
        "--policy",
        choices=POLICIES,
        help="how vLLM is held to the contract (default: CORUN_POLICY, else auto); off: plain vLLM",
    )
    group.add_argument(
        "--certificate",
        metavar="FILE",
        help="a certificate to plan by (default: the one that 'corun certify' kept for this model)",
    )
    add_split_option(group)
    group.add_argument(
        "--no-strict",
        action="store_const",
        const=False,
        dest="strict",
        help="count steps outside the plan instead of stopping the engine at the first",
    )
    group.add_argument(
        "--step-log", metavar="FILE", help="write one JSON line for each executed step"
    )


def add_split_option(group: Any) -> None:
    """Add ``--split-decode`` and ``--no-split-decode`` (unset) to a parser or a group of it."""
    group.add_argument(
        "--split-decode",
        action=argparse.BooleanOptionalAction,
        help="under certified: split the KV of long requests by their own length, which decodes a "
        "few long requests faster (default: CORUN_SPLIT_DECODE, else off)",
    )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The CoRun settings that were given as flags, in ``CoRunConfig``'s names."""
    names = ("policy", "strict", "step_log", "certificate", "split_decode")
    settings = {name: getattr(args, name, None) for name in names}  # not every command has all
    return {name: value for name, value in settings.items() if value is not None}


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``, for the command's report."""
    parser.add_argument("--json", metavar="FILE", help="write the report to FILE as JSON")
