"""``sample_rows``: one token per row, from its own logits, parameters, seed and position alone."""

import numpy as np
import torch

from corun.engine.runner_state import RunnerState
from corun.engine.sampling.logprobs import RowScores
from corun.engine.sampling.params import RowParams


def all_rows(state: RunnerState, logits: torch.Tensor) -> torch.Tensor:
    """All rows that the sampler sees, [R, V] where padded; logits: the active rows [n, V]."""
    if not state.sampler_padded:
        return logits
    padded = state.padded_logits
    assert padded is not None and padded.data_ptr() == logits.data_ptr(), (
        "the runner's logits are not a view of the padded ones"
    )
    return padded


def sample_rows(
    logits: torch.Tensor, params: RowParams, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    logits: [N, V] of any floating dtype, read only; computed with in fp32 or better. positions: [N]
    int64, the index in its sequence (prompt + outputs) of the token being drawn.
    Returns tokens [N] int64, and what the filters kept: the last kept logit [N] fp32 and, among
    entries equal to it, the last kept entry [N] int32.

    A greedy row takes its highest logit, the lower entry on ties. A row with NaN or +inf among its
    logits gets an arbitrary token in [0, V), the same one every time.
    """
    if logits.device.type == "cuda":
        from corun.engine.sampling.triton_race import race
    else:
        from corun.engine.sampling.cpu_race import race
    return race(logits, params, positions)


def processed_logits(
    logits: torch.Tensor, params: RowParams, cut_logit: torch.Tensor, cut_entry: torch.Tensor
) -> torch.Tensor:
    """[N, V] fp32: logits over temperature (1 for greedy rows), -inf where a filter cut.

    cut_logit, cut_entry: what ``sample_rows`` returned for the same logits.
    """
    logits = logits.to(torch.float32)
    entry = torch.arange(logits.shape[1], device=logits.device)[None, :]
    tie = (logits == cut_logit[:, None]) & (entry <= cut_entry[:, None])
    kept = (logits > cut_logit[:, None]) | tie
    temperature = torch.where(params.random(), params.temperature, 1.0)
    return (logits / temperature[:, None]).masked_fill_(~kept, float("-inf"))


def warm_up(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the GPU kernels for logits [*, V] of `dtype` and of fp32, before requests come."""
    if device.type != "cuda":
        return
    params = RowParams.build(
        rows,
        vocab,
        device,
        temperature=np.ones(rows),
        top_k=np.full(rows, vocab),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seeds=np.zeros(rows),
    )
    for kind in {dtype, torch.float32}:
        logits = torch.zeros((rows, vocab), dtype=kind, device=device)
        tokens, _, _ = sample_rows(logits, params, torch.zeros_like(params.seeds))
        RowScores(logits, tokens).top(1)
