"""Seam: the LM head at the plan's row counts (paper, Section IV-D).

``compute_logits`` sees the rows of active requests only, so its GEMM's shape would follow the load.
Under ``isolate`` decode steps are padded to R rows before it; under ``certified`` every call to a
row count of the certified class. The runner gets a view of the first n rows.
"""

from collections.abc import Callable
from typing import Any

import torch

from corun.engine.runner_state import RunnerState

SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor.forward", ("hidden_states",)),
)

Logits = torch.Tensor | None  # None on tensor-parallel ranks that do not gather logits


def pad_rows(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, H] -> [rows, H], zeros below. ValueError where n > rows."""
    n = hidden.shape[0]
    if n > rows:
        raise ValueError(f"{n} rows cannot be padded to {rows}")
    if n == rows:
        return hidden
    padded = hidden.new_zeros((rows, *hidden.shape[1:]))
    padded[:n] = hidden
    return padded


def install(model: Any, state: RunnerState) -> Callable[[torch.Tensor], Logits]:
    """Wrap ``model.compute_logits`` ([n, H] -> [n, V]) on this one model; returns vLLM's own."""
    compute_logits = model.compute_logits

    def aligned(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Logits:
        plan, n = state.plan, hidden_states.shape[0]
        if state.sample_rows and plan.certified:
            # Prompt logprobs, after sampling: any number of rows, in blocks of certified shapes.
            most = plan.sample_rows.largest
            blocks = [
                compute_logits(
                    pad_rows(block, plan.sample_rows_for(len(block), decode=False)),
                    *args,
                    **kwargs,
                )
                for block in hidden_states.split(most)
            ]
            return None if blocks[0] is None else torch.cat(blocks)[:n]
        if state.sample_rows and not state.decode_step:
            return compute_logits(hidden_states, *args, **kwargs)  # one request, at its own place
        rows = plan.sample_rows_for(n, decode=state.decode_step)
        padded = compute_logits(pad_rows(hidden_states, rows), *args, **kwargs)
        if not state.sample_rows:
            state.sample_rows = rows
            state.padded_logits = padded if state.sampler_padded else None
        return None if padded is None else padded[:n]

    model.compute_logits = aligned
    return compute_logits
