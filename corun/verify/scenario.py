"""A scenario: requests and when they arrive or are aborted, counted in engine steps. Pure Python.

Steps, not seconds: in one process the same scenario meets the engine in the same state every time.
(With the engine core in a process of its own, the core may run a few steps ahead of the arrivals.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    name: unique within a suite. prompt: token ids. params: keywords of vLLM's SamplingParams;
    ``structured_outputs`` is a mapping of StructuredOutputsParams keywords.
    """

    name: str
    prompt: tuple[int, ...]
    params: Mapping[str, Any]

    @property
    def most_tokens(self) -> int:
        """Tokens it may hold in the KV cache, all completions together."""
        return int(self.params.get("n", 1)) * (len(self.prompt) + int(self.params["max_tokens"]))


@dataclass(frozen=True, slots=True)
class Arrival:
    """`request` is added before engine step `step` (the first is 0)."""

    step: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The request called `name` is aborted before engine step `step`, in whatever state it is."""

    step: int
    name: str


Event = Arrival | Abort


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to one engine, from idle to idle.

    name: for reports. events: in order of steps. targets: names of the requests whose output is
    compared with the reference.
    """

    name: str
    events: tuple[Event, ...]
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        arrived: set[str] = set()
        last = 0
        for event in self.events:
            if event.step < last:
                raise ValueError(f"scenario {self.name}: events are not in order of steps")
            last = event.step
            if isinstance(event, Arrival):
                if event.request.name in arrived:
                    raise ValueError(f"scenario {self.name}: two requests {event.request.name!r}")
                arrived.add(event.request.name)
            elif event.name not in arrived:
                raise ValueError(f"scenario {self.name}: {event.name!r} is aborted before it comes")
        if missing := set(self.targets) - arrived:
            raise ValueError(f"scenario {self.name}: targets that never arrive: {sorted(missing)}")
        if aborted := {e.name for e in self.events if isinstance(e, Abort)} & set(self.targets):
            raise ValueError(f"scenario {self.name}: targets that are aborted: {sorted(aborted)}")

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request that arrives."""
        return tuple(e.request for e in self.events if isinstance(e, Arrival))

    @property
    def rows(self) -> int:
        """Sequences that could run at once if all were admitted together."""
        return sum(int(request.params.get("n", 1)) for request in self.requests)


def alone(target: Request, name: str = "alone") -> Scenario:
    """`target` with nothing beside it."""
    return Scenario(name, (Arrival(0, target),), (target.name,))


def at_once(name: str, targets: Iterable[Request], others: Iterable[Request] = ()) -> Scenario:
    """All of them before the first step, `others` first."""
    mine = tuple(targets)
    events = tuple(Arrival(0, request) for request in (*others, *mine))
    return Scenario(name, events, tuple(request.name for request in mine))


def staggered(
    name: str, targets: Iterable[Request], others: Iterable[Request], rng: Random, gap: int
) -> Scenario:
    """Targets and others shuffled together; each arrives 0 to `gap` steps after the one before."""
    mine = tuple(targets)
    order = [*mine, *others]
    rng.shuffle(order)
    step, events = 0, list[Event]()
    for request in order:
        events.append(Arrival(step, request))
        step += rng.randint(0, gap)
    return Scenario(name, tuple(events), tuple(request.name for request in mine))


def with_aborts(scenario: Scenario, victims: Iterable[str], rng: Random, within: int) -> Scenario:
    """`scenario` where each victim is aborted 0 to `within` steps after it arrived."""
    chosen = set(victims)
    events = list[Event](scenario.events)
    for event in scenario.events:
        if isinstance(event, Arrival) and event.request.name in chosen:
            # The first is aborted before any step has seen it; the others at any later point.
            delay = rng.randint(0, within) if len(events) > len(scenario.events) else 0
            events.append(Abort(event.step + delay, event.request.name))
    events.sort(key=lambda e: e.step)  # stable: an arrival stays before its own abort
    return Scenario(scenario.name, tuple(events), scenario.targets)
