"""``corun localize`` as a function: which module's output first depends on co-runners?

A request runs alone and then among others on one eager engine in this process, with a tap on every
module. Its rows are compared bit by bit, in execution order, as long as both runs were fed the same
tokens; the first module whose output differs is the answer. If none differs but the tokens or
logprobs do, the difference arose in sampling.

Two crowds, because a difference in prefill hides those in decode: in JOINED, others with prompts of
one token arrive after the request's prefill, so that its steps differ from those alone in nothing
but the number of decode rows; in TOGETHER, all arrive at once and are prefilled together.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from corun.config import CoRunConfig
from corun.verify.compare import compare
from corun.verify.drive import play, sampling_params
from corun.verify.engine import close_engine, defaults, open_engine, tokenizer_of
from corun.verify.prompts import RandomPrompts, TextPrompts
from corun.verify.record import Record
from corun.verify.report import BROKE, CANNOT_RUN, KEPT
from corun.verify.scenario import Arrival, Request, Scenario, alone
from corun.verify.trace_diff import TraceDiff, first_difference

if TYPE_CHECKING:
    from corun.engine.tap import Tap, TappedStep

CPU_ROWS, GPU_ROWS = 8, 64
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
MODULE, SAMPLING, NOTHING = "module", "sampling", "nothing"
JOINED, TOGETHER = "joined in decode", "prefilled together"


@dataclass(frozen=True, slots=True)
class LocalizeOptions:
    """What to localize.

    model: a model's name or directory. config: the policy (default plain vLLM). rows: requests in
    the crowd, and max_num_seqs (default 8 on a CPU, 64 on a GPU). max_tokens: output tokens.
    requests: how many requests to try in each crowd until one differs. seed: of the workload.
    engine_args: further keywords of vLLM's LLM.
    """

    model: str
    config: CoRunConfig = field(default_factory=lambda: CoRunConfig(policy="off"))
    rows: int | None = None
    max_tokens: int = 24
    requests: int = 4
    seed: int = 0
    random_weights: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("max_tokens", 1), ("requests", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name.replace('_', ' ')} must be at least {least}, not {value}")
        if not self.engine_args.get("enforce_eager", True):
            raise ValueError(
                "localize taps modules, so it needs enforce_eager; remove that setting"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if self.engine_args.get(name, 1) != 1:
                raise ValueError(f"localize runs the model in one process; {name} must be 1")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one kind of crowd showed.

    crowd: JOINED or TOGETHER. outcome: MODULE, SAMPLING or NOTHING. request: the request that
    differed, or the last one tried. diff: its comparison. tried: requests tried. elements: values
    compared over all of them.
    """

    crowd: str
    outcome: str
    request: str
    diff: TraceDiff
    tried: int
    elements: int

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "crowd": self.crowd,
            "outcome": self.outcome,
            "request": self.request,
            "first": self.diff.first.to_mapping() if self.diff.first else None,
            "requests_tried": self.tried,
            "elements_compared": self.elements,
        }


@dataclass(slots=True)
class LocalizeReport:
    """What was found in each crowd. rows: requests in a crowd. error: why it could not run."""

    model: str
    policy: str
    rows: int = 0
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def exit_status(self) -> int:
        """0 nothing differs, 1 something does, 2 could not run."""
        if any(finding.outcome != NOTHING for finding in self.findings):
            return BROKE
        compared = sum(finding.elements for finding in self.findings)
        return CANNOT_RUN if self.error is not None or not compared else KEPT

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "exit_status": self.exit_status,
            "error": self.error,
            "model": self.model,
            "policy": self.policy,
            "rows": self.rows,
            "findings": [finding.to_mapping() for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }


def localize(options: LocalizeOptions) -> LocalizeReport:
    """Run it. Never raises for what an engine does: the report says it."""
    report = LocalizeReport(options.model, options.config.policy)
    started = time.monotonic()
    try:
        with _in_process():
            _run(options, report)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
    report.seconds = time.monotonic() - started
    return report


def _run(options: LocalizeOptions, report: LocalizeReport) -> None:
    from vllm.platforms import current_platform

    from corun.engine.tap import Tap

    rows = options.rows or (CPU_ROWS if current_platform.is_cpu() else GPU_ROWS)
    args = {**defaults(options.config, rows), "enforce_eager": True, **options.engine_args}
    report.rows = rows
    llm = open_engine(options.model, options.config, random_weights=options.random_weights, **args)
    tap = Tap()
    try:
        llm.collective_rpc(_attach, args=(tap,))
        for crowd in (JOINED, TOGETHER):
            report.findings.append(_search(llm, tap, options, crowd, rows))
    finally:
        tap.detach()
        close_engine(llm)


