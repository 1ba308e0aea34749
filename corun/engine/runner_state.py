"""RunnerState: what CoRun keeps on a worker's model runner, as ``runner.corun``."""

from dataclasses import dataclass, field

import torch


@dataclass
class RunnerState:
    """State of one model runner under CoRun.

    decode_rows: R, the rows of every decode step (``max_num_seqs``).
    seeds: the 64-bit seed of every live request, by request id.
    prompt_lens: tokens in the prompt of every live request, by request id.
    decode_step: the step being executed is a decode step (every request brings one token): the LM
        head and the sampler run at R rows.
    padded_logits: [R, V], what the LM head produced in the present decode step; the runner holds
        the view [:n] of it. None outside a decode step.
    rows, graph: rows that the model saw in the present step, and whether a graph was replayed.
    sample_rows: rows that the LM head produced for sampling in the present step; 0 before it ran.
    """

    decode_rows: int
    seeds: dict[str, int] = field(default_factory=dict)
    prompt_lens: dict[str, int] = field(default_factory=dict)
    decode_step: bool = False
    padded_logits: torch.Tensor | None = None
    rows: int = 0
    graph: bool = False
    sample_rows: int = 0
