"""Measures single operators, as plain vLLM and as batch-invariant vLLM run them, on one device."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from corun.bench.timing import Timing, time_calls
from corun.engine import invariant_ops
from corun.engine.invariant_ops import Operator

COLD_BYTES = 256 << 20  # several times what a GPU's L2 cache holds
LEAST_CALLS, MOST_CALLS = 4, 128
ROW_CALLS = 64


@dataclass(frozen=True, slots=True)
class Point:
    """One operator at one shape. n: columns of the input, or of MatMul's output; k: MatMul's K."""

    operator: str
    rows: int
    n: int
    k: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A point's times; ``batch_invariant_us`` is None where those kernels cannot run."""

    point: Point
    standard: Timing
    batch_invariant: Timing | None

    def to_mapping(self) -> dict[str, Any]:
        """The form in the file."""
        invariant = self.batch_invariant
        return {
            **asdict(self.point),
            "standard_us": self.standard.median_us,
            "batch_invariant_us": invariant.median_us if invariant else None,
            "repeats": self.standard.repeats,
        }


class Bench:
    """Measures points on one device, from one pool of random numbers.

    largest: elements of the largest weight that ``measure`` will be asked for.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, largest: int) -> None:
        self.device, self.dtype = device, dtype
        self.standard = invariant_ops.standard()
        self.unavailable = invariant_ops.unavailable()
        self.invariant = None if self.unavailable else invariant_ops.batch_invariant()
        generator = torch.Generator(device=device).manual_seed(0)
        least = COLD_BYTES if device.type == "cuda" else 0
        elements = max(largest, least // dtype.itemsize)
        self.pool = torch.empty(elements, dtype=dtype, device=device)
        self.pool.normal_(0.0, 0.02, generator=generator)
        self.generator = generator

    def measure(self, point: Point, *, repeats: int, limit_s: float) -> Measured:
        """Time one point; each of its two kernels gets half of `limit_s`."""
        columns = point.k or point.n
        x = torch.empty(point.rows, columns, dtype=self.dtype, device=self.device)
        x.normal_(generator=self.generator)
        weights = self._weights(point)
        timed = partial(time_calls, device=self.device, repeats=repeats, limit_s=limit_s / 2)
        with torch.inference_mode():
            standard = timed(_calls(self.standard[point.operator], x, weights))
            if self.invariant is None:
                return Measured(point, standard, None)
            invariant = timed(_calls(self.invariant[point.operator], x, weights))
        return Measured(point, standard, invariant)

    def _weights(self, point: Point) -> list[Tensor | None]:
        """One weight for each call of a measurement, or None each."""
        if point.operator == "rmsnorm":
            return [torch.ones(point.n, dtype=self.dtype, device=self.device)] * ROW_CALLS
        if point.k is None:
            return [None] * ROW_CALLS
        size = point.n * point.k
        distinct = self.pool.numel() // size
        calls = min(max(distinct, LEAST_CALLS), MOST_CALLS)
        starts = [(i % distinct) * size for i in range(calls)]
        return [self.pool[s : s + size].view(point.n, point.k) for s in starts]


def _calls(operator: Operator, x: Tensor, weights: Sequence[Tensor | None]) -> list[Any]:
    return [partial(operator, x, weight) for weight in weights]


def measure_all(
    bench: Bench, points: Iterable[Point], *, repeats: int, seconds: float
) -> tuple[list[Measured], list[Point]]:
    """Measure `points` within about `seconds`; returns what was measured and what was not.

    The time that is left is shared evenly among the points that are left.
    """
    from tqdm import tqdm

    deadline = time.perf_counter() + seconds
    todo = list(points)
    measured: list[Measured] = []
    for point in tqdm(todo, desc="operators", unit="shape", disable=None):
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        limit = left / (len(todo) - len(measured))
        measured.append(bench.measure(point, repeats=repeats, limit_s=limit))
    return measured, todo[len(measured) :]
