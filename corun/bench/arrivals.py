"""When the requests of a benchmark arrive."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

_STREAM = 3
"""Keeps the gaps apart from the other draws of one seed (see corun.bench.requests)."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process.

    kind "all": every request at the start, value None. "closed": a fixed number of requests is in
    flight, the next one comes as one completes (the paper's); value: how many. "poisson": random
    arrivals, value: requests a second. Raises ValueError for another kind or a senseless value.
    """

    kind: Literal["all", "closed", "poisson"]
    value: float | None = None

    def __post_init__(self) -> None:
        value = self.value
        if self.kind == "all":
            if value is not None:
                raise ValueError("arrivals 'all' take no number; write just 'all'")
        elif self.kind == "closed":
            if value is None or not math.isfinite(value) or value < 1 or value != int(value):
                raise ValueError(
                    "arrivals 'closed' need a whole number of requests in flight, 1 or more, "
                    "such as closed:32"
                )
        elif self.kind == "poisson":
            if value is None or not math.isfinite(value) or value <= 0:
                raise ValueError(
                    "arrivals 'poisson' need a rate in requests a second, above 0, such as "
                    "poisson:4.0"
                )
        else:
            raise ValueError(
                f"unknown arrivals {self.kind!r}; choose all, closed:N or poisson:RATE"
            )

    @property
    def name(self) -> str:
        """As `corun.bench.workload.parse_arrivals` reads it."""
        if self.kind == "all":
            return "all"
        return f"closed:{self.concurrency}" if self.kind == "closed" else f"poisson:{self.value}"

    @property
    def concurrency(self) -> int:
        """Requests in flight, of a closed loop."""
        assert self.kind == "closed" and self.value is not None
        return int(self.value)

    def times(self, count: int, seed: int) -> list[float]:
        """Arrival times of `count` requests in order, in seconds since the first; not "closed".

        The gaps of "poisson" are exponential with mean 1 / rate; fewer requests of the same seed
        are the beginning of more.
        """
        assert self.kind != "closed", "a closed loop has no times: they depend on the engine"
        if self.kind == "all":
            return [0.0] * count
        assert self.value is not None
        stream = np.random.SeedSequence(seed, spawn_key=(_STREAM,))
        rng = np.random.Generator(np.random.PCG64(stream))
        gaps = rng.standard_exponential(max(count - 1, 0)) / self.value
        times: list[float] = np.concatenate([[0.0], np.cumsum(gaps)])[:count].tolist()
        return times
