"""``corun certify`` as a function: measures an engine, checks it end to end, keeps the result.

One engine is started as the ``certified`` policy would run it, with nothing forbidden, and its
worker measures. If the plan that follows forbids nothing but some row counts, the same engine is
checked; else another one is started under that plan. The check plays requests alone and in company
on the whole engine: scheduler, graphs, sampler and all.
"""

import math
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corun.certify import planner, store
from corun.certify.certificate import Certificate, EngineCheck
from corun.certify.first_module import as_checked, first_module
from corun.config import MEASURE, CoRunConfig
from corun.plan import Plan
from corun.verify.compare import Divergence
from corun.verify.report import CANNOT_RUN, KEPT

GPU_BUDGET_S, CPU_BUDGET_S = 40.0, 10.0


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """What to certify.

    model: a model's name or directory. rows, engine_args: as for ``corun verify``. budget_s: about
    how many seconds the probes may take (default 40 on a GPU, 10 on a CPU); row counts that were
    not reached are not certified. keep: whether to keep the certificate for later starts.
    split_decode: see ``CoRunConfig``; a certificate is for engines with it, or without.
    """

    model: str
    rows: int | None = None
    random_weights: bool = False
    budget_s: float | None = None
    keep: bool = True
    split_decode: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be at least 1, not {self.rows}")
        if self.budget_s is not None and not 0 < self.budget_s < math.inf:
            raise ValueError(
                f"the time budget must be a number of seconds above 0, not {self.budget_s}"
            )


@dataclass(frozen=True, slots=True)
class Certified:
    """The outcome: the certificate, what it allows this engine, its file (None: not kept), and
    how long it took without starting engines, in seconds.
    """

    certificate: Certificate
    engine: planner.Engine
    file: Path | None
    seconds: float

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "certificate": self.certificate.to_mapping(),
            "digest": self.certificate.digest,
            "policies": [
                {"policy": v.policy, "allowed": v.allowed, "reason": v.reason}
                for v in planner.verdicts(self.certificate, self.engine)
            ],
            "file": str(self.file) if self.file else None,
            "seconds": round(self.seconds, 3),
        }


def certify(options: CertifyOptions, progress: bool = True) -> Certified:
    """Measure, check, keep. ValueError or RuntimeError where the engine cannot be measured."""
    from corun.verify.engine import close_engine, open_engine
    from corun.verify.engine import defaults as engine_defaults

    config = CoRunConfig("certified", certificate=MEASURE, split_decode=options.split_decode)
    args = {**engine_defaults(config, options.rows), **options.engine_args}
    say = _Progress(progress)
    with say.doing("starting the engine"):
        llm = open_engine(options.model, config, random_weights=options.random_weights, **args)
    try:
        started = time.perf_counter()
        subject, budget = _subject(llm), options.budget_s or _budget()
        with say.doing(f"measuring (about {budget:.0f} s)"):
            given = llm.collective_rpc("corun_measure", args=(subject, budget))
        if any(other != given[0] for other in given):
            raise RuntimeError("the engine's ranks measured different things; nothing was kept")
        certificate = Certificate.from_mapping(given[0])
        engine = _engine_of(llm)
        plan = planner.plan_certified(certificate, engine)
        say.line(f"the probes allow {_words(plan)}")
        if isinstance(plan, Plan) and _as_started(plan, engine, llm):
            llm.collective_rpc("corun_adopt", args=(plan.to_mapping(),))
            with say.doing("checking the engine"):
                certificate = replace(certificate, engine=_check(llm, options))
        seconds = time.perf_counter() - started
    finally:
        close_engine(llm)
        del llm
    if isinstance(plan, Plan) and certificate.engine is None:
        certificate, more = _check_anew(certificate, options, args, say)
        seconds += more
    certificate = _blamed(certificate, options, args, say)
    file = store.save(certificate) if options.keep else None
    return Certified(certificate, engine, file, seconds)