def _search(llm: Any, tap: "Tap", options: LocalizeOptions, crowd: str, rows: int) -> Finding:
    """Try targets in one kind of crowd until one differs."""
    elements = 0
    for tried in range(1, options.requests + 1):
        target, others = _requests(llm, options, crowd, rows, tried)
        by_itself, steps_alone = _tapped(llm, tap, alone(target), target)
        beside, steps_crowd = _tapped(llm, tap, _scene(crowd, target, others), target)
        agreed = len(target.prompt) + _common(by_itself, beside)
        diff = first_difference(steps_alone, steps_crowd, agreed, len(target.prompt))
        elements += diff.elements
        if diff.first is not None:
            outcome = MODULE
        elif not compare(by_itself, beside).identical:
            outcome = SAMPLING
        else:
            outcome = NOTHING
            continue
        break
    return Finding(crowd, outcome, target.name, diff, tried, elements)


def _scene(crowd: str, target: Request, others: Sequence[Request]) -> Scenario:
    if crowd == JOINED:
        events = (Arrival(0, target), *(Arrival(1, other) for other in others))
    else:  # in the middle of the batch
        half = len(others) // 2
        events = tuple(Arrival(0, r) for r in (*others[:half], target, *others[half:]))
    return Scenario(crowd, events, (target.name,))


def _tapped(
    llm: Any, tap: "Tap", scene: Scenario, target: Request
) -> tuple[Record, "list[TappedStep]"]:
    played = play(_Watched(llm.llm_engine, tap, target.name), scene, sampling_params)
    if played.refused:
        raise RuntimeError(f"the engine refused a request: {next(iter(played.refused.values()))}")
    return played.records[target.name], tap.steps


class _Watched:
    """An engine that tells the tap the worker's id of the target when it is added."""

    def __init__(self, engine: Any, tap: "Tap", target: str) -> None:
        self._engine, self._tap, self._target = engine, tap, target

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Add it, and watch it if it is the target."""
        inner = self._engine.add_request(request_id, prompt, params)
        if request_id.rpartition("/")[2] == self._target:
            self._tap.watch(inner)
        return inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _requests(
    llm: Any, options: LocalizeOptions, crowd: str, rows: int, number: int
) -> tuple[Request, tuple[Request, ...]]:
    """The target and the others of the crowd."""
    tokenizer, vocabulary = tokenizer_of(llm), llm.model_config.get_vocab_size()
    source: TextPrompts | RandomPrompts
    if tokenizer is None:
        source = RandomPrompts(vocabulary, options.seed)
    else:
        source = TextPrompts(tokenizer, vocabulary, options.seed)
    params = {
        "temperature": 0.6,
        "seed": 42,
        "max_tokens": options.max_tokens,
        "logprobs": 0,
        "ignore_eos": True,
    }
    name = f"request-{number}"
    others = [f"{name}-other-{i}" for i in range(rows - 1)]
    prompts = (source.prompt(o, 1) if crowd == JOINED else source.question(o) for o in others)
    return (
        Request(name, source.question(name), params),
        tuple(Request(o, prompt, params) for o, prompt in zip(others, prompts, strict=True)),
    )


def _common(a: Record, b: Record) -> int:
    """Output tokens that both have, from the first on."""
    ours, theirs = a.samples[0].token_ids, b.samples[0].token_ids
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    return same


def _attach(worker: Any, tap: "Tap") -> None:
    tap.attach(worker)


@contextmanager
def _in_process() -> Iterator[None]:
    """vLLM's engine core in this process, where the tap's hooks are."""
    before = os.environ.get(_IN_PROCESS)
    os.environ[_IN_PROCESS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_PROCESS]
        else:
            os.environ[_IN_PROCESS] = before


def print_findings(report: LocalizeReport) -> None:
    """Print the report for people."""
    if report.error is not None:
        print(f"could not run: {report.error}")
    if len(report.findings) > 1:
        print(f"{len(report.findings)} experiments, each with an answer of its own")
    for finding in report.findings:
        first = finding.diff.first
        print(f"{report.rows} requests, {finding.crowd}:")
        if first is not None:
            print(
                f"  first difference: {first.module} ({first.kind}) in {first.phase}, step "
                f"{first.step} of {finding.request}, token position {first.position}\n"
                f"  output alone {list(first.alone_shape)}, beside others "
                f"{list(first.crowd_shape)}\n"
                f"  {first.differing:,} of {first.elements:,} elements of its rows differ "
                f"({first.share:.3%}), by at most {first.max_abs_difference:.3g}"
            )
        elif finding.outcome == SAMPLING:
            print(
                f"  no module's output differs, but the tokens or logprobs of {finding.request} "
                f"do: the difference arises in sampling"
            )
        else:
            print("  no module's output differs, nor do tokens or logprobs")
        print(f"  compared {finding.elements:,} values bit by bit, {finding.tried} request(s)")
    print(f"policy {report.policy}, {report.seconds:.1f} s")
