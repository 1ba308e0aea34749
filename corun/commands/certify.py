"""``corun certify MODEL``: measure which shapes give the same bits here, and keep the result."""

import argparse
import json
from pathlib import Path

from corun.commands.kept import write_name
from corun.commands.model_names import check_model
from corun.commands.options import add_json_option, add_split_option
from corun.commands.verify import add_engine_arguments, engine_args

QUIET = True

EPILOG = """\
The certificate is kept for this machine (CORUN_CACHE, else the user's cache directory); engines
with the same model shape, dtype, device, software and settings find it at their next start, and
the policy 'auto' then runs the least restrictive schedule that it allows. Weights are no part of
it. Exit status: 0 the certificate allows 'certified', 1 it does not, 2 nothing could be measured.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a model's name or directory")
    add_json_option(parser)
    parser.add_argument("--show", metavar="FILE", help="only print a certificate's file")
    add_engine_arguments(parser, rows_help="max_num_seqs; default 32 on a CPU, 256 on a GPU")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="about how long the probes may take; default 40, on a CPU 10",
    )
    add_split_option(parser)
    parser.add_argument("--no-keep", action="store_true", help="do not keep the certificate")
    parser.add_argument("--no-progress", action="store_true", help="no lines about progress")


def run(args: argparse.Namespace) -> int:
    """Certify or show; 0 certified is allowed, 1 it is not, 2 could not run."""
    from rich.console import Console

    from corun.certify import planner
    from corun.certify.table import show

    if args.show:
        return _show(args.show)
    if not args.model:
        raise ValueError("say which MODEL to certify, or --show FILE")
    check_model(args.model)
    from corun.certify.run import CertifyOptions, certify

    found = certify(
        CertifyOptions(
            args.model,
            rows=args.rows,
            random_weights=args.random_weights,
            budget_s=args.budget,
            keep=not args.no_keep,
            split_decode=bool(args.split_decode),
            engine_args=engine_args(args),
        ),
        progress=not args.no_progress,
    )
    if found.file:
        write_name(found.file, args.model)
    if args.json:
        from corun.jobs.files import write_json

        write_json(args.json, found.to_mapping())
    console = Console()
    show(found.certificate, found.engine, console)
    console.print(
        f"measured and checked in {found.seconds:.1f} s; digest {found.certificate.digest}"
    )
    console.print(f"kept as {found.file}" if found.file else "not kept", soft_wrap=True)
    if found.file:
        console.print(
            "From now on 'auto' plans by it. Another policy is another domain: answers from before "
            "are not comparable with answers from now on.",
            soft_wrap=True,
        )
    return 0 if planner.verdicts(found.certificate, found.engine)[0].allowed else 1


def _show(file: str) -> int:
    from rich.console import Console

    from corun.certify import planner
    from corun.certify.certificate import Certificate
    from corun.certify.table import show

    try:
        given = json.loads(Path(file).read_text())
    except ValueError as e:
        raise ValueError(f"{file} is no JSON file: {e}") from e
    try:
        certificate = Certificate.from_mapping(given)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    engine = planner.Engine.largest(certificate)
    show(certificate, engine, Console())
    return 0 if planner.verdicts(certificate, engine)[0].allowed else 1
