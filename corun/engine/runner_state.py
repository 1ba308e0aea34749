"""RunnerState: what CoRun keeps on a worker's model runner, as ``runner.corun``."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from corun.plan import Plan

if TYPE_CHECKING:
    from corun.engine.split_steps import SplitSteps


@dataclass
class RunnerState:
    """State of one model runner under CoRun.

    plan: the shapes that steps may have.
    seeds: the 64-bit seed of every live request, by request id.
    prompt_lens: tokens in the prompt of every live request, by request id.
    spans: the positions that the step being executed computes of each request, (begin, end) by
        request id; None outside of steps.
    split: what splits long decode rows; None where the plan splits none.
    decode_step: every request of the step being executed brings one token.
    padded_logits: all rows that the LM head produced in the present step, where the plan has the
        sampler see them too; the runner holds the view [:n] of it. Else None.
    rows, graph: rows that the model saw in the present step, and whether a graph was replayed.
    sample_rows: rows that the LM head produced for sampling in the present step; 0 before it ran.
    """

    plan: Plan
    seeds: dict[str, int] = field(default_factory=dict)
    prompt_lens: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] | None = None
    split: "SplitSteps | None" = None
    decode_step: bool = False
    padded_logits: torch.Tensor | None = None
    rows: int = 0
    graph: bool = False
    sample_rows: int = 0

    @property
    def one_split(self) -> bool:
        """Whether attention must not split KV in this step.

        Under ``isolate`` a prefill holds one request, so its splits depend on nothing else.
        """
        return self.decode_step or self.plan.policy != "isolate"

    @property
    def sampler_padded(self) -> bool:
        """Whether the sampler sees the padded rows of this step.

        Under ``certified`` it sees the active rows: each of its rows is computed by itself.
        """
        if self.plan.certified:
            return False
        return self.decode_step or self.plan.policy == "pack"
