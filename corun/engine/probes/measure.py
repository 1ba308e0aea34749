"""Measures a loaded model's row classes and step properties; runs in the worker, before requests.

Time is shared out: row classes get about half, by cost; attention and the whole model the rest.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from corun.certify.certificate import Certificate, RowClaim, StepClaim
from corun.certify.compositions import Limits, lengths, trials
from corun.certify.planner import Engine, longest_step
from corun.certify.pool import plain_pool
from corun.certify.probe import RowProbe
from corun.certify.search import find_classes
from corun.certify.trial import TrialBench
from corun.engine import worker_facts
from corun.engine.probes.operations import RowOperation, attention_layers, find
from corun.engine.probes.steps import StepRunner
from corun.rows import Rows

ROWS_SHARE, ATTENTION_SHARE, MODEL_SHARE = 0.5, 0.2, 0.3
HEAD_SHARE = 0.15  # of the rows' share


@torch.inference_mode()
def measure(
    runner: Any, vllm_config: Any, compute_logits: Callable, domain: dict, budget_s: float
) -> Certificate:
    """The certificate of the model that `runner` holds, not yet checked end to end.

    compute_logits: the model's own. domain: what the certificate is for. budget_s: about how many
    seconds to take.
    """
    started = time.perf_counter()
    scheduler = vllm_config.scheduler_config
    largest, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    rows = _row_claims(
        find(runner, vllm_config, compute_logits), largest, requests, budget_s * ROWS_SHARE
    )
    draft = Certificate(domain, tuple(rows), (), largest, 0.0)
    cache = vllm_config.cache_config
    blocks = runner.kv_cache_config.num_blocks - 2
    limits = Limits(
        step_tokens=largest,
        requests=requests,
        kv_tokens=max(0, blocks * cache.block_size // 2),
        sequence_tokens=vllm_config.model_config.max_model_len,
    )
    thorough = torch.device(runner.device).type == "cuda"
    sizes = _fitting(lengths(limits, thorough), blocks, cache.block_size)
    steps = StepRunner(runner, vllm_config, sizes)
    claims = []
    for name, layer in attention_layers(runner).items():
        run = steps.attention(layer, _attention_inputs(layer, sizes, vllm_config, runner.device))
        bench = TrialBench(name, run, sizes)
        claims += bench.work(trials(sizes, limits, thorough), budget_s * ATTENTION_SHARE)
    claims += _model_claims(runner, vllm_config, draft, limits, budget_s * MODEL_SHARE)
    return Certificate(
        domain,
        tuple(rows),
        tuple(claims),
        largest,
        time.perf_counter() - started,
        worker=worker_facts.this_process(),
    )


def _model_claims(
    runner: Any, vllm_config: Any, draft: Certificate, limits: Limits, budget_s: float
) -> list[StepClaim]:
    """The whole model in steps as the plan would have them: no longer, and at its row counts."""
    thorough = torch.device(runner.device).type == "cuda"
    allowed = draft.step_rows()
    engine = Engine(limits.requests, limits.step_tokens, decode_graph=False)
    if longest := longest_step(allowed, engine):
        limits = replace(limits, step_tokens=longest)
    else:
        allowed = Rows.span(1, limits.step_tokens)
    blocks, block_size = runner.kv_cache_config.num_blocks - 2, vllm_config.cache_config.block_size
    sizes = _fitting(lengths(limits, thorough), blocks, block_size)
    run = StepRunner(runner, vllm_config, sizes).model(
        _token_inputs(sizes, vllm_config, runner.device), lambda n: allowed.at_least(n) or n
    )
    bench = TrialBench("model", run, sizes)
    return bench.work(trials(sizes, limits, thorough), budget_s)


def _row_claims(
    operations: list[RowOperation], largest: int, requests: int, budget_s: float
) -> list[RowClaim]:
    total = sum(op.cost for op in operations if not op.sampled)
    claims = []
    for op in operations:
        share = HEAD_SHARE if op.sampled else (1 - HEAD_SHARE) * op.cost / total
        claims.append(
            find_classes(
                op.name,
                RowProbe(op.function, op.pool()),
                requests if op.sampled else largest,
                budget_s=budget_s * share,
                sampled=op.sampled,
            )
        )
    return claims


def _fitting(sizes: list[int], blocks: int, block_size: int) -> list[int]:
    """The leading sizes whose blocks, twice each, fit."""
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
