"""The client's process of a server benchmark: ``python -m corun.bench.client``.

Sends a saved request set through ``vllm bench serve``, or, without one, whatever vLLM's own flags
say. All flags that are not named here are those of ``vllm bench serve``.
"""

import argparse
import sys
from collections.abc import Sequence

from corun.bench.arrivals import Arrivals
from corun.bench.requests import RequestSet, load
from corun.bench.workload import parse_arrivals
from corun.engine.bench_serve import ClientRequest, bench_serve


def flags_of(arrivals: Arrivals) -> list[str]:
    """The flags of ``vllm bench serve`` that make requests arrive so."""
    if arrivals.kind == "poisson":
        return ["--self-timed"]  # the request set's own times
    if arrivals.kind == "closed":
        return ["--no-self-timed", "--max-concurrency", str(arrivals.concurrency)]
    return ["--no-self-timed"]


def client_requests(
    request_set: RequestSet, arrivals: Arrivals, *, seeded: bool
) -> list[ClientRequest]:
    """A request set as vLLM's client sends it. seeded: with each request's own sampling seed."""
    count = len(request_set.requests)
    closed = arrivals.kind == "closed"
    times = [0.0] * count if closed else arrivals.times(count, request_set.seed)
    return [
        ClientRequest(r.prompt_token_ids, r.max_tokens, time, {"seed": r.seed} if seeded else {})
        for r, time in zip(request_set.requests, times, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client; vLLM's flags say where the result goes."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--request-set")
    parser.add_argument("--arrivals", default="all", type=parse_arrivals)
    parser.add_argument("--unseeded", action="store_true")
    args, flags = parser.parse_known_args(argv)
    if args.request_set is None:
        bench_serve(flags)
        return 0
    requests = client_requests(load(args.request_set), args.arrivals, seeded=not args.unseeded)
    bench_serve([*flags, *flags_of(args.arrivals)], requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
