"""Seam: ``vllm serve``, as a function. Its parser reads every flag, then CoRun's config goes in."""

import functools
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from corun.config import resolve
from corun.engine import cpu_memory
from corun.engine.http import SERVERS, running_servers
from corun.engine.offline import with_settings
from corun.engine.plugins import ensure_plugin
from corun.plugin import register

SEAMS = (
    ("vllm.entrypoints.cli.serve", "ServeSubcommand.subparser_init", ("subparsers",)),
    ("vllm.entrypoints.cli.serve", "ServeSubcommand.validate", ("args",)),
    ("vllm.entrypoints.cli.serve", "ServeSubcommand.cmd", ("args",)),
    ("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", ("args",)),
    ("vllm.utils.argparse_utils", "FlexibleArgumentParser.parse_args"),
)
SEAMS_BY_VERSION = {
    "0.32": (
        ("vllm.logger", "configure_logging_from_args", ("args",)),
        (SERVERS["0.32"], "serve_http", ("app",)),
    ),
    "0.25": ((SERVERS["0.25"], "serve_http", ("app",)),),
}


def _check_front_end() -> None:
    """Refuse a front end that CoRun's plugin does not reach."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ValueError(
            "CoRun cannot hold vLLM's Rust front end; unset VLLM_USE_RUST_FRONTEND, or use "
            "--policy off"
        )


@contextmanager
def _engine_deaths() -> Iterator[list[str]]:
    """A list that is not empty once the server has stopped without having been told to.

    vLLM returns then as if all were well. What tells the two apart is the last thing that it has to
    await: its HTTP server's shutdown where a signal came, a dummy where the engine died.
    """
    deaths: list[str] = []
    servers = [(server, server.serve_http) for server in running_servers()]

    def noting(original: Any) -> Any:
        @functools.wraps(original)
        async def serve_http(*args: Any, **kwargs: Any) -> Any:
            last = await original(*args, **kwargs)
            if last.__name__ == "dummy_shutdown":
                deaths.append(last.__name__)
            return last

        return serve_http

    for server, original in servers:
        server.serve_http = noting(original)
    try:
        yield deaths
    finally:
        for server, original in servers:
            server.serve_http = original


def _settle_memory(args: Any, arguments: Sequence[str]) -> None:
    """A moderate KV cache on a CPU, where the flags leave it open."""
    if not current_platform.is_cpu():
        return
    # As vLLM itself does a little later: the model is the first word, if there is one.
    given = {**vars(args), "model": args.model_tag or args.model}
    cpu_memory.settle(args, AsyncEngineArgs.from_cli_args(Namespace(**given)), arguments)


def serve(arguments: Sequence[str], settings: Mapping[str, Any], usage: str | None = None) -> None:
    """Run ``vllm serve`` with `arguments` (model first) under CoRun until it is told to stop.

    settings: CoRun settings given on the command line, see ``with_settings``. usage: the line that
    vLLM's parser shows in place of its own. SystemExit: it printed help, or a message about a flag
    (status 2). ValueError: a setting that breaks the contract. RuntimeError: the engine died.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="corun serve")
    command = ServeSubcommand()
    own = command.subparser_init(parser.add_subparsers(dest="subparser", prog="corun"))
    if usage is not None:
        parser.usage = own.usage = usage  # unknown flags are the first one's error
    args = parser.parse_args(["serve", *arguments])
    try:
        from vllm.logger import configure_logging_from_args
    except ImportError:  # 0.25
        pass
    else:
        configure_logging_from_args(args)
    _settle_memory(args, arguments)
    args.additional_config = with_settings(args.additional_config, settings)
    command.validate(args)
    if resolve(args.additional_config).enabled:
        _check_front_end()
        ensure_plugin(os.environ)
        register()
    with _engine_deaths() as deaths:
        command.cmd(args)
    if deaths:
        raise RuntimeError("the server stopped because its engine did; the cause is logged above")
