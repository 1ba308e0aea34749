"""Drives vLLM's own scheduler through random traffic, and checks what it does."""

from held_watch import HeldWatch
from real_scheduler import PAUSES, Engine, Grammar
from scheduler_traces import PAUSED_ALL, Trace
from vllm.v1.engine import FinishReason

from corun.plan import Grants


class Traffic:
    """Drives an engine through a trace, and checks every step. chunk: see ``HeldWatch``."""

    def __init__(
        self, trace: Trace, grants: Grants, engine: Engine, chunk: int | None = None
    ) -> None:
        self.trace, self.grants, self.engine, self.now = trace, grants, engine, 0
        self.geometry = engine.scheduler.kv_geometry
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        reservations = {
            f"r{i}": self.geometry.reservation(a.prompt, a.max_tokens)
            for i, a in enumerate(trace.arrivals)
        }
        self.watch = HeldWatch(trace, grants, reservations, self.geometry.blocks, chunk)
        self.blocked: set[str] = set()
        self.ended: set[str] = set()

    def arrive(self) -> None:
        for i, a in enumerate(self.trace.arrivals):
            name = f"r{i}"
            if a.step != self.now:
                continue
            self.engine.add(name, a)
            if name in self.engine.scheduler.requests:
                self.watch.arrive(name, a)
                if a.blocked_for:
                    self.blocked.add(name)
        for name in list(self.blocked):
            a = self.engine.arrivals[name]
            if self.now >= a.step + a.blocked_for:
                self.engine.requests[name].structured_output_request.grammar = Grammar()
                self.blocked.discard(name)

    def abort(self, late: bool) -> None:
        for i, a in enumerate(self.trace.arrivals):
            if a.abort_after == self.now - a.step and a.abort_late == late:
                self.engine.abort(f"r{i}")
        self.note_ends()

    def note_ends(self) -> None:
        for name in set(self.engine.ended) - self.ended:
            self.ended.add(name)
            self.watch.end(name)

    def check_blocks(self) -> None:
        """Every request's blocks, as vLLM's pool has them, are within its own reservation."""
        managers = self.engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        for r in self.watch.running:
            held = [b for m in managers for b in m.req_to_blocks.get(r.name, ()) if not b.is_null]
            assert len(held) <= r.reservation
            assert self.engine.requests[r.name].num_preemptions == 0

    def step(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        self.arrive()
        self.abort(late=False)
        pause = self.trace.pause_at(self.now)
        if scheduler.pause_state is not PAUSES[pause]:
            scheduler.set_pause_state(PAUSES[pause])
        known = {r.request_id: r.num_tokens for r in scheduler.requests.values()}
        stale = [
            name for name in known if getattr(engine.requests[name], "num_stale_output_tokens", 0)
        ]
        free = self.pool.get_num_free_blocks()
        queues = {name: getattr(scheduler, name) for name in scheduler._queue_names}
        tokens = engine.schedule()
        if self.grants.preemption and tokens == {} and pause != PAUSED_ALL:
            self.watch.idle(engine.preempted)
        elif tokens is not None:
            self.watch.step(
                tokens,
                known=known,
                begins=engine.begins,
                unready=[*stale, *self.blocked],
                pause=pause,
                preempted=engine.preempted,
                free_blocks=free,
                exact=not self.grants.preemption,
            )
        assert engine.running() == [r.name for r in self.watch.running]
        if not self.grants.preemption:
            self.check_blocks()
        for name, queue in queues.items():
            assert getattr(scheduler, name) is queue
        waiting = [r.request_id for queue in queues.values() for r in queue]
        assert sorted(waiting) == sorted(r.name for r in self.watch.waiting)
        self.abort(late=True)
        engine.results()
        self.note_ends()
        self.now += 1

    def drain(self) -> None:
        """Play the trace; everybody who fits must end with all of its output."""
        last, most = max(a.step for a in self.trace.arrivals), self.watch.most_steps()
        scheduler = self.engine.scheduler
        while (
            self.now <= last
            or scheduler.requests
            or scheduler.has_requests()
            or self.engine.under_way
        ):
            self.step()
            assert self.now <= most, "starved, or stuck"
        for i, a in enumerate(self.trace.arrivals):
            ended = self.engine.ended[f"r{i}"]
            fits = self.geometry.never_fits_message(a.prompt, a.max_tokens) is None
            assert (ended is FinishReason.ERROR) != fits
            if fits and ended is not FinishReason.ABORT:
                limit = self.trace.length(a) - a.prompt
                assert self.engine.outputs[f"r{i}"] == min(a.stop_after, limit)
        assert not scheduler.running
        assert self.pool.get_num_free_blocks() == self.trace.capacity
