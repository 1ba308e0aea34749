"""Measures a loaded model's row classes and step properties; runs in the worker, before requests.

Time is shared out: row classes get about half; attention and the whole model the rest.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from corun.certify import lockstep
from corun.certify.certificate import Certificate, RowClaim, StepClaim
from corun.certify.compositions import Limits, lengths, trials
from corun.certify.long_compositions import OTHERS, long_claims, packed_claims
from corun.certify.planner import Engine, longest_step
from corun.certify.pool import plain_pool
from corun.certify.probe import RowProbe
from corun.certify.search import ClassSearch, find_classes
from corun.certify.split_compositions import split_claims
from corun.certify.trial import HOME, SCRATCH, Run, TrialBench
from corun.engine import worker_facts
from corun.engine.probes.operations import RowOperation, attention_layers, find
from corun.engine.probes.ranks import ranks_of
from corun.engine.probes.steps import StepRunner
from corun.rows import Rows

ROWS_SHARE, ATTENTION_SHARE, MODEL_SHARE = 0.5, 0.2, 0.3
HEAD_SHARE = 0.15  # of the rows' share
ATTENTION_TRIALS = 100  # of each kind, whatever the time; each takes about a millisecond
# Of the whole model on a CPU, which takes seconds for more: tokens in a sequence and in a step, and
# sequences. What it does to single rows was tried at more by then.
CPU_SEQUENCE, CPU_STEP, CPU_REQUESTS = 129, 512, 24


def measure(
    runner: Any, vllm_config: Any, compute_logits: Callable, domain: dict, budget_s: float
) -> Certificate:
    """The certificate of the model that `runner` holds, not yet checked end to end.

    compute_logits: the model's own. domain: what the certificate is for. budget_s: about how many
    seconds to take. Under tensor parallelism all ranks call it at once, and get the same claims.
    """
    with lockstep.among(ranks_of(get_tp_group())):
        return _measure(runner, vllm_config, compute_logits, domain, budget_s)


@torch.inference_mode()
def _measure(
    runner: Any, vllm_config: Any, compute_logits: Callable, domain: dict, budget_s: float
) -> Certificate:
    started = lockstep.now()
    scheduler = vllm_config.scheduler_config
    largest, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    rows = _row_claims(
        find(runner, vllm_config, compute_logits), largest, requests, budget_s * ROWS_SHARE
    )
    draft = Certificate(domain, tuple(rows), (), largest, 0.0)
    cache = vllm_config.cache_config
    limits = Limits(
        step_tokens=largest,
        requests=requests,
        kv_tokens=max(0, _blocks(runner) * cache.block_size // 2),
        sequence_tokens=vllm_config.model_config.max_model_len,
    )
    claims, sequence, together = _attention_claims(
        runner, vllm_config, draft, limits, budget_s * ATTENTION_SHARE
    )
    claims += _model_claims(runner, vllm_config, draft, limits, budget_s * MODEL_SHARE)
    if vllm_config.model_config.use_mla:  # not among the attention layers that run by themselves
        found, sequence, together = _long_model_claims(
            runner, vllm_config, draft, limits, budget_s * ATTENTION_SHARE
        )
        claims += found
    return Certificate(
        domain,
        tuple(rows),
        tuple(claims),
        largest,
        lockstep.now() - started,
        worker=worker_facts.this_process(),
        sequence=sequence,
        together=together,
    )


def _attention_claims(
    runner: Any, vllm_config: Any, draft: Certificate, limits: Limits, budget_s: float
) -> tuple[list[StepClaim], int, int]:
    """What holds of each attention layer's rows, and tokens of the longest sequence tried, and of
    the fullest step.
    """
    thorough = torch.device(runner.device).type == "cuda"
    sizes = _fitting(lengths(limits, thorough), runner, vllm_config)
    room = _room(runner, vllm_config)
    layers = attention_layers(runner)
    share = budget_s / (2 if runner.corun.split is None else 3)
    planned, _ = _planned(draft, limits)
    claims, sequence, together = [], limits.sequence_tokens, planned.step_tokens
    for name, layer in layers.items():
        run = _attention_run(layer, runner, vllm_config, sizes)
        bench = TrialBench(name, run, sizes, given_kv=True)
        claims += bench.work(trials(sizes, limits, thorough), share, ATTENTION_TRIALS)
        made = partial(_attention_run, layer, runner, vllm_config, places=(HOME,))
        found, longest, full = long_claims(
            f"{name}, long", made, planned, room, share, least=ATTENTION_TRIALS
        )
        claims, sequence = claims + found, min(sequence, longest)
        together = min(together, full)
        if planned.step_tokens < limits.step_tokens and limits.requests > 1:
            claims += packed_claims(f"{name}, packed", made, limits, room, 0)
        if runner.corun.split is not None:
            made = partial(_attention_run, layer, runner, vllm_config)
            split = runner.corun.split
            claims += split_claims(f"{name}, split rows", made, limits, split.beyond, share)
    return (claims, sequence, together) if layers else (claims, 0, 0)


def _model_claims(
    runner: Any, vllm_config: Any, draft: Certificate, limits: Limits, budget_s: float
) -> list[StepClaim]:
    """The whole model in steps as the plan would have them: no longer, and at its row counts."""
    thorough = torch.device(runner.device).type == "cuda"
    made, limits = _model_run(runner, vllm_config, draft, limits)
    few = limits if thorough else _fewer(limits)
    sizes = _fitting(lengths(few, thorough), runner, vllm_config)
    split = runner.corun.split
    share = budget_s if split is None else budget_s / 2
    claims = TrialBench("model", made(sizes), sizes).work(trials(sizes, few, thorough), share)
    if split is not None:
        claims += split_claims(
            "model, split rows",
            made,
            limits,
            split.beyond,
            share,
            decoded=vllm_config.model_config.use_mla,
        )
    return claims


def _fewer(limits: Limits) -> Limits:
    """`limits` with no more tokens than a CPU has the time for."""
    return replace(
        limits,
        sequence_tokens=min(limits.sequence_tokens, CPU_SEQUENCE),
        step_tokens=min(limits.step_tokens, CPU_STEP),
        requests=min(limits.requests, CPU_REQUESTS),
    )


def _long_model_claims(
    runner: Any, vllm_config: Any, draft: Certificate, limits: Limits, budget_s: float
) -> tuple[list[StepClaim], int, int]:
    """As ``long_claims`` of attention, for a model whose attention cannot be run by itself."""
    made, limits = _model_run(runner, vllm_config, draft, limits)
    made = partial(made, places=(HOME,))
    room = _room(runner, vllm_config)
    return long_claims("model, long", made, limits, room, budget_s, given_kv=False)


def _model_run(
    runner: Any, vllm_config: Any, draft: Certificate, limits: Limits
) -> tuple[Callable[..., Run], Limits]:
    """What makes a function that runs the model in steps, and the limits that a plan would set."""
    limits, allowed = _planned(draft, limits)

    def made(
        sizes: list[int],
        prompts: list[int] | None = None,
        *,
        places: tuple[int, ...] = (HOME, SCRATCH),
    ) -> Run:
        return StepRunner(runner, vllm_config, sizes, prompts, places).model(
            _token_inputs(sizes, vllm_config, runner.device), lambda n: allowed.at_least(n) or n
        )

    return made, limits


def _planned(draft: Certificate, limits: Limits) -> tuple[Limits, Rows]:
    """`limits` with the longest step that a plan would have, and that plan's row counts."""
    allowed = draft.step_rows()
    engine = Engine(limits.requests, limits.step_tokens, decode_graph=False)
    if longest := longest_step(allowed, engine):
        return replace(limits, step_tokens=longest), allowed
    return limits, Rows.span(1, limits.step_tokens)


