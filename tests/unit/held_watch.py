"""The properties that a held scheduler must keep, for every set of grants.

`HeldWatch` is told what each step did (by the simulated engine of held_simulator.py, or by vLLM's
own scheduler in real_traffic.py). It keeps its own record of every request and shares no code
with the policy. With no grant the properties are those of ``isolate``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from scheduler_traces import BLOCK_SIZE, NOT_PAUSED, PAUSED_ALL, Arrival, Trace

from corun.plan import Grants

# Every set of grants that the scheduler can be given: with all of them vLLM's own runs instead.
GRANTS = [Grants(*flags) for flags in product((False, True), repeat=5) if not all(flags)]


def name_of(grants: Grants) -> str:
    return "+".join(name for name, granted in asdict(grants).items() if granted) or "none"


@dataclass(eq=False)
class Seen:
    """What the watch knows of a request; `computed` counts tokens scheduled since its last start.

    decoding: it has reached its last known token, and takes one token a step from here on.
    """

    name: str
    number: int
    arrival: Arrival
    reservation: int
    computed: int = 0
    decoding: bool = False
    preemptions: int = 0


@dataclass(frozen=True)
class Step:
    """One step. offered: the prompts that the engine was to run; it may have refused some."""

    scheduled: dict[str, int]
    known: dict[str, int]
    begins: dict[str, int]
    decoding: list[Seen]
    decoded: list[Seen]
    prompts: list[Seen]
    partial: list[Seen]
    ready: list[Seen]
    offered: list[Seen]

    @property
    def starters(self) -> list[Seen]:
        return [r for r in self.prompts if r in self.ready]


class HeldWatch:
    """Checks every step.

    reservations: blocks by name. blocks: blocks behind so many tokens. chunk: the length of a whole
    prompt chunk in this engine, in tokens, where that is not its budget.
    """

    def __init__(
        self,
        trace: Trace,
        grants: Grants,
        reservations: dict[str, int],
        blocks: Callable[[int], int],
        chunk: int | None = None,
    ) -> None:
        self.trace, self.grants = trace, grants
        self.reservations, self.blocks = reservations, blocks
        self.chunk = chunk or trace.budget
        self.waiting: list[Seen] = []
        self.running: list[Seen] = []
        self.numbers = 0
        self.steps = self.starts_since_decode = 0
        self.counts: Counter[str] = Counter()  # so that a test can ask whether it saw any
        self.stalled = self.lenient = False

    def arrive(self, name: str, arrival: Arrival) -> None:
        self.waiting.append(Seen(name, self.numbers, arrival, self.reservations[name]))
        self.numbers += 1
        self._sort()

    def _sort(self) -> None:
        by_priority = self.trace.by_priority
        self.waiting.sort(key=lambda r: (r.arrival.priority * by_priority, r.number))

    def end(self, name: str) -> None:
        self.running = [r for r in self.running if r.name != name]
        self.waiting = [r for r in self.waiting if r.name != name]

    def can_decode(self, r: Seen) -> bool:
        limit = self.trace.length(r.arrival) - r.arrival.prompt
        return r.decoding and r.computed - r.arrival.prompt + 1 < limit

    def step(
        self,
        scheduled: dict[str, int],
        *,
        known: dict[str, int],
        begins: dict[str, int],
        unready: Sequence[str] = (),
        pause: int = NOT_PAUSED,
        preempted: Sequence[str] = (),
        refused: Sequence[str] = (),
        free_blocks: int = 0,
        exact: bool = True,
    ) -> None:
        """One step, as the engine ran it.

        scheduled: tokens by request. known: each request's prompt and output tokens so far. begins:
        where in it a request that starts begins to compute. unready: waiting requests that cannot
        start. refused: prompts that were offered to the engine, which did not run them.
        exact: whether the engine starts everything that it is offered.
        """
        self.steps += 1
        if pause == PAUSED_ALL:
            assert not scheduled and not preempted, "something ran during a pause"
            return
        grants, budget = self.grants, self.trace.budget
        assert not preempted or grants.preemption, f"{preempted} lost their KV cache"
        assert sum(scheduled.values()) <= budget
        by_name = {r.name: r for r in (*self.running, *self.waiting)}
        assert set(scheduled) <= set(by_name), "a request that has ended ran"
        decoding = [r for r in self.running if r.decoding]
        decoded = [by_name[name] for name in scheduled if by_name[name] in decoding]
        prompts = [by_name[name] for name in scheduled if by_name[name] not in decoding]
        partial = [r for r in self.running if not r.decoding]
        ready = []
        if pause == NOT_PAUSED:
            for r in self.waiting:
                if r.name in unready and r.preemptions:
                    break  # nobody starts before a preempted request whose output is under way
                if r.name not in unready:
                    ready.append(r)
        line = [r for r in (*partial, *ready) if r.name not in preempted]
        offered = [r for r in line if r in prompts or r.name in refused]

        step = Step(scheduled, known, begins, decoding, decoded, prompts, partial, ready, offered)
        self._check_allowed(step, line, preempted)
        if not preempted:
            self._check_decode(step)
            if not self.lenient and exact:
                self._check_nobody_waits_in_vain(step, line, free_blocks)
        self._record(step, preempted)
        self.stalled = self.lenient = False

    def _check_allowed(self, step: "Step", line: list[Seen], preempted: Sequence[str]) -> None:
        """What the step holds is granted, and nobody was overtaken."""
        grants, scheduled = self.grants, step.scheduled
        assert not (step.prompts and step.decoded) or grants.mixed, f"mixed: {scheduled}"
        assert len(step.offered) < 2 or grants.batched_prefill, f"two prompts: {scheduled}"
        assert all(scheduled[r.name] == 1 for r in step.decoded), f"a long decode: {scheduled}"
        assert set(step.prompts) <= set(step.offered)
        assert step.offered == line[: len(step.offered)], "somebody was overtaken"
        for r in step.prompts:
            start = step.begins[r.name] if r in step.ready else r.computed
            whole = min(step.known[r.name] - start, self.chunk)
            n = scheduled[r.name]
            if n != whole:
                last = r is step.offered[-1]
                assert grants.free_chunks and last, f"{r.name} was cut at {n}, not {whole}"
                # What a preempted request gave up of the budget comes too late for the cut.
                full = sum(scheduled.values()) == self.trace.budget
                assert full or preempted, f"{r.name} was cut with room"
                self.counts["cut"] += len(scheduled) > 1
            alone = n != 1 or len(scheduled) == 1 or grants.mixed
            assert alone, f"one token of {r.name}'s prompt beside others: {scheduled}"
        assert len(step.starters) <= max(self._slots(), 0), "too many starts"
        reserved = sum(r.reservation for r in (*self.running, *step.starters))
        assert grants.preemption or reserved <= self.trace.capacity, "nothing was left to promise"

    def _check_decode(self, step: "Step") -> None:
        expected = [r for r in step.decoding if self.can_decode(r)]
        if step.offered and not self._beside_decode(step):
            expected = []
        assert step.decoded == expected, f"decode left someone out, or changed the order: {step}"

    def _check_nobody_waits_in_vain(self, step: "Step", line: list[Seen], free: int) -> None:
        """The first prompt that is not in the step has a reason."""
        if self.stalled:
            assert not step.offered, "a prompt again, before anyone else could go on"
        elif len(step.offered) < len(line):
            following = line[len(step.offered)]
            could = self._fits_tokens(following, step) and (
                following in step.partial or self._can_start(following, step, free)
            )
            assert not could, f"{following.name} had room in {step.scheduled}"

    def _beside_decode(self, step: "Step") -> bool:
        """Whether the step's prompts must share it with decode tokens."""
        if not self.grants.mixed or not step.decoding:
            return False
        left = self.trace.budget - len(step.decoding)
        return left > 0 if self.grants.free_chunks else self._chunk(step.offered[0], step) <= left

    def _slots(self) -> int:
        return self.trace.max_running - max(len(self.running), self.starts_since_decode)

    def _chunk(self, r: Seen, step: "Step") -> int:
        """The longest that a prompt's next chunk can be: a start may have a prefix cache hit."""
        return min(step.known[r.name] - r.computed, self.chunk)

    def _fits_tokens(self, r: Seen, step: "Step") -> bool:
        if not step.offered:
            return True
        room = self.trace.budget - len(step.decoding) * self._beside_decode(step)
        room -= sum(self._chunk(other, step) for other in step.offered)
        chunk = self._chunk(r, step)
        if not self.grants.batched_prefill or room <= 0:
            return False
        if not self.grants.mixed:
            cut = min(chunk, room)
            for other, length in (
                (step.offered[-1], self._chunk(step.offered[-1], step)),
                (r, cut),
            ):
                hit = self.grants.prefix_cache and other in step.ready
                if length == 1 or (hit and step.known[other.name] % BLOCK_SIZE == 1):
                    return False
        return chunk <= room or self.grants.free_chunks

    def _can_start(self, r: Seen, step: "Step", free: int) -> bool:
        starting = [other for other in (*step.offered, r) if other in step.ready]
        if self._slots() < len(starting):
            return False
        if self.grants.preemption:
            return sum(self.blocks(step.known[other.name]) for other in starting) <= free
        held = sum(other.reservation for other in (*self.running, *starting))
        return held <= self.trace.capacity

    def stall(self) -> None:
        """The engine ran nothing of the prompts that it was offered: it must decode next."""
        assert not self.stalled, "offered a prompt again before anyone else could go on"
        self.steps += 1
        self.stalled = True

    def idle(self, preempted: Sequence[str]) -> None:
        """The engine ran nothing, maybe because it had no room for what it was offered."""
        assert self.grants.preemption
        self.steps += 1
        self._preempt(preempted)
        self.starts_since_decode, self.lenient = 0, True

    def _record(self, step: "Step", preempted: Sequence[str]) -> None:
        self.counts["packed"] += len(step.prompts) > 1
        self.counts["mixed"] += bool(step.prompts and step.decoded)
        if not step.offered or self._beside_decode(step):
            self.starts_since_decode = 0
        elif self.running:
            self.starts_since_decode += len(step.starters)
        for r in step.starters:
            r.computed = step.begins[r.name]
            self.waiting.remove(r)
            self.running.append(r)
        for r in (*step.prompts, *step.decoded):
            r.computed += step.scheduled[r.name]
        for r in step.prompts:
            # The last known token of a request that has output is an ordinary decode token.
            r.decoding = r.computed >= max(r.arrival.prompt, step.known[r.name] - 1)
        self._preempt(preempted)

    def _preempt(self, names: Sequence[str]) -> None:
        for r in [r for r in self.running if r.name in names]:
            self.running.remove(r)
            self.waiting.append(r)
            r.computed, r.decoding = 0, False
            r.preemptions += 1
            self.counts["preempted"] += 1
        if names:
            self._sort()

    def most_steps(self) -> int:
        """No request may take longer than this many steps in all (starvation, livelock)."""
        work = sum(2 + a.prompt + a.max_tokens + a.blocked_for for a in self.trace.arrivals)
        work *= 10 if self.grants.preemption else 3
        return work + max((a.step for a in self.trace.arrivals), default=0) + 60
