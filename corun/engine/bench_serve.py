"""Seam: ``vllm bench serve``, as a function, and a way to hand it the very requests to send.

vLLM's CPU build has no working ``vllm`` command; the function is there in every build. Its data
sets are texts, or lengths to fill with random tokens. To send known token ids and seeds, the
function that reads the data set is replaced while it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

SEAMS = (
    ("vllm.benchmarks.serve", "add_cli_args", ("parser",)),
    ("vllm.benchmarks.serve", "main", ("args",)),
    ("vllm.benchmarks.serve", "get_samples", ("args", "tokenizer")),
    (
        "vllm.benchmarks.datasets",
        "SampleRequest",
        (
            "prompt",
            "prompt_len",
            "expected_output_len",
            "request_id",
            "timestamp",
            "request_overrides",
        ),
    ),
)

# The one data set that may bring arrival times of its own.
DATASET = "timed_trace"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request to send. arrival_s: seconds from the start; it counts only under --self-timed.

    body: fields to add to the request's JSON.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float
    body: dict[str, Any]


def _sample(request: ClientRequest, name: str) -> SampleRequest:
    return SampleRequest(
        prompt=list(request.prompt_token_ids),
        prompt_len=len(request.prompt_token_ids),
        expected_output_len=request.max_tokens,
        request_id=name,
        timestamp=request.arrival_s,
        request_overrides=dict(request.body) or None,
    )


def bench_serve(
    arguments: Sequence[str], requests: Sequence[ClientRequest] | None = None
) -> dict[str, Any]:
    """Run ``vllm bench serve`` with `arguments`; returns what it reports.

    requests: what to send, instead of a data set of vLLM's. SystemExit where vLLM's parser refuses
    a flag; ValueError where a setting, or the server, is refused.
    """
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    if requests is None:
        return serve.main(parser.parse_args(list(arguments)))
    ours = ["--dataset-name", DATASET, "--num-prompts", str(len(requests))]
    args = parser.parse_args([*arguments, *ours])
    read = serve.get_samples

    def get_samples(args: Any, tokenizer: Any) -> list[SampleRequest]:
        prefix = args.request_id_prefix
        return [_sample(request, f"{prefix}{i}") for i, request in enumerate(requests)]

    serve.get_samples = get_samples
    try:
        return serve.main(args)
    finally:
        serve.get_samples = read
