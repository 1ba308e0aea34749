"""A short check at every start that the engine is what its certificate says: a second at most.

A library that was replaced under the same version, or a constraint that did not take, shows here
and not in somebody's results.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from corun.certify import lockstep
from corun.certify.probe import RowProbe
from corun.engine import worker_facts
from corun.engine.probes.operations import find
from corun.engine.probes.ranks import ranks_of
from corun.plan import Plan
from corun.rows import Rows

TRIED = 4
MOST = 1024  # rows; larger counts cost time


def some(rows: Rows) -> list[int]:
    """A few counts of a class: ends of its ranges and some inside, up to MOST."""
    edges = sorted({n for r in rows.ranges for n in r if n <= MOST} | {rows.ranges[0][0]})
    middle = edges[-1] // 2
    inside = [n for n in (2, 17, 64, middle) if n in rows]
    return sorted({*edges[:: max(1, len(edges) // TRIED)], *inside, edges[-1]})


@torch.inference_mode()
def run(runner: Any, vllm_config: Any, compute_logits: Callable, plan: Plan) -> int:
    """Compare every operation at a few of the plan's row counts; returns values compared.

    RuntimeError names the operation that differs, or what of this process does. Under tensor
    parallelism all ranks call it at once.
    """
    worker_facts.check(plan.worker)
    with lockstep.among(ranks_of(get_tp_group())):
        return _compare(runner, vllm_config, compute_logits, plan)


def _compare(runner: Any, vllm_config: Any, compute_logits: Callable, plan: Plan) -> int:
    values = 0
    for operation in find(runner, vllm_config, compute_logits):
        probe = RowProbe(operation.function, operation.plain())
        for tried in _tried(plan, operation.sampled):
            tally = probe.compare(probe.reference(tried[-1]), tried)
            values += tally.values
            for n, wrong in tally.wrong.items():
                if wrong:
                    raise RuntimeError(
                        f"CoRun: {operation.name} gives other bits at {n} rows than its "
                        f"certificate says ({wrong} values differ). Something changed since it was "
                        "made: run 'corun certify' again"
                    )
    return values


def _tried(plan: Plan, sampled: bool) -> list[list[int]]:
    """Row counts to try, those of one class together."""
    if plan.certified:
        return [some(plan.sample_rows if sampled else plan.step_rows)]
    # pack: rows keep their bits at any place of each shape; the shapes may be of two classes.
    return [[plan.decode_rows]] if sampled else [[plan.decode_rows], [plan.max_prefill_tokens]]
