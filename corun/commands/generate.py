"""``corun generate``: answer every line of a JSONL file, reproducibly and resumably."""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corun.commands.model_names import check_model
from corun.commands.options import add_json_option, add_policy_options, given_settings
from corun.jobs.lines import BadLine, Job, parse
from corun.jobs.params import PARAMETERS, checked

PASS_THROUGH = True
QUIET = True
SHOWN_ERRORS = 20

# Sampling defaults that are flags too: name -> (type, help). The rest is for the lines alone.
_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy; default 1"),
    "top_p": (float, "default 1: all tokens"),
    "top_k": (int, "default 0: all tokens"),
    "min_p": (float, "default 0: all tokens"),
    "max_tokens": (int, "most tokens of each answer; default 256"),
    "min_tokens": (int, "fewest tokens of each answer"),
    "seed": (int, "one seed for every line (default: each line draws its own, and reports it)"),
    "n": (int, "answers for each line; default 1"),
    "logprobs": (int, "logprobs of the sampled tokens, and of this many most likely ones"),
    "prompt_logprobs": (int, "the same for the prompt's tokens"),
    "presence_penalty": (float, "default 0"),
    "frequency_penalty": (float, "default 0"),
    "repetition_penalty": (float, "default 1"),
}
_DEFAULTS = {"max_tokens": 256}

EPILOG = f"""\
Each line of the input is a JSON object with one of "prompt" (a string), "prompt_token_ids" and
"messages" (a chat), and optionally "id" and sampling parameters, at the top level or in "params":
  {{"prompt": "Once upon a time", "temperature": 0.7, "seed": 1}}
  {{"id": "a", "messages": [{{"role": "user", "content": "Hello"}}], "params": {{"n": 2}}}}
Sampling parameters: {", ".join(PARAMETERS)}.

Each line of the output has "index", "id", "prompt_tokens", "domain" (only answers of one domain are
comparable to the bit), "request_digest" (of the request) and "outputs". Each of these has "index",
"seed", "token_ids", "text", "finish_reason", "digest" (of its tokens and, where --logprobs asks for
them, its logprobs) and "logprobs". A line that could not be answered has "error" instead.

A run that was interrupted goes on where it stopped: give the same command again.
Every other flag is one of vLLM's engine flags (--max-num-seqs, --dtype, ...); those that have the
name of a flag above go after "--".
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags; engine flags are passed on."""
    parser.usage = "corun generate MODEL -i IN.jsonl -o OUT.jsonl [options] [vLLM engine flags]"
    parser.epilog = EPILOG
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="JSONL to read")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="JSONL to write")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="a bad line: stop before any work (default), or write an error record for it",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="start again, also where the output exists"
    )
    add_json_option(parser)
    sampling = parser.add_argument_group("sampling, where a line does not say otherwise")
    for name, (kind, text) in _FLAGS.items():
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop at this text")
    add_policy_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the input; 0 done and kept, 1 a step broke the plan. ValueError: could not run."""
    from corun.jobs.partial import check_absent, remove_leftover
    from corun.jobs.run import JobRun

    if not args.rest or args.rest[0].startswith("-"):
        raise ValueError("which model? corun generate MODEL -i IN.jsonl -o OUT.jsonl (model first)")
    check_model(args.rest[0])
    output = Path(args.output)
    if output.exists() and output.samefile(args.input):
        raise ValueError(f"{output} is the input; its answers need another -o")
    if output.exists() and not args.overwrite:
        remove_leftover(output)
        check_absent(output)
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is not a directory")
    defaults = checked({**_DEFAULTS, **_given(args)})
    data = Path(args.input).read_bytes()
    lines = parse(data, defaults)
    if not lines:
        raise ValueError(f"{args.input} has no lines")
    stop = args.on_error == "stop"
    _report_bad([line for line in lines if isinstance(line, BadLine)], args.input, stop)

    from corun.engine.offline import engine_arguments, sampling_params

    engine = engine_arguments(args.rest[0], args.rest[1:], given_settings(args))
    lines = [_checked_by_vllm(line, sampling_params) for line in lines]
    _report_bad([line for line in lines if isinstance(line, BadLine)], args.input, stop)

    started = time.monotonic()
    job = JobRun(
        lines=lines,
        output=output,
        engine_args=engine,
        identity={"input": hashlib.sha256(data).hexdigest(), "sampling flags": defaults},
        stop=stop,
        overwrite=args.overwrite,
    )
    # After the job has noted its flags: how much memory is free must not keep it from going on.
    _settle_memory(engine, args.rest[1:])
    summary = job.run()
    took = time.monotonic() - started - summary["start_seconds"]
    summary["seconds"] = round(took, 3)
    if args.json:
        from corun.jobs.files import write_json

        write_json(args.json, summary)
    _print_summary(summary, output)
    return 1 if summary["violations"] else 0


def _settle_memory(engine: Any, flags: Sequence[str]) -> None:
    from corun.engine import cpu_memory

    cpu_memory.settle(engine, engine, flags)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in (*_FLAGS, "stop")}
    return {name: value for name, value in values.items() if value is not None}


def _checked_by_vllm(line: Job | BadLine, sampling_params: Any) -> Job | BadLine:
    if isinstance(line, Job):
        try:
            sampling_params(line.params)
        except ValueError as e:
            return BadLine(line.index, line.id, str(e))
    return line


def _report_bad(bad: Sequence[BadLine], name: str, stop: bool) -> None:
    """Print bad lines by number; ValueError where they stop the run."""
    if not bad:
        return
    for line in bad[:SHOWN_ERRORS]:
        print(f"{name}, {line}", file=sys.stderr)
    if len(bad) > SHOWN_ERRORS:
        print(f"... and {len(bad) - SHOWN_ERRORS} more", file=sys.stderr)
    if stop:
        raise ValueError(
            f"{len(bad)} bad line(s) in {name}; nothing was run (--on-error skip goes on without)"
        )


def _print_summary(summary: dict[str, Any], output: Path) -> None:
    contract = summary["domain"] or "none: CoRun was off"
    print(
        f"{summary['answered']} answered, {summary['skipped']} skipped, "
        f"{summary['resumed']} of them from an earlier run; "
        f"{summary['output_tokens']} tokens in {summary['seconds']:.1f} s, "
        f"after {summary['start_seconds']:.1f} s to start the engine\n"
        f"policy {summary['policy']}, domain {contract}\n"
        f"digest {summary['digest']}\n"
        f"{output}",
        file=sys.stderr,
    )
    for violation in summary["violations"]:
        print(violation, file=sys.stderr)
