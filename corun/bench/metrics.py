"""What runs are measured by. Pure: recorded numbers in, numbers out."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from corun.bench.records import RequestRecord, Run


@dataclass(frozen=True, slots=True)
class Stats:
    """Mean and percentiles of `count` values, in the values' unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Tokens per second in bins of `width` seconds; bin i begins at i * width."""

    width: float
    prefill: tuple[float, ...]
    decode: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KVUse:
    """Share of the KV cache in use, 0 to 1: the mean over time, and the peak."""

    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class Determinism:
    """Requests with the same digest in every repeat. orders: different orders they ran in."""

    equal: int
    requests: int
    repeats: int
    orders: int

    @property
    def holds(self) -> bool:
        """Whether every request kept every bit."""
        return self.equal == self.requests


def output_tokens(run: Run) -> int:
    """Tokens that the run generated."""
    return sum(request.n_out for request in run.requests)


def throughput(run: Run) -> float:
    """Output tokens per second, from the run's begin to its end."""
    return output_tokens(run) / run.wall_s


def aggregate_throughput(runs: Iterable[Run]) -> float:
    """The paper's aggregate (Section V): sum of throughput x time over sum of time, tokens/s.

    It weights each task by the time that it takes, so it is all tokens by all of the time.
    """
    tasks = [(throughput(run), run.wall_s) for run in runs]
    assert tasks, "an aggregate needs a run"
    return sum(rate * seconds for rate, seconds in tasks) / sum(seconds for _, seconds in tasks)


def ttft(request: RequestRecord) -> float:
    """Time to first token, in seconds since the request arrived."""
    return request.first_token_s - request.arrival_s


def tpot(request: RequestRecord) -> float | None:
    """Time per output token after the first, in seconds; None where there was only one token."""
    if request.n_out < 2:
        return None
    return (request.finish_s - request.first_token_s) / (request.n_out - 1)


def ttfts(runs: Iterable[Run]) -> list[float]:
    """Times to first token of all requests of `runs`, in seconds."""
    return [ttft(request) for run in runs for request in run.requests]


def tpots(runs: Iterable[Run]) -> list[float]:
    """Times per output token of the requests of `runs` that have one, in seconds."""
    found = (tpot(request) for run in runs for request in run.requests)
    return [value for value in found if value is not None]


def stats(values: Sequence[float]) -> Stats | None:
    """Mean and percentiles (linear between the two nearest values); None for no values."""
    if not values:
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Stats(len(values), float(np.mean(values)), p50, p90, p99)


def cdf(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The values in order, and for each the share of values up to and including it."""
    n = len(values)
    return sorted(values), [(i + 1) / n for i in range(n)]


def over_time(run: Run, width: float) -> Timeline | None:
    """Prefill and decode throughput in bins of `width` seconds; None where steps are not recorded.

    A step's tokens are spread over the time since the step before it ended (so also over a pause
    before it). The last bin is divided by its full width as well: all bins add up to all tokens.
    """
    assert width > 0
    steps = run.steps
    if steps is None or not steps.end_s:
        return None
    bins = math.ceil(max(run.wall_s, steps.end_s[-1]) / width)
    ends = width * np.arange(1, bins + 1)
    times = [0.0, *steps.end_s]
    prefill, decode = (
        np.diff(np.interp(ends, times, np.cumsum([0, *tokens])), prepend=0.0) / width
        for tokens in (steps.prefill_tokens, steps.decode_rows)
    )
    return Timeline(width, tuple(prefill.tolist()), tuple(decode.tolist()))


def padded_share(run: Run, *, decode_only: bool = False) -> float | None:
    """Share of the rows run that held no token, 0 to 1, over the steps that tell their rows.

    decode_only: only over steps without prefill. None where no such step is recorded.
    """
    if run.steps is None:
        return None
    columns = (run.steps.rows_run, run.steps.rows_used(), run.steps.prefill_tokens)
    known = [
        (rows, used)
        for rows, used, prefill in zip(*columns, strict=True)
        if rows is not None and not (decode_only and prefill)
    ]
    total = sum(rows for rows, _ in known)
    return sum(rows - used for rows, used in known) / total if total else None


def kv_use(run: Run) -> KVUse | None:
    """KV cache use; each step counts for the time since the step before. None without steps."""
    steps = run.steps
    if steps is None or not steps.end_s or not steps.end_s[-1]:
        return None
    spans = np.diff(steps.end_s, prepend=0.0)
    mean = float(np.dot(spans, steps.kv_used) / spans.sum())
    return KVUse(mean, max(steps.kv_used))


def determinism(runs: Sequence[Run]) -> Determinism | None:
    """Compares the digests of the repeats of one mode on one request set; None for one repeat."""
    if len(runs) < 2:
        return None
    digests = [{request.id: request.digest for request in run.requests} for run in runs]
    first, *others = digests
    assert all(other.keys() == first.keys() for other in others), "repeats of one request set"
    equal = sum(all(other[id_] == digest for other in others) for id_, digest in first.items())
    return Determinism(equal, len(first), len(runs), len({run.order_seed for run in runs}))