def _as_started(plan: Plan, engine: planner.Engine, llm: Any) -> bool:
    """Whether the measured engine can run under the plan as it is, but for rows of padding."""
    graphs = llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes or ()
    same = plan.grants.free and plan.max_prefill_tokens == engine.tokens
    return same and all(size in plan.step_rows for size in graphs)


def _words(plan: Plan | str) -> str:
    if isinstance(plan, str):
        return f"no certified steps: {plan}"
    return f"{plan.summary()} ({plan.reason})"


def _check_anew(
    certificate: Certificate, options: CertifyOptions, args: dict[str, Any], say: "_Progress"
) -> tuple[Certificate, float]:
    """Check an engine that is held to the plan which `certificate` allows."""
    from corun.verify.engine import close_engine, open_engine

    with as_checked(certificate) as path:
        config = CoRunConfig("certified", certificate=path, split_decode=options.split_decode)
        with say.doing("starting an engine under the plan"):
            llm = open_engine(options.model, config, random_weights=options.random_weights, **args)
        try:
            started = time.perf_counter()
            with say.doing("checking the engine"):
                checked = replace(certificate, engine=_check(llm, options))
            return checked, time.perf_counter() - started
        finally:
            close_engine(llm)
            del llm


def _blamed(
    certificate: Certificate, options: CertifyOptions, args: dict[str, Any], say: "_Progress"
) -> Certificate:
    """`certificate` with the first module that differs added to what its check found."""
    check = certificate.engine
    if check is None or check.equal:
        return certificate
    with say.doing("the engine disagrees with the probes; looking for the module"):
        module = first_module(certificate, options.model, args, options.random_weights)
    return replace(certificate, engine=replace(check, example=f"{module}; {check.example}"))


def _check(llm: Any, options: CertifyOptions) -> EngineCheck:
    from vllm.platforms import current_platform

    from corun.verify.run import SHORT, VerifyOptions, verify_open

    config = CoRunConfig("certified", split_decode=options.split_decode)
    # On a CPU a thousand tokens take a minute; 'corun verify' plays everything.
    suite = SHORT if current_platform.is_cpu() else "all"
    report = verify_open(
        llm, VerifyOptions(options.model, config, suite=suite, quick=True, restarts=0)
    )
    found = report.comparison
    if report.exit_status == CANNOT_RUN:
        raise RuntimeError(f"the engine could not be checked: {report.error or 'nothing ran'}")
    example = None
    if report.exit_status != KEPT:
        trouble = [*report.failures, *report.violations]
        example = _told(found.first) if found.first else trouble[0]
    return EngineCheck(example is None, found.token_values, found.logprob_values, example)


def _told(first: Divergence) -> str:
    return (
        f"request {first.request}, output {first.step}, {first.kind}: {dict(first.reference)} "
        f"alone, {dict(first.observed)} in company"
    )


def _subject(llm: Any) -> dict[str, Any]:
    from corun.engine.arguments import SUBJECT_KEY

    return dict(llm.llm_engine.vllm_config.additional_config[SUBJECT_KEY])


def _engine_of(llm: Any) -> planner.Engine:
    config = llm.llm_engine.vllm_config
    scheduler = config.scheduler_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    graphs = config.compilation_config.cudagraph_mode.name != "NONE"
    longest = config.model_config.max_model_len
    return planner.Engine(scheduler.max_num_seqs, tokens, graphs, longest)


def _budget() -> float:
    from vllm.platforms import current_platform

    return CPU_BUDGET_S if current_platform.is_cpu() else GPU_BUDGET_S


class _Progress:
    """One line on stderr for each stage, with its seconds."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown

    def line(self, text: str) -> None:
        """Say `text`."""
        if self.shown:
            print(f"corun certify: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def doing(self, what: str) -> Any:
        """Say `what`, and how long it took."""
        started = time.perf_counter()
        self.line(f"{what} ...")
        yield
        self.line(f"{what}: {time.perf_counter() - started:.1f} s")
