"""Seam: ``vllm serve``, as a function. Its parser reads every flag, then CoRun's config goes in."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from corun.config import resolve
from corun.engine.offline import with_settings
from corun.plugin import register

SEAMS = (
    ("vllm.entrypoints.cli.serve", "ServeSubcommand.subparser_init", ("subparsers",)),
    ("vllm.entrypoints.cli.serve", "ServeSubcommand.validate", ("args",)),
    ("vllm.entrypoints.cli.serve", "ServeSubcommand.cmd", ("args",)),
    ("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),
    ("vllm.utils.argparse_utils", "FlexibleArgumentParser.parse_args"),
)
SEAMS_BY_VERSION = {"0.32": (("vllm.logger", "configure_logging_from_args", ("args",)),)}

PLUGIN_GROUP = "vllm.general_plugins"


def plugin_installed() -> bool:
    """Whether all of vLLM's processes will find the plugin (the package is installed)."""
    return any(e.value.startswith("corun.") for e in entry_points(group=PLUGIN_GROUP))


def plugin_blocked(environ: MutableMapping[str, str]) -> bool:
    """Whether VLLM_PLUGINS keeps vLLM from loading the plugin."""
    allowed = environ.get("VLLM_PLUGINS")
    return allowed is not None and "corun" not in allowed.split(",")


def allow_plugin(environ: MutableMapping[str, str]) -> bool:
    """Add the plugin to VLLM_PLUGINS where that variable leaves it out; whether it had to."""
    if not plugin_blocked(environ):
        return False
    environ["VLLM_PLUGINS"] = ",".join(p for p in (environ["VLLM_PLUGINS"], "corun") if p)
    return True


def _check_processes(args: Any) -> None:
    """Refuse front ends that CoRun's plugin does not reach."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ValueError(
            "CoRun cannot hold vLLM's Rust front end; unset VLLM_USE_RUST_FRONTEND, or use "
            "--policy off"
        )
    several = (args.api_server_count or 1) > 1 or args.data_parallel_size > 1
    if several and not plugin_installed():
        raise ValueError(
            "this server needs several processes, and they would not find CoRun's plugin: install "
            "the package 'corun-vllm' (pip install), instead of running its source tree"
        )


def serve(arguments: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Run ``vllm serve`` with `arguments` (model first) under CoRun until it is told to stop.

    settings: CoRun settings given on the command line, see ``with_settings``. SystemExit: vLLM's
    parser printed help, or a message about a flag (status 2). ValueError: a setting that breaks the
    contract.
    """
    allow_plugin(os.environ)
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="corun")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *arguments])
    try:
        from vllm.logger import configure_logging_from_args
    except ImportError:  # 0.25
        pass
    else:
        configure_logging_from_args(args)
    args.additional_config = with_settings(args.additional_config, settings)
    command.validate(args)
    if resolve(args.additional_config).enabled:
        _check_processes(args)
        register()
    command.cmd(args)
