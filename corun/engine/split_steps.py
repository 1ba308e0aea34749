"""Seam: which rows of each step are split (``split_decode``), and with which schedule.

``corun.engine.split_rows`` says which rows are split, ``corun.engine.split_schedule`` how
often. FlashAttention 3 computes all of them, so no row's bits depend on the batch: how it is split
follows from its own length and prompt, and the kernel keeps rows apart.

Two forms. A step of one token for each request, and so every whole CUDA graph, is one call, with as
many splits as the rule ever asks for as its bound. The schedule of that call has each split row's
own number of splits, and 1 for every other; it lies in a buffer that graphs keep. Other steps call
attention eagerly, with one split: a bound of many splits would take room for as many partial
results of every token. Their split rows are gathered, computed as a decode step of their own, and
put back; a request whose only row is split has KV length 0 in the first call.

Which layers, and how they are called: ``corun.engine.split_attention`` and, for latent attention,
``corun.engine.split_latent``. Layers that cannot be split keep one split, each by itself.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from corun.engine.runner_state import RunnerState
from corun.engine.split_calls import Chunks, Decode
from corun.engine.split_rows import StepRows, split_tokens
from corun.engine.split_schedule import MOST_SEQUENCES, SplitRule, write_splits

# vLLM's ``get_scheduler_metadata`` is one as well, but can be imported on NVIDIA GPUs only.
SEAMS: tuple[tuple, ...] = (
    ("vllm.v1.worker.gpu.model_states.default", "DefaultModelState.prepare_attn", ("input_batch",)),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.req_ids"),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids"),
)

logger = init_logger("vllm.corun")

ATTRIBUTE = "corun_split"  # of attention metadata


class SplitSteps(ABC):
    """Split decode in one worker; a class of its own for each kind of attention.

    beyond: see ``Plan.split_beyond``. most: requests in a step, at most. scheduler: in the place of
    vLLM's ``get_scheduler_metadata``. one_split: layers that keep one split, counted by the reason.
    """

    def __init__(
        self, beyond: int, most: int, device: torch.device, scheduler: Callable | None = None
    ) -> None:
        if scheduler is None:
            from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

            scheduler = get_scheduler_metadata
        assert most <= MOST_SEQUENCES, "split_switch refuses more"
        self.beyond, self._most, self._device = beyond, most, device
        self._scheduler: Callable = scheduler
        self.one_split: dict[str, int] = {}
        self._state: RunnerState | None = None
        self._order: Callable[[], Sequence[str]] = list
        self._given: StepRows | None = None
        self._uploaded: np.ndarray | None = None
        self._counts = torch.ones(most, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._schedules: dict[int, torch.Tensor] = {}
        self._shape: dict[str, int]  # of the layers that are split
        self._rule: SplitRule

    @abstractmethod
    def layers(self, model: torch.nn.Module) -> list[Any]:
        """The attention layers of a model."""

    @abstractmethod
    def why_not(self, layer: Any) -> str | None:
        """Why one of them cannot be split, or None."""

    @abstractmethod
    def shape(self, layer: Any) -> dict[str, int]:
        """Its heads, as arguments of ``get_scheduler_metadata``."""

    @abstractmethod
    def rule(self, layer: Any) -> SplitRule:
        """How its rows are split."""

    @abstractmethod
    def cache(self, metadata: Any, builder: Any) -> dict[str, Any]:
        """Its KV cache and mask, as arguments of ``get_scheduler_metadata``; see ``attach``."""

    @abstractmethod
    def hold(self, layer: Any) -> None:
        """Wrap a layer's attention; where it is called without metadata it takes ``take_room``."""

    def hold_layers(self, model: torch.nn.Module) -> None:
        """Wrap the attention of every layer that can be split; count the others in ``one_split``.

        ValueError where none can. Called before memory is profiled, so that the first forward pass
        shows vLLM what the partial results take.
        """
        layers = self.layers(model)
        why = {layer: self.why_not(layer) for layer in layers}
        able = [layer for layer in layers if why[layer] is None]
        for layer in able:
            if self.shape(layer) != self.shape(able[0]):  # a step's schedule is for one shape
                why[layer] = "its heads are not as those of the first layer that is split"
        reasons = Counter(reason for reason in why.values() if reason)
        told = "; ".join(f"{n} of {len(layers)}: {reason}" for reason, n in reasons.items())
        if not able:
            raise ValueError(
                "CoRun: split_decode is on, but no attention layer of this model can be split "
                f"({told or 'it has none'}). Leave split_decode off"
            )
        self._shape, self._rule = self.shape(able[0]), self.rule(able[0])
        for layer in able:
            if why[layer] is None:
                self.hold(layer)
        if told:
            logger.info("CoRun: attention layers that keep one KV split: %s", told)
        self.one_split = dict(reasons)

    def follow(self, runner: Any, state: RunnerState) -> None:
        """Read each step's requests from `state`, in the order of `runner` (V1 or V2)."""
        self._state = state
        if hasattr(runner, "input_batch"):
            self._order = lambda: runner.input_batch.req_ids
            return
        model_state, seen = runner.model_state, [list[str]()]
        prepare = model_state.prepare_attn

        def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            seen[0] = input_batch.req_ids
            return prepare(input_batch, *args, **kwargs)

        model_state.prepare_attn = prepare_attn
        self._order = lambda: seen[0]

    def give(self, rows: StepRows | None) -> None:
        """The requests of the steps that follow, for probes; None: the runner's again."""
        self._given = rows

    def attach(
        self, metadata: Any, builder: Any, *, decode: bool, longest: int, leading: int | None = None
    ) -> None:
        """Put what the layers need into a step's FlashAttention metadata.

        builder: vLLM's, that made it. decode: whether each request brings one token. longest: what
        FlashAttention is told as the longest query of such a step. leading: how many of the step's
        requests, from the first on, `metadata` is of; None: all.
        """
        rows = self._rows()
        if rows is not None and leading is not None:
            rows = rows.first(leading)
        if decode:
            setattr(metadata, ATTRIBUTE, self._decode(metadata, builder, longest, rows))
        elif rows is not None and rows.any_split(self.beyond):
            assert len(rows.prompts) == len(metadata.seq_lens), "requests without a row, or others"
            setattr(metadata, ATTRIBUTE, self._chunks(metadata, builder, longest, rows))

    def take_room(self) -> None:
        """Let vLLM, which profiles memory, see what FlashAttention takes for partial results."""
        width = self._shape.get("headdim_v", self._shape["headdim"])
        shape = (self._rule.most, self._most, self._shape["num_heads_q"], width + 1)
        torch.empty(shape, dtype=torch.float32, device=self._device)

    def _rows(self) -> StepRows | None:
        """The step's requests; None in vLLM's own warm-up and while it captures graphs."""
        if self._given is not None:
            return self._given
        if self._state is None or (spans := self._state.spans) is None:
            return None
        order, prompts = self._order(), self._state.prompt_lens
        return StepRows.of([prompts[name] for name in order], [spans[name] for name in order])

    def _decode(self, metadata: Any, builder: Any, longest: int, rows: StepRows | None) -> Decode:
        counts = np.ones(len(metadata.seq_lens), dtype=np.int32)
        if rows is not None:
            split = np.flatnonzero(rows.ends > rows.limits(self.beyond))
            counts[split] = self._rule.counts(rows.ends[split])
        if self._uploaded is None or not np.array_equal(counts, self._uploaded):
            self._counts[: len(counts)].copy_(self._to_copy(counts), non_blocking=True)
            self._uploaded = counts
        made = self._schedule(
            metadata, builder, longest, metadata.query_start_loc, metadata.seq_lens
        )
        write_splits(made, self._counts[: len(counts)])
        kept = self._kept(builder)
        kept[: len(made)].copy_(made)
        kept[len(made) :].zero_()  # as vLLM does: blocks of a graph may look there
        return Decode(kept[: len(made)], self._rule.most)

    def _chunks(self, metadata: Any, builder: Any, longest: int, rows: StepRows) -> Chunks:
        found = split_tokens(rows, self.beyond)
        values = (*found, self._rule.counts(found.lengths))
        packed = self._to_copy(np.concatenate(values)).to(self._device, non_blocking=True)
        left, tokens, requests, lengths, counts = packed.split([len(part) for part in values])
        parts = []
        for at in range(0, len(tokens), self._most):
            here = slice(at, at + self._most)
            split = copy.copy(metadata)
            split.num_actual_tokens = len(tokens[here])
            split.max_query_len, split.max_num_splits = longest, self._rule.most
            split.query_start_loc = self._starts[: split.num_actual_tokens + 1]
            split.seq_lens = lengths[here]
            split.scheduler_metadata = self._schedule(
                metadata, builder, longest, split.query_start_loc, split.seq_lens
            )
            write_splits(split.scheduler_metadata, counts[here])
            parts.append((tokens[here].long(), requests[here], split))
        return Chunks(left, parts)

    def _schedule(
        self, metadata: Any, builder: Any, longest: int, starts: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """FlashAttention's schedule of rows of one token, as vLLM's builder makes it."""
        return self._scheduler(
            batch_size=len(lengths),
            max_seqlen_q=longest,
            max_seqlen_k=metadata.max_seq_len,
            **self._shape,
            **self.cache(metadata, builder),
            cache_seqlens=lengths,
            cu_seqlens_q=starts,
            num_splits=self._rule.most,
        )

    def _kept(self, builder: Any) -> torch.Tensor:
        """The buffer of a builder's decode schedules, which graphs read at every replay."""
        if id(builder) not in self._schedules:
            room = 3 * (self._most + 3) + 1
            self._schedules[id(builder)] = torch.zeros(room, dtype=torch.int32, device=self._device)
        return self._schedules[id(builder)]

    def _to_copy(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
