"""``corun verify`` as a function: opens engines, plays the suites, compares, and reports."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from corun.config import CoRunConfig
from corun.contract import fingerprint
from corun.verify.compare import compare
from corun.verify.drive import play, sampling_params
from corun.verify.engine import (
    check_names,
    close_engine,
    defaults,
    limits_of,
    open_engine,
    tokenizer_of,
    worker_reports,
)
from corun.verify.machine import device, versions
from corun.verify.progress import Bar
from corun.verify.prompts import PromptSource, RandomPrompts, TextPrompts, words_of
from corun.verify.record import Record
from corun.verify.report import REUSE, EngineAudit, VerifyReport
from corun.verify.scenario import Scenario, alone
from corun.verify.short_suite import short_suite
from corun.verify.workload import PAPER_PROMPTS, Limits, Suite, adversarial_suite, paper_suite

SUITES = ("paper", "adversarial", "all")
SHORT = "short"  # what 'corun certify' plays on a CPU
DEFAULT_RESTARTS, DEFAULT_MAX_TOKENS = 2, 48
QUICK_PROMPTS, QUICK_MAX_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify.

    model: a model's name or directory. config: the policy (``strict`` is ignored: a verification
    counts every step outside the plan). suite: one of SUITES, or SHORT. max_tokens: output tokens
    of a request (default 48; quick 16; SHORT has its own). rows: max_num_seqs (default 32 on a CPU,
    256 on a GPU). restarts: full restarts of the engine (default 2, quick 1; none for the paper's
    suite, which has none). seed: of the adversarial workload. quick: fewer and shorter requests.
    engine_args: further keywords of vLLM's LLM. restart_args: others for engines after the first.
    """

    model: str
    config: CoRunConfig
    suite: str = "all"
    max_tokens: int | None = None
    rows: int | None = None
    restarts: int | None = None
    seed: int = 0
    quick: bool = False
    random_weights: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    restart_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.suite not in (*SUITES, SHORT):
            raise ValueError(f"no suite {self.suite!r}; there are {', '.join(SUITES)}")
        if self.restart_args and self.engines == 1:
            raise ValueError("settings for restarts, but no restart; raise --restarts")
        for name, least in (("max_tokens", 1), ("rows", 1), ("restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name.replace('_', ' ')} must be at least {least}, not {value}")

    @property
    def tokens(self) -> int:
        """Output tokens of a request."""
        return self.max_tokens or (QUICK_MAX_TOKENS if self.quick else DEFAULT_MAX_TOKENS)

    @property
    def engines(self) -> int:
        """Engines to start: one, and one for each restart."""
        if self.restarts is not None:
            return 1 + self.restarts
        if self.suite == "paper":
            return 1
        return 2 if self.quick else 1 + DEFAULT_RESTARTS


def verify(options: VerifyOptions, progress: bool = True) -> VerifyReport:
    """Run the verification. Never raises for what an engine does: the report says it.

    ValueError names an engine argument that vLLM does not have.
    """
    check_names({**options.engine_args, **options.restart_args})
    run = _Verification(options, progress)
    started = time.monotonic()
    try:
        run.all_engines()
    except Exception as error:
        run.report.error = f"{type(error).__name__}: {error}"
    run.report.seconds = time.monotonic() - started
    return run.report


def verify_open(llm: Any, options: VerifyOptions) -> VerifyReport:
    """Verify an engine that is open already, with no restart and no progress bar."""
    run = _Verification(replace(options, restarts=0), progress=False)
    started = time.monotonic()
    try:
        run.one_engine(llm, 1)
    except Exception as error:
        run.report.error = f"{type(error).__name__}: {error}"
    run.report.seconds = time.monotonic() - started
    return run.report


class _Verification:
    def __init__(self, options: VerifyOptions, progress: bool) -> None:
        self.options, self.progress = options, progress
        self.config = replace(options.config, strict=False)
        self.report = VerifyReport(options.model, options.config.policy, options.config.policy)
        self.references: dict[str, dict[str, Record]] = {}
        self.suites: tuple[Suite, ...] = ()

    def all_engines(self) -> None:
        """The first engine makes the references; every engine is compared with them."""
        options = self.options
        args = {**defaults(self.config, options.rows), **options.engine_args}
        self.report.versions, self.report.device = versions(), device()
        self.report.settings = {
            "suite": options.suite,
            "max_tokens": options.tokens,
            "engines": options.engines,
            "seed": options.seed,
            "quick": options.quick,
            "random_weights": options.random_weights,
            "engine_args": {name: _plain(value) for name, value in args.items()},
            "restart_args": {name: _plain(v) for name, v in options.restart_args.items()},
        }
        for number in range(1, options.engines + 1):
            if number == 2:
                args |= options.restart_args
            llm = open_engine(
                options.model, self.config, random_weights=options.random_weights, **args
            )
            try:
                if number > 1:
                    self._check_domain(llm)
                self.one_engine(llm, number)
            finally:
                close_engine(llm)
                del llm

    def _check_domain(self, llm: Any) -> None:
        """ValueError where the settings of restarts, if any, make another domain."""
        given = self.options.restart_args
        if not given or not self.config.enabled:
            return
        domain = fingerprint(worker_reports(llm, self.config.policy)[0]["domain"])
        if domain != self.report.domain:
            settings = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(
                f"with {settings} an engine is of another domain ({domain}) than without "
                f"({self.report.domain}), so their outputs are not comparable under the policy "
                f"{self.report.policy!r}; leave out settings that its domain names"
            )

    def one_engine(self, llm: Any, number: int) -> None:
        """Play every scenario of engine `number` on `llm`; the first also runs all alone."""
        if number == 1:
            self._prepare(llm)
            for suite in self.suites:
                self._run_alone(llm, suite)
        plans = [(s, s.scenarios if number == 1 else s.restarts[number - 2]) for s in self.suites]
        count = sum(len(scene.requests) for _, scenes in plans for scene in scenes)
        with Bar(f"engine {number} of {self.options.engines}", count, self.progress) as bar:
            for suite, scenes in plans:
                for scene in scenes:
                    self._run_scenario(llm, suite, scene, number, bar.advance)
        if self.config.enabled:
            self._audit(llm, number)

    def _prepare(self, llm: Any) -> None:
        tokenizer, limits = tokenizer_of(llm), limits_of(llm)
        self.report.limits = limits
        self.report.settings["limits"] = asdict(limits)
        self.report.words = partial(words_of, tokenizer)
        vocabulary = llm.model_config.get_vocab_size()
        source: PromptSource
        if tokenizer is None:
            source = RandomPrompts(vocabulary, self.options.seed)
        else:
            source = TextPrompts(tokenizer, vocabulary, self.options.seed)
        self.suites = tuple(self._suites(source, limits))
        for suite in self.suites:
            self.report.left_out += [f"{suite.name}: {text}" for text in suite.left_out]

    def _suites(self, source: PromptSource, limits: Limits) -> Iterable[Suite]:
        options = self.options
        restarts = options.engines - 1
        if options.suite == SHORT:
            yield short_suite(source, limits)
        if options.suite in ("paper", "all"):
            yield paper_suite(
                source,
                limits,
                max_tokens=options.tokens,
                prompts=QUICK_PROMPTS if options.quick else PAPER_PROMPTS,
                restarts=restarts,
            )
        if options.suite in ("adversarial", "all"):
            yield adversarial_suite(
                source,
                limits,
                max_tokens=options.tokens,
                seed=options.seed,
                restarts=restarts,
                quick=options.quick,
            )

    def _run_alone(self, llm: Any, suite: Suite) -> None:
        references = self.references[suite.name] = {}
        with Bar(f"{suite.name}, alone", len(suite.targets), self.progress) as bar:
            for target in suite.targets:
                played = play(llm.llm_engine, alone(target), sampling_params)
                references |= played.records
                for name, refusal in played.refused.items():
                    self.report.left_out.append(f"{suite.name}: {name} was refused: {refusal}")
                bar.advance(target.name)
        self.report.alone += len(references)

    def _run_scenario(
        self, llm: Any, suite: Suite, scene: Scenario, engine: int, done: Callable[[str], None]
    ) -> None:
        played = play(llm.llm_engine, scene, sampling_params, done)
        result = self.report.result(suite.name, scene.name, engine)
        references = self.references[suite.name]
        for name in scene.targets:
            if (reference := references.get(name)) is None:
                continue  # refused alone, and reported as such
            observed = played.records.get(name)
            if observed is None:  # refused, but only beside others
                self.report.failures.append(
                    f"{scene.name}: {name} ran alone but was refused beside others: "
                    f"{played.refused.get(name)}"
                )
                observed = replace(reference, prompt_logprobs=None, samples=())
            result.comparison += compare(reference, observed)
            result.longest = max(result.longest, observed.total_tokens)
        result.plays += 1
        result.steps += played.steps
        result.most_rows = max(result.most_rows, played.most_rows)
        result.least_rows = min(result.least_rows or played.least_rows, played.least_rows)
        result.aborted += played.aborted

    def _audit(self, llm: Any, number: int) -> None:
        reports = worker_reports(llm, self.config.policy)
        violations = tuple(text for report in reports for text in report["violations"])
        audit = EngineAudit(
            number,
            dict(reports[0]["steps"]),
            violations,
            fingerprint(reports[0]["domain"]),
            {name: reports[0].get(name, 0) for name in REUSE},
        )
        self.report.policy = reports[0]["plan"]["policy"]
        self.report.audits.append(audit)
        if not sum(audit.steps.values()):
            self.report.failures.append(f"engine {number}: CoRun's audit saw no step at all")
        if audit.domain != self.report.domain:
            self.report.failures.append(
                f"engine {number} is of another domain ({audit.domain}) than the first "
                f"({self.report.domain}): their outputs are not comparable"
            )


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None | list | dict) else str(value)
