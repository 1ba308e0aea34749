"""Seam: the LM head. In a decode step it sees R rows, whatever the number of active requests.

vLLM computes logits for the rows of active requests only (``model.compute_logits(hidden[idx])``),
so the LM head's GEMM would change shape as requests come and go (paper, Section IV-D). Padding rows
are zeros; the runner gets the view of the active rows back.
"""

from typing import Any

import torch

from corun.engine.runner_state import RunnerState

SEAMS = (
    ("vllm.model_executor.models.llama", "LlamaForCausalLM.compute_logits", ("hidden_states",)),
)


def pad_rows(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    """`hidden` [n, H] with zero rows appended up to [rows, H] (n <= rows)."""
    n = hidden.shape[0]
    assert n <= rows, f"{n} rows cannot be padded to {rows}"
    if n == rows:
        return hidden
    padded = hidden.new_zeros((rows, *hidden.shape[1:]))
    padded[:n] = hidden
    return padded


def install(model: Any, state: RunnerState) -> None:
    """Wrap ``model.compute_logits`` ([n, H] -> [n, V]) on this one model object."""
    compute_logits = model.compute_logits

    def aligned(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if not state.decode_step:
            if state.sample_rows == 0:  # prompt logprobs come later, with rows of their own
                state.sample_rows = hidden_states.shape[0]
            return compute_logits(hidden_states, *args, **kwargs)
        padded = compute_logits(pad_rows(hidden_states, state.decode_rows), *args, **kwargs)
        if state.sample_rows:  # prompt logprobs of a one-token chunk
            return None if padded is None else padded[: hidden_states.shape[0]]
        state.sample_rows = state.decode_rows
        state.padded_logits = padded
        # None on tensor-parallel ranks that do not gather logits.
        return None if padded is None else padded[: hidden_states.shape[0]]

    model.compute_logits = aligned
