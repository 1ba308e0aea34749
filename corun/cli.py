"""``corun``: the command line. Only the chosen subcommand's module is imported, and vLLM by it.

Exit status: 0 the contract was kept, 1 it was broken, 2 the command could not run. Status 2 comes
with one message on stderr; ``CORUN_DEBUG=1`` shows the traceback instead.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from corun.engine import violation_note
from corun.engine.audit import PlanViolationError

KEPT, BROKEN, CANNOT_RUN = 0, 1, 2
DEBUG_VARIABLE = "CORUN_DEBUG"


class Command(NamedTuple):
    """A subcommand: the module that implements it and its line in ``corun --help``."""

    module: str
    help: str


COMMANDS = {
    "generate": Command("corun.commands.generate", "answer a JSONL file of prompts, reproducibly"),
    "serve": Command("corun.commands.serve", "vLLM's OpenAI-compatible server, held to a policy"),
    "verify": Command("corun.commands.verify", "check that outputs do not depend on co-runners"),
    "certify": Command(
        "corun.commands.certify", "measure which shapes give the same bits on this machine"
    ),
    "localize": Command("corun.commands.localize", "find the module where plain vLLM diverges"),
    "bench": Command("corun.commands.bench", "measure modes side by side, with figures"),
    "doctor": Command("corun.commands.doctor", "what is installed, and which policy would run"),
}


class _Version(argparse.Action):
    """``--version``, read only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show CoRun's version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from corun import __version__

        print(f"corun {__version__}")
        parser.exit()


class _Parsers(NamedTuple):
    """The whole parser, the one whose usage an error shows, and the chosen command's module."""

    all: argparse.ArgumentParser
    own: argparse.ArgumentParser
    module: ModuleType | None


def _parsers(chosen: str | None) -> _Parsers:
    """Parsers with the arguments of the `chosen` command only."""
    parser = argparse.ArgumentParser(
        prog="corun",
        description="Deterministic vLLM: the same tokens and logprobs, to the bit, whatever else "
        "runs beside a request.",
        epilog="Exit status: 0 the contract was kept, 1 it was broken, 2 it could not run.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    own, module = parser, None
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == chosen:
            own, module = sub, importlib.import_module(command.module)
            module.add_arguments(sub)
    return _Parsers(parser, own, module)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every long flag of `parser` and of the subcommands below it."""
    for action in parser._actions:  # argparse has no public list
        yield from (flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _flags(sub)


def _close_flags(unknown: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """For each unknown flag the one of `parser` that it resembles most, if any does."""
    known = set(_flags(parser))
    typed = (word.partition("=")[0] for word in unknown if word.startswith("--"))
    # In the order of the alphabet, so that equally close ones give the same answer every time.
    close = (difflib.get_close_matches(flag, sorted(known), n=1) for flag in typed)
    return [flag for found in close for flag in found]


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ModuleType]:
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    parsers = _parsers(chosen)
    module = parsers.module
    given, passed = list(argv), []
    if getattr(module, "PASS_THROUGH", False):
        if "--" in given:
            cut = given.index("--")
            given, passed = given[:cut], given[cut + 1 :]
        # vLLM's own way to ask for a part of its help; argparse would call it an error.
        passed += [a for a in given if a.startswith("--help=")]
        given = [a for a in given if not a.startswith("--help=")]
    args, unknown = parsers.all.parse_known_args(given)
    if unknown and not getattr(module, "PASS_THROUGH", False):
        meant = _close_flags(unknown, parsers.own)
        hint = f" (did you mean {' and '.join(meant)}?)" if meant else ""
        parsers.own.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    args.rest = unknown + passed
    assert module is not None  # argparse has exited unless a command was chosen
    return args, module


def _explain(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "vllm":
        return (
            "vLLM is not installed here; install 'corun-vllm[gpu]' on a machine with a GPU, "
            "or 'corun-vllm[cpu]'"
        )
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | RuntimeError | OSError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} ({DEBUG_VARIABLE}=1 shows where)"


def _debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "").strip() not in ("", "0")


@contextmanager
def _violations_told() -> Iterator[None]:
    """PlanViolationError where any process left a note of one, whatever else became of it.

    An engine in a process of its own dies with its error: the front end sees only that it is dead.
    """
    with violation_note.expected() as read:
        error: BaseException | None = None
        try:
            yield
        except PlanViolationError:
            raise
        except Exception as e:
            error = e
        if message := read():
            raise PlanViolationError(message) from error
        if error is not None:
            raise error


def _check_report(args: argparse.Namespace) -> None:
    """ValueError where the file of ``--json`` could not be written when all is done."""
    given = getattr(args, "json", None)
    if given and given != "-" and not Path(given).parent.is_dir():
        raise ValueError(f"--json {given}: {Path(given).parent} is not a directory")


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    """Run a command, with vLLM kept quiet where the command wants that."""
    from corun.commands.quiet import quiet

    calm = getattr(module, "QUIET", False) and not _debugging()
    with _violations_told(), quiet(args.rest) if calm else nullcontext():
        return int(module.run(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``corun`` with `argv` (default: the process's arguments); returns the exit status."""
    args, status = None, CANNOT_RUN
    try:
        args, module = _parse(sys.argv[1:] if argv is None else argv)
        _check_report(args)
        return _run(module, args)
    except KeyboardInterrupt:
        message = "interrupted"
    except PlanViolationError as error:
        message, status = str(error), BROKEN
    except Exception as error:
        if _debugging():
            raise
        message = _explain(error)
    name = f"corun {args.command}" if args else "corun"
    print(f"{name}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
