"""Typed reading of server files ("corun-bench-server/1"): what vLLM's own client reported."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.bench import mode_names
from corun.bench.fields import Fields, RecordError
from corun.bench.server import FORMAT, equal_texts

NUMBERS = (
    "output_throughput",
    "request_throughput",
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
)
"""Of vLLM's results, those that a report shows; milliseconds, tokens/s and requests/s."""


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One mode under one load. numbers: see NUMBERS.

    equal: how many answers had the text that they had in the mode's first run of these requests,
    and of how many; None for a first run.
    """

    mode: str
    workload: str
    arrivals: str
    requests_digest: str | None
    numbers: Mapping[str, float]
    equal: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ServerFile:
    """The runs of one benchmark over HTTP, and which modes failed (notes)."""

    path: Path
    model: str
    command: str
    date: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    runs: tuple[ServerRun, ...]
    notes: tuple[str, ...]


def parse_server(fields: Fields, path: Path) -> ServerFile:
    """A server file from its JSON.

    RecordError where it is foreign or damaged, or where two modes were not sent the same requests.
    """
    fields.require_format(FORMAT)
    plain = fields.items("runs", _checked)
    runs = tuple(_run(given, equal_texts(plain, i)) for i, given in enumerate(plain))
    sent: dict[str, str | None] = {}
    for run in runs:
        if sent.setdefault(run.workload, run.requests_digest) != run.requests_digest:
            raise RecordError(f"{path}: modes were sent different requests of {run.workload}")
    return ServerFile(
        path,
        fields.text("model"),
        fields.text("command"),
        fields.text("date"),
        fields.object("hardware"),
        fields.object("versions"),
        runs,
        tuple(
            f"{mode_names.label(mode)} failed over HTTP: {why}"
            for mode, why in fields.object("failed").items()
        ),
    )


def _checked(fields: Fields) -> dict[str, Any]:
    for name in ("mode", "workload", "arrivals"):
        fields.text(name)
    fields.optional_text("requests_digest")
    fields.column("text_digests", lambda v: isinstance(v, str))
    result = Fields(fields.object("result"), f"{fields.where} result,")
    for name in NUMBERS:
        result.number(name)
    return dict(fields.given)


def _run(given: Mapping[str, Any], equal: tuple[int, int] | None) -> ServerRun:
    return ServerRun(
        given["mode"],
        given["workload"],
        given["arrivals"],
        given["requests_digest"],
        {name: float(given["result"][name]) for name in NUMBERS},
        equal,
    )
