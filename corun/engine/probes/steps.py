"""Seam: running a step of any composition on the loaded model, outside vLLM's scheduler.

Attention metadata is built by the engine's own builders (with CoRun's holds on them), from a block
table of the probe's own; the KV cache must hold no request. Used before requests come.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from corun.certify.compositions import Step
from corun.certify.trial import HOME, SCRATCH, Run
from corun.engine.split_rows import StepRows

SEAMS: tuple[tuple, ...] = (
    (
        "vllm.forward_context",
        "set_forward_context",
        ("attn_metadata", "vllm_config", "num_tokens", "slot_mapping"),
    ),
    (
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"),
    ),
    ("vllm.v1.worker.utils", "AttentionGroup.get_metadata_builder"),
)


class StepRunner:
    """Runs steps over sequences of given sizes.

    runner: vLLM's model runner, V1 or V2, with its KV cache in place. sizes: tokens of each
    sequence; ValueError where the cache cannot hold all of them at every one of `places`. prompts:
    how many of them are its prompt, which only split decode asks; None: all.
    """

    def __init__(
        self,
        runner: Any,
        vllm_config: Any,
        sizes: Sequence[int],
        prompts: Sequence[int] | None = None,
        places: Sequence[int] = (HOME, SCRATCH),
    ) -> None:
        self._prompts = list(sizes if prompts is None else prompts)
        self._split = runner.corun.split
        self._runner, self._config = runner, vllm_config
        self._device = runner.device
        self._sizes = list(sizes)
        self._tables: list[dict[tuple[int, int], torch.Tensor]] = []
        self._block_sizes: list[int] = []
        first = 1  # block 0 is vLLM's null block
        for groups in runner.attn_groups:
            block = groups[0].get_metadata_builder(0).kv_cache_spec.block_size
            manager = groups[0].kv_cache_spec.block_size
            tables = {}
            for place in places:
                for sequence, size in enumerate(sizes):
                    count = -(-size // manager)
                    blocks = torch.arange(first, first + count)
                    split = torch.arange(manager // block)
                    tables[sequence, place] = (
                        blocks[:, None] * (manager // block) + split
                    ).flatten()
                    first += count
            self._tables.append(tables)
            self._block_sizes.append(block)
        if first > (held := runner.kv_cache_config.num_blocks):
            raise ValueError(f"the probes need {first} KV cache blocks, but there are {held}")

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self._sizes)

    @contextmanager
    def context(self, step: Step, place: int, rows: int) -> Iterator[None]:
        """vLLM's forward context for `step`, padded to `rows` rows."""
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        if self._split is not None:
            prompts = [self._prompts[piece.sequence] for piece in step]
            self._split.give(StepRows.of(prompts, [(p.start, p.stop) for p in step]))
        for index, groups in enumerate(self._runner.attn_groups):
            common = self._common(index, step, place, rows)
            for group in groups:
                built = group.get_metadata_builder(0).build(0, common)
                for name in group.layer_names:
                    metadata[name], slots[name] = built, common.slot_mapping
        if self._split is not None:
            self._split.give(None)
        with set_forward_context(metadata, self._config, num_tokens=rows, slot_mapping=slots):
            yield

    def model(self, inputs: Sequence[torch.Tensor], rows_for: Callable[[int], int]) -> Run:
        """A function that runs the whole model; inputs: token ids [size] of each sequence."""

        def run(step: Step, place: int) -> list[torch.Tensor]:
            order = self._order(step)
            found = in_order(tuple(step[i] for i in order), place)
            return [found[order.index(i)] for i in range(len(step))]

        def in_order(step: Step, place: int) -> list[torch.Tensor]:
            tokens = sum(piece.tokens for piece in step)
            rows = rows_for(tokens)
            ids = torch.zeros(rows, dtype=inputs[0].dtype, device=self._device)
            positions = torch.zeros(rows, dtype=torch.int64, device=self._device)
            ids[:tokens] = torch.cat([inputs[p.sequence][p.start : p.stop] for p in step])
            positions[:tokens] = torch.cat(
                [torch.arange(p.start, p.stop, device=self._device) for p in step]
            )
            with self.context(step, place, rows):
                hidden = self._runner.model(
                    input_ids=ids,
                    positions=positions,
                    inputs_embeds=None,
                    intermediate_tensors=None,
                )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            return list(hidden[:tokens].split([piece.tokens for piece in step]))

        return run

    def _order(self, step: Step) -> list[int]:
        """The order of the pieces in a batch, as the runner has them.

        Latent attention (MLA) wants decode rows first. vLLM's V2 runner sorts requests by their
        tokens; V1 puts those first that decode. Other attention takes any order.
        """
        order = list(range(len(step)))
        if not self._config.model_config.use_mla:
            return order
        if type(self._runner).__module__.startswith("vllm.v1.worker.gpu."):
            return sorted(order, key=lambda i: step[i].tokens)
        return sorted(order, key=lambda i: step[i].tokens > 1 or step[i].start == 0)

    def attention(self, layer: Any, inputs: Sequence[tuple[torch.Tensor, ...]]) -> Run:
        """A function that runs one attention layer; inputs: (query, key, value) of each sequence,
        each [size, heads * head_dim].
        """

        def run(step: Step, place: int) -> list[torch.Tensor]:
            tokens = [piece.tokens for piece in step]
            query, key, value = (
                torch.cat([inputs[p.sequence][which][p.start : p.stop] for p in step])
                for which in range(3)
            )
            with self.context(step, place, sum(tokens)):
                return list(layer(query, key, value).split(tokens))

        return run

    def _common(self, index: int, step: Step, place: int, rows: int) -> Any:
        lens = torch.tensor([piece.tokens for piece in step], dtype=torch.int32)
        ends = torch.tensor([piece.stop for piece in step], dtype=torch.int32)
        starts = torch.zeros(len(step) + 1, dtype=torch.int32)
        starts[1:] = lens.cumsum(0)
        tables = [self._tables[index][piece.sequence, place] for piece in step]
        width = max(len(table) for table in tables)
        table = torch.zeros(len(step), width, dtype=torch.int32)
        slots = torch.full((rows,), -1, dtype=torch.int64)
        block, at = self._block_sizes[index], 0
        for i, (piece, blocks) in enumerate(zip(step, tables, strict=True)):
            table[i, : len(blocks)] = blocks
            where = torch.arange(piece.start, piece.stop)
            slots[at : at + piece.tokens] = blocks[where // block] * block + where % block
            at += piece.tokens
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self._device),
            num_reqs=len(step),
            num_actual_tokens=at,
            max_query_len=int(lens.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.to(self._device),
            slot_mapping=slots.to(self._device),
            causal=True,
            seq_lens_cpu_upper_bound=ends,
            **self._older_fields(ends, ends - lens),
        )

    @staticmethod
    def _older_fields(ends: torch.Tensor, computed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fields that vLLM 0.25 still reads and 0.32 no longer has."""
        names = {f.name for f in dataclasses.fields(CommonAttentionMetadata)}
        older = {"_seq_lens_cpu": ends, "_num_computed_tokens_cpu": computed}
        return {name: value for name, value in older.items() if name in names}