def _room(runner: Any, vllm_config: Any) -> int:
    """Tokens of KV that the sequences of ``long_sizes`` may have together."""
    partly_filled = len(OTHERS) + 1
    return (_blocks(runner) - partly_filled) * vllm_config.cache_config.block_size


def _attention_run(
    layer: Any,
    runner: Any,
    vllm_config: Any,
    sizes: list[int],
    prompts: list[int] | None = None,
    *,
    places: tuple[int, ...] = (HOME, SCRATCH),
) -> Run:
    """A function that runs `layer` in steps over sequences of these sizes; see ``StepRunner``."""
    steps = StepRunner(runner, vllm_config, sizes, prompts, places)
    return steps.attention(layer, _attention_inputs(layer, sizes, vllm_config, runner.device))


def _row_claims(
    operations: list[RowOperation], largest: int, requests: int, budget_s: float
) -> list[RowClaim]:
    """The classes of each operation; the LM head's are of the rows that sample."""
    claims = []
    for sampled, most, share in (
        (False, largest, 1 - HEAD_SHARE),
        (True, requests, HEAD_SHARE),
    ):
        searches = [
            ClassSearch(op.name, RowProbe(op.function, op.pool()), most, sampled=sampled)
            for op in operations
            if op.sampled == sampled
        ]
        claims += find_classes(searches, most, budget_s=budget_s * share)
    return claims


def _blocks(runner: Any) -> int:
    """KV cache blocks that sequences may have: without vLLM's null block, and one to spare."""
    return int(runner.kv_cache_config.num_blocks) - 2


def _fitting(sizes: list[int], runner: Any, vllm_config: Any) -> list[int]:
    """The leading sizes whose blocks, twice each, fit."""
    blocks, block_size = _blocks(runner), vllm_config.cache_config.block_size
    chosen = []
    for size in sizes:
        blocks -= 2 * -(-size // block_size)
        if blocks < 0:
            break
        chosen.append(size)
    if not chosen:
        raise ValueError("the KV cache is too small to be certified; give it more memory")
    return chosen


def _token_inputs(sizes: list[int], vllm_config: Any, device: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    vocab = vllm_config.model_config.get_vocab_size()
    return [
        torch.randint(vocab, (size,), generator=generator, dtype=torch.int32).to(device)
        for size in sizes
    ]


def _attention_inputs(
    layer: Any, sizes: list[int], vllm_config: Any, device: Any
) -> list[tuple[torch.Tensor, ...]]:
    dtype = vllm_config.model_config.dtype
    widths = (
        layer.num_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
    )
    pools = [plain_pool(width, dtype, device, seed) for seed, width in enumerate(widths)]
    generator = torch.Generator().manual_seed(4)
    chosen = [torch.randint(len(pools[0]), (3, size), generator=generator) for size in sizes]
    return [tuple(pool[i.to(device)] for pool, i in zip(pools, c, strict=True)) for c in chosen]
