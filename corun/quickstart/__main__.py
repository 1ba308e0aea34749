"""``python -m corun.quickstart MODEL``: plain vLLM beside CoRun, compared to the bit.

Exit status: 0 CoRun kept every bit, 1 it did not, 2 an engine could not run.
"""

import argparse
import sys
import time

from rich.console import Console

from corun.quickstart.process import measure_apart
from corun.quickstart.questions import QUESTIONS
from corun.quickstart.show import show

KEPT, BROKEN, COULD_NOT_RUN = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="corun.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model's directory or name, as vLLM takes it")
    parser.add_argument("--policy", default="auto", help="CoRun's policy (default: auto)")
    parser.add_argument("--max-tokens", type=int, default=48, help="output tokens a request")
    args = parser.parse_args(argv)
    console, started = Console(), time.monotonic()
    console.print(
        f"{len(QUESTIONS)} questions, {args.max_tokens} tokens each, temperature 0.6, seed 42, "
        "through two engines. This takes a few minutes on a CPU, less on a GPU.",
        highlight=False,
    )
    doing = Console(stderr=True)  # a progress bar follows where that is a terminal
    try:
        doing.print("plain vLLM: an engine starts, then each request alone, then all at once ...")
        plain = measure_apart(args.model, "off", args.max_tokens, "plain vLLM")
        doing.print("CoRun: the same ...")
        corun = measure_apart(args.model, args.policy, args.max_tokens, "CoRun")
    except (ImportError, OSError, RuntimeError, ValueError) as problem:
        Console(stderr=True).print(f"quickstart: {problem}", markup=False, highlight=False)
        return COULD_NOT_RUN
    show(console, plain, corun)
    console.print(f"({time.monotonic() - started:.0f} s)", highlight=False)
    return KEPT if corun.kept else BROKEN


if __name__ == "__main__":
    sys.exit(main())
