"""Seam: attention of long decode rows, split by their own lengths (``split_decode``).

``corun.engine.split_rows`` says which rows are split, ``corun.engine.split_schedule`` how
often. FlashAttention 3 computes all of them, so no row's bits depend on the batch: how it is split
follows from its own length and prompt, and the kernel keeps rows apart.

Two forms. A step of one token for each request, and so every whole CUDA graph, is one call, with as
many splits as the rule ever asks for as its bound. The schedule of that call has each split row's
own number of splits, and 1 for every other; it lies in a buffer that graphs keep. Other steps call
attention eagerly, with one split: a bound of many splits would take room for as many partial
results of every token. Their split rows are gathered, computed as a decode step of their own, and
put back; a request whose only row is split has KV length 0 in the first call.

Layers that cannot be split keep one split, each by itself: ``why_not`` says why.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from corun.engine.runner_state import RunnerState
from corun.engine.split_calls import Chunks, Decode
from corun.engine.split_rows import StepRows, split_tokens
from corun.engine.split_schedule import MOST_SEQUENCES, RULES, SplitRule, write_splits

_METADATA = (
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "causal",
    "scheduler_metadata",
    "max_num_splits",
)
# vLLM's ``get_scheduler_metadata`` is one as well, but can be imported on NVIDIA GPUs only.
SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.attention", "Attention"),
    (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    *(
        ("vllm.v1.attention.backends.flash_attn", f"FlashAttentionMetadata.{name}")
        for name in _METADATA
    ),
    ("vllm.v1.worker.gpu.model_states.default", "DefaultModelState.prepare_attn", ("input_batch",)),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.req_ids"),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids"),
)

logger = init_logger("vllm.corun")

_ATTRIBUTE = "corun_split"  # of attention metadata
_CACHES = ("auto", "bfloat16", "float16")
_VERSION = 3  # of FlashAttention: the one whose schedule holds each sequence's splits


def why_not(layer: Any) -> str | None:
    """Why an attention layer cannot be split, or None."""
    from vllm.model_executor.layers.attention import Attention

    impl = layer.impl
    if type(layer) is not Attention or impl.attn_type != "decoder":
        return "it is not causal self-attention over the whole context"
    if (backend := layer.attn_backend.get_name()) != "FLASH_ATTN":
        return f"its backend is {backend}, not FLASH_ATTN"
    width = getattr(layer, "head_size_v", impl.head_size)
    version = impl.vllm_flash_attn_version
    reasons = (
        (version != _VERSION, f"FlashAttention {version} computes it, not {_VERSION}"),
        (impl.head_size not in RULES, f"its head dimension is {impl.head_size}"),
        (width != impl.head_size, f"its values have {width} dimensions, not {impl.head_size}"),
        (impl.sliding_window not in (None, (-1, -1)), "it has a sliding window"),
        (bool(impl.logits_soft_cap), "it caps its scores"),
        (impl.alibi_slopes is not None, "it has ALiBi slopes"),
        (getattr(impl, "sinks", None) is not None, "it has sinks"),
        (impl.kv_cache_dtype not in _CACHES, f"its KV cache is {impl.kv_cache_dtype}"),
    )
    return next((why for applies, why in reasons if applies), None)


def _heads(layer: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension of a layer."""
    return layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size


class SplitAttention:
    """Split decode in one worker.

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
        self._heads: tuple[int, int, int]  # of the layers that are split
        self._rule: SplitRule

    def hold_layers(self, model: torch.nn.Module) -> None:
        """Wrap the attention of every layer that can be split; count the others in ``one_split``.

        ValueError where none can. Called before memory is profiled, so that the first forward pass
        shows vLLM what the partial results take.
        """
        from vllm.model_executor.layers.attention import Attention

        layers = [m for m in model.modules() if isinstance(m, Attention)]
        why = {layer: why_not(layer) for layer in layers}
        able = [layer for layer in layers if why[layer] is None]
        for layer in able:
            if _heads(layer) != _heads(able[0]):  # a step's schedule is for one shape
                why[layer] = "its heads are not as those of the first layer that is split"
        reasons = Counter(reason for reason in why.values() if reason)
        told = "; ".join(f"{n} of {len(layers)}: {reason}" for reason, n in reasons.items())
        if not able:
            raise ValueError(
                "CoRun: split_decode is on, but no attention layer of this model can be split "
                f"({told or 'it has none'}). Leave split_decode off"
            )
        self._heads = _heads(able[0])
        self._rule = RULES[able[0].impl.head_size]
        for layer in able:
            if why[layer] is None:
                self._hold(layer.impl)
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

    def attach(self, metadata: Any, builder: Any, *, decode: bool, longest: int) -> None:
        """Put what the layers need into a step's FlashAttention metadata.

        builder: vLLM's, that made it. decode: whether each request brings one token. longest: what
        FlashAttention is told as the longest query of such a step.
        """
        rows = self._rows()
        if decode:
            setattr(metadata, _ATTRIBUTE, self._decode(metadata, builder, longest, rows))
        elif rows is not None and rows.any_split(self.beyond):
            assert len(rows.prompts) == len(metadata.seq_lens), "requests without a row, or others"
            setattr(metadata, _ATTRIBUTE, self._chunks(metadata, builder, longest, rows))

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
        heads, kv_heads, dim = self._heads
        return self._scheduler(
            batch_size=len(lengths),
            max_seqlen_q=longest,
            max_seqlen_k=metadata.max_seq_len,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=dim,
            cache_seqlens=lengths,
            qkv_dtype=builder.kv_cache_dtype,
            cu_seqlens_q=starts,
            page_size=builder.block_size,
            causal=metadata.causal,
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

    def _hold(self, impl: Any) -> None:
        forward = impl.forward

        def split_forward(  # noqa: PLR0917 -- as vLLM's
            layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            def call(query: Any, metadata: Any, out: Any) -> Any:
                # The layer's new keys and values are in the cache by now: nothing reads them here.
                return forward(layer, query, key, value, kv_cache, metadata, out, *args, **kwargs)

            if attn_metadata is None:
                self._take_room()
            step = getattr(attn_metadata, _ATTRIBUTE, None)
            if step is None:
                return call(query, attn_metadata, output)
            heads = (-1, impl.num_heads, impl.head_size)
            step.attend(call, query.view(heads), attn_metadata, output.view(heads))
            return output

        impl.forward = split_forward

    def _take_room(self) -> None:
        """Let vLLM, which profiles memory, see what FlashAttention takes for partial results."""
        heads, _, dim = self._heads
        shape = (self._rule.most, self._most, heads, dim + 1)
        torch.empty(shape, dtype=torch.float32, device=self._device)
