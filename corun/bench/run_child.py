"""The process of one mode of ``corun bench run``: one engine, its runs one after the other.

Each run's file is written when the run is over, all of it or nothing. Each run is a turn: engines
that were started together never run at the same time (``corun.bench.turns``).
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.bench import machine, requests
from corun.bench.arrivals import Arrivals
from corun.bench.drive import Driven, drive
from corun.bench.mode_process import config_of, engine_args_of
from corun.bench.records import BESIDE, FORMAT
from corun.bench.requests import BenchRequest
from corun.bench.turns import Turns
from corun.bench.workload import parse_arrivals
from corun.config import CoRunConfig
from corun.contract import fingerprint
from corun.jobs.files import write_json

WARM_UP_TOKENS = 8
LATER_WARM_UP = 32  # requests


@dataclass(frozen=True, slots=True)
class Item:
    """One run. requests: a request set's file. out: the run file to write."""

    requests: str
    arrivals: str
    repeat: int
    order_seed: int
    out: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What one process runs. engine_args: keywords of vLLM's LLM, the same in every mode.

    logprobs: also return, and digest, the sampled tokens' logprobs. seeded: give every request its
    seed. seed: of the arrival times. command: the user's.
    """

    model: str
    mode: str
    rows: int
    temperature: float
    logprobs: bool
    seeded: bool
    seed: int
    random_weights: bool
    certificate: str | None
    engine_args: dict[str, Any]
    command: str
    items: list[Item]


def execute(spec: Spec, turns: Turns) -> None:
    """Start the engine and make every run of `spec`, each in its turn."""
    from corun.engine import step_watch
    from corun.verify.engine import close_engine, defaults, open_engine

    config = config_of(spec.mode, spec.certificate)
    keywords = {**defaults(config, spec.rows), **spec.engine_args, **engine_args_of(spec.mode)}
    began = time.perf_counter()
    llm = open_engine(spec.model, config, random_weights=spec.random_weights, **keywords)
    start_s = time.perf_counter() - began
    try:
        watched = step_watch.watch(llm)
        turns.ready()
        for number, item in enumerate(spec.items):
            with turns.take(number) as beside:
                _run(
                    llm,
                    watched,
                    spec,
                    item,
                    first=number == 0,
                    config=config,
                    start_s=start_s,
                    beside=beside,
                )
        turns.leave()
    finally:
        close_engine(llm)


def _run(
    llm: Any,
    watched: Any,
    spec: Spec,
    item: Item,
    *,
    first: bool,
    config: CoRunConfig,
    start_s: float,
    beside: int,
) -> None:
    """Make one run and write its file. first: the engine's first run. beside: idle engines."""
    loaded = requests.load(item.requests)
    warmed = _warm_up(llm, spec, loaded.requests, first=first)
    watched.clear()
    driven = drive(
        llm.llm_engine,
        loaded.requests,
        parse_arrivals(item.arrivals),
        lambda request: _params(request, spec),
        order_seed=item.order_seed,
        times_seed=spec.seed,
    )
    record = {
        "format": FORMAT,
        "mode": spec.mode,
        "workload": loaded.workload,
        "source": loaded.source,
        "arrivals": item.arrivals,
        "requests_digest": loaded.digest,
        "count": len(loaded.requests),
        "order_seed": item.order_seed,
        "repeat": item.repeat,
        "model": Path(spec.model).name if Path(spec.model).is_dir() else spec.model,
        "command": spec.command,
        "date": machine.today(),
        "settings": {**_settings(llm, spec), BESIDE: beside},
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        **_held(llm, config),
        "start_s": start_s,
        "warmup_s": warmed,
        "wall_s": driven.wall_s,
        "requests": [answer.to_mapping() for answer in driven.answers],
        "steps": _steps(watched, driven),
    }
    write_json(item.out, rounded(record), indent=None)
    tokens = sum(len(answer.tokens) for answer in driven.answers)
    print(
        f"{spec.mode}: {loaded.workload}, arrivals {item.arrivals}, repeat {item.repeat}: "
        f"{tokens / driven.wall_s:,.0f} output tokens/s",
        flush=True,
    )


def _params(request: BenchRequest, spec: Spec, max_tokens: int | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=spec.temperature,
        seed=request.seed if spec.seeded else None,
        max_tokens=max_tokens or request.max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if spec.logprobs else None,
        output_kind=RequestOutputKind.DELTA,
    )


def _warm_up(llm: Any, spec: Spec, given: tuple[BenchRequest, ...], *, first: bool) -> float:
    """Some of the workload's own prompts at once; the seconds it took.

    first: a full batch and whole answers, so that decode passes through every number of rows, and
    kernels that are compiled when first used are. Else a short one.
    """
    began = time.perf_counter()
    most, tokens = (spec.rows, None) if first else (LATER_WARM_UP, WARM_UP_TOKENS)
    few = [
        BenchRequest(
            f"warm-{r.id}", r.prompt_token_ids, min(tokens or r.max_tokens, r.max_tokens), r.seed
        )
        for r in given[: min(most, spec.rows)]
    ]
    drive(llm.llm_engine, few, Arrivals("all"), lambda request: _params(request, spec))
    return time.perf_counter() - began


def _settings(llm: Any, spec: Spec) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    budget = getattr(scheduler, "max_num_scheduled_tokens", None)
    return {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": spec.engine_args["max_num_batched_tokens"],
        "scheduled_tokens": budget or scheduler.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "kv_cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "weights": "random N(0, 0.02)" if spec.random_weights else "as given",
        "temperature": spec.temperature,
        "logprobs": spec.logprobs,
        "seeded": spec.seeded,
        "engine_args": spec.engine_args,
    }


def _held(llm: Any, config: CoRunConfig) -> dict[str, Any]:
    """What CoRun tells of this engine: policy, domain, and the step audit."""
    if not config.enabled:
        return {"policy": {"name": "off", "reason": "plain vLLM"}, "domain": None, "report": None}
    report = llm.collective_rpc("corun_report")[0]
    plan = report["plan"]
    kept = ("steps", "graph_steps", "mixed_steps", "preempted", "cached_tokens", "violation_count")
    return {
        "policy": {"name": plan["policy"], "reason": plan["reason"]},
        "domain": fingerprint(report["domain"]),
        "report": {name: report[name] for name in kept},
    }


def rounded(value: Any) -> Any:
    """`value`, JSON, with every number to a millionth: microseconds, where it is a time."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value


def _steps(watched: Any, driven: Driven) -> dict[str, list] | None:
    steps = [step for step in watched.steps if step.end_s is not None]
    whole = len(watched.rows_run) == len(watched.steps) == len(steps)
    return {
        "end_s": [step.end_s - driven.began for step in steps],
        "prefill_tokens": [step.prefill_tokens for step in steps],
        "decode_rows": [step.decode_rows for step in steps],
        "rows_run": list(watched.rows_run) if whole else [None] * len(steps),
        "running": [step.running for step in steps],
        "waiting": [step.waiting for step in steps],
        "kv_used": [step.kv_used for step in steps],
    }


def main(spec_file: str, seat_file: str) -> None:
    """Read a Spec and a Seat as JSON and execute them."""
    given = json.loads(Path(spec_file).read_text())
    items = [Item(**item) for item in given.pop("items")]
    execute(Spec(items=items, **given), Turns.read(seat_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
