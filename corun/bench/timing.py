"""How long a call takes on its device: medians, without the host's time where there is a GPU."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

LEAST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one call in microseconds, and of how many measurements."""

    median_us: float
    repeats: int


def time_calls(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    limit_s: float,
) -> Timing:
    """Median time of one of `calls`, which do the same work on different memory.

    On a CUDA device all calls are captured in one graph, which is replayed between two events: the
    host launches one graph, so its time does not count. Elsewhere each call is timed alone.
    repeats: measurements at most. limit_s: no more of them once this many seconds have passed, but
    ``LEAST_REPEATS`` always.
    """
    measure = _graph_us if device.type == "cuda" else _host_us
    samples: list[float] = []
    for microseconds in measure(calls, max(repeats, LEAST_REPEATS)):
        if not samples:  # what had to be compiled is compiled
            deadline = time.perf_counter() + limit_s
        samples.append(microseconds)
        if len(samples) >= LEAST_REPEATS and time.perf_counter() > deadline:
            break
    return Timing(statistics.median(samples), len(samples))


def _host_us(calls: Sequence[Callable[[], object]], repeats: int) -> Iterator[float]:
    calls[0]()
    for i in range(repeats):
        call = calls[i % len(calls)]
        started = time.perf_counter_ns()
        call()
        yield (time.perf_counter_ns() - started) / 1000


def _graph_us(calls: Sequence[Callable[[], object]], repeats: int) -> Iterator[float]:
    # Compilation and the choice of algorithms happen before the capture, on a stream of its own.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # keeps the device busy until what is measured has been launched
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end) * 1000 / len(calls)
