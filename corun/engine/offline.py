"""Seam: vLLM's offline engine, driven step by step so that each answer is saved when it is ready.

``vllm.LLM.enqueue`` and ``enqueue_chat`` take the requests in; ``LLM.llm_engine.step`` hands out
finished ones. Engine flags are read by vLLM's own parser, so every one of them works.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from corun.config import CoRunConfig, resolve
from corun.contract import fingerprint
from corun.engine.plugins import ensure_plugin
from corun.jobs.lines import Job
from corun.plugin import register

SEAMS = (
    ("vllm", "LLM.from_engine_args", ("engine_args",)),
    ("vllm", "LLM.enqueue", ("prompts", "sampling_params", "use_tqdm")),
    (
        "vllm",
        "LLM.enqueue_chat",
        ("messages", "sampling_params", "use_tqdm", "chat_template_kwargs"),
    ),
    ("vllm.v1.engine.llm_engine", "LLMEngine.step"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.has_unfinished_requests"),
    ("vllm.engine.arg_utils", "EngineArgs.add_cli_args", ("parser",)),
    ("vllm.engine.arg_utils", "EngineArgs.from_cli_args", ("args",)),
    ("vllm.utils.argparse_utils", "FlexibleArgumentParser.error"),
    ("vllm.exceptions", "VLLMValidationError"),
)


def engine_arguments(model: str, flags: Sequence[str], settings: Mapping[str, Any]) -> Any:
    """vLLM's ``EngineArgs`` for `model` and engine `flags`, with CoRun's config inside.

    settings: CoRun settings given on the command line, see ``with_settings``. ValueError: a flag
    that vLLM does not know or cannot read, or two different CoRun settings.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:  # vLLM's would print a screen of usage first
            raise ValueError(f"vLLM's engine flags: {message}")

    # No abbreviations: a typo must not become another flag.
    parser = EngineArgs.add_cli_args(Parser(prog="corun", add_help=False, allow_abbrev=False))
    # parse_args takes a first word without dashes for a subcommand; --model is never that.
    parsed = parser.parse_args(["--model", model, *flags])
    if parsed.model != model:
        raise ValueError(f"two models: {model} and {parsed.model}")
    args = EngineArgs.from_cli_args(parsed)
    args.additional_config = with_settings(args.additional_config, settings)
    args.disable_log_stats = True
    return args


def with_settings(
    additional: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """``additional_config`` with CoRun's whole config in it.

    settings: what the command line gave, in CoRunConfig's names. What it leaves open comes from
    `additional` where that has CoRun settings, else from the environment, else from the defaults.
    ValueError: `additional` and `settings` disagree.
    """
    result = dict(additional or {})
    base = result.get("corun")
    if base is None:
        base = (CoRunConfig.from_env() or CoRunConfig()).to_mapping()
    else:
        base = CoRunConfig.from_mapping(base).to_mapping()
        for name in set(settings) & set(result["corun"]):
            if settings[name] != base[name]:
                raise ValueError(
                    f"--additional-config sets CoRun's {name!r} to {base[name]!r}, the command "
                    f"line to {settings[name]!r}; keep one of the two"
                )
    result["corun"] = CoRunConfig.from_mapping({**base, **settings}).to_mapping()
    return result


def non_default(args: Any) -> dict[str, str]:
    """The engine arguments that differ from vLLM's defaults, for naming what a job ran with."""
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    plain = EngineArgs(model=args.model)
    names = (f.name for f in fields(EngineArgs) if f.name != "additional_config")
    values = ((n, repr(getattr(args, n)), repr(getattr(plain, n))) for n in names)
    return {name: given for name, given, default in values if given != default}


@contextmanager
def _request_errors() -> Iterator[None]:
    """Turn what vLLM raises about one request into a ValueError of one line."""
    from vllm import exceptions

    # 0.32 has a family of its own, in 0.25 they are ValueErrors.
    family = getattr(exceptions, "VLLMClientError", exceptions.VLLMValidationError)
    try:
        yield
    except (family, TypeError, ValueError) as e:
        raise ValueError(" ".join(str(e).split())) from e


def sampling_params(params: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams``. ValueError: a value out of range."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(params)
    with _request_errors():
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        return SamplingParams(**given)


class OfflineEngine:
    """A running engine, started at once. args: from ``engine_arguments``."""

    def __init__(self, args: Any) -> None:
        from vllm import LLM

        self._enabled = resolve(args.additional_config).enabled
        if self._enabled:
            ensure_plugin(os.environ)
            register()
        self._llm = LLM.from_engine_args(args)
        self._jobs: dict[str, Job] = {}

    def report(self) -> dict[str, Any] | None:
        """Worker 0's report (see ``corun_report``), or None while CoRun is off."""
        return self._llm.collective_rpc("corun_report")[0] if self._enabled else None

    def domain(self) -> str | None:
        """The domain's fingerprint, or None while CoRun is off."""
        report = self.report()
        return fingerprint(report["domain"]) if report else None

    def submit(self, job: Job, params: Mapping[str, Any]) -> None:
        """Queue one job. ValueError: this model cannot take it (too long, no template, ...)."""
        sampling = [sampling_params(params)]
        with _request_errors():
            if job.kind == "messages":
                ids = self._llm.enqueue_chat(
                    [job.prompt],
                    sampling,
                    use_tqdm=False,
                    chat_template_kwargs=job.chat_template_kwargs or None,
                )
            else:
                ids = self._llm.enqueue([{job.kind: job.prompt}], sampling, use_tqdm=False)
        # vLLM adds a random part to its number; outputs carry the number alone.
        self._jobs[ids[0].split("-")[0]] = job

    def finished(self) -> Iterator[list[tuple[Job, Any]]]:
        """Run to the end; yields, after each step that finished some, jobs and their outputs."""
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            done = [o for o in engine.step() if o.finished]
            if done:
                yield [(self._jobs.pop(o.request_id), o) for o in done]
