"""Seam: attention of long decode rows, split at fixed lengths (``split_decode``).

``corun.engine.split_rows`` has the rule. FlashAttention runs as before, with one split, over all
rows but the split ones: a decode step's split rows have KV length 0 there. Then ``split_decode``
computes the split rows and overwrites only those. So no row's bits depend on the batch: which
kernel computes it follows from its own length and prompt, and each kernel keeps rows apart.

Two forms. In a step of one token for each request, and so in every whole CUDA graph, two buffers
hold each row's length for the one kernel and for the other; they are filled on the device, as
lengths may exist only there. In other steps attention is called eagerly and the host knows every
length: the split rows are gathered, computed, and put back. Where the host knows that no row is
split, nothing is launched (but in graphs, which were captured with it).

Layers that cannot be split keep one split, each by itself: ``why_not`` says why.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from corun.engine.kernels.split_config import HEAD_DIMS, SplitWorkspace
from corun.engine.runner_state import RunnerState
from corun.engine.split_rows import StepRows, split_tokens

SEAMS: tuple[tuple, ...] = (
    ("vllm.model_executor.layers.attention", "Attention"),
    (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata.seq_lens"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata.max_query_len"),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadata.block_table"),
    ("vllm.v1.worker.gpu.model_states.default", "DefaultModelState.prepare_attn", ("input_batch",)),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.req_ids"),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids"),
)

logger = init_logger("vllm.corun")

_ATTRIBUTE = "corun_split"  # of attention metadata
_NEVER = np.iinfo(np.int32).max  # no row is that long
_CACHES = ("auto", "bfloat16", "float16")


def why_not(layer: Any) -> str | None:
    """Why an attention layer cannot be split, or None."""
    from vllm.model_executor.layers.attention import Attention

    impl = layer.impl
    if type(layer) is not Attention or impl.attn_type != "decoder":
        return "it is not causal self-attention over the whole context"
    if (backend := layer.attn_backend.get_name()) != "FLASH_ATTN":
        return f"its backend is {backend}, not FLASH_ATTN"
    width = getattr(layer, "head_size_v", impl.head_size)
    reasons = (
        (impl.head_size not in HEAD_DIMS, f"its head dimension is {impl.head_size}"),
        (width != impl.head_size, f"its values have {width} dimensions, not {impl.head_size}"),
        (impl.sliding_window not in (None, (-1, -1)), "it has a sliding window"),
        (bool(impl.logits_soft_cap), "it caps its scores"),
        (impl.alibi_slopes is not None, "it has ALiBi slopes"),
        (getattr(impl, "sinks", None) is not None, "it has sinks"),
        (impl.kv_cache_dtype not in _CACHES, f"its KV cache is {impl.kv_cache_dtype}"),
    )
    return next((why for applies, why in reasons if applies), None)


class _Rows:
    """The split rows of a decode step: KV lengths of every row, in buffers that graphs keep."""

    def __init__(self, left: torch.Tensor, lengths: torch.Tensor) -> None:
        self.left, self._lengths = left, lengths

    def overwrite(self, attend: Callable, query: torch.Tensor, table: Any, out: Any) -> None:
        """Have `attend` compute the split rows of `out`, in place."""
        n = len(self._lengths)
        attend(query[:n], table, self._lengths, out[:n])


class _Tokens:
    """The split rows of a step that holds chunks, gathered `room` at a time; see SplitTokens."""

    def __init__(self, found: Sequence[torch.Tensor], room: int) -> None:
        self.left, tokens, requests, lengths = found
        self._parts = list(
            zip(tokens.long().split(room), requests.split(room), lengths.split(room), strict=True)
        )

    def overwrite(self, attend: Callable, query: torch.Tensor, table: Any, out: Any) -> None:
        """Have `attend` compute the split rows of `out`, in place."""
        for tokens, requests, lengths in self._parts:
            queries = query.index_select(0, tokens)
            found = torch.empty_like(queries, dtype=out.dtype)
            attend(queries, table.index_select(0, requests), lengths, found)
            out.index_copy_(0, tokens, found)


class SplitAttention:
    """Split decode in one worker.

    beyond: see ``Plan.split_beyond``. most: requests in a step, at most. kernel: in the place of
    ``split_decode``. one_split: layers that keep one split, counted by the reason.
    """

    def __init__(
        self, beyond: int, most: int, device: torch.device, kernel: Callable | None = None
    ) -> None:
        if kernel is None:
            from corun.engine.kernels.split_decode import split_decode

            kernel = split_decode
        self.beyond, self._most, self._device = beyond, most, device
        self._kernel: Callable = kernel
        self.one_split: dict[str, int] = {}
        self._state: RunnerState | None = None
        self._order: Callable[[], Sequence[str]] = list
        self._given: StepRows | None = None
        self._uploaded: np.ndarray | None = None
        self._limits, self._left, self._split = (
            torch.zeros(most, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._workspaces: dict[tuple[int, int], SplitWorkspace] = {}

    def hold_layers(self, model: torch.nn.Module) -> None:
        """Wrap the attention of every layer that can be split; count the others in ``one_split``.

        ValueError where none can. Called before memory is profiled, so that the first forward pass
        shows vLLM what the partial results take.
        """
        from vllm.model_executor.layers.attention import Attention

        layers = [m for m in model.modules() if isinstance(m, Attention)]
        reasons = Counter(why for layer in layers if (why := why_not(layer)))
        told = "; ".join(f"{n} of {len(layers)}: {why}" for why, n in reasons.items())
        if len(layers) == reasons.total():
            raise ValueError(
                "CoRun: split_decode is on, but no attention layer of this model can be split "
                f"({told or 'it has none'}). Leave split_decode off"
            )
        for layer in layers:
            if why_not(layer) is None:
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

    def attach(self, metadata: Any) -> None:
        """Put what the layers need into a step's FlashAttention metadata."""
        rows = self._rows()
        graph = self._state is not None and self._state.graph
        wanted = rows is None or rows.any_split(self.beyond)
        if metadata.max_query_len == 1 and (graph or wanted):
            setattr(metadata, _ATTRIBUTE, self._decode(metadata.seq_lens, rows))
        elif rows is not None and wanted:
            assert len(rows.prompts) == len(metadata.seq_lens), "requests without a row, or others"
            setattr(metadata, _ATTRIBUTE, self._gathered(rows))

    def _rows(self) -> StepRows | None:
        """The step's requests; None in vLLM's own warm-up and while it captures graphs."""
        if self._given is not None:
            return self._given
        if self._state is None or (spans := self._state.spans) is None:
            return None
        order, prompts = self._order(), self._state.prompt_lens
        return StepRows.of([prompts[name] for name in order], [spans[name] for name in order])

    def _decode(self, seq_lens: torch.Tensor, rows: StepRows | None) -> _Rows:
        n = len(seq_lens)
        limits = np.full(n, _NEVER, dtype=np.int32)
        if rows is not None:
            limits[: len(rows.prompts)] = rows.limits(self.beyond)
        if self._uploaded is None or not np.array_equal(limits, self._uploaded):
            self._limits[:n].copy_(self._to_copy(limits), non_blocking=True)
            self._uploaded = limits
        left, split = self._left[:n], self._split[:n]
        torch.mul(seq_lens, seq_lens > self._limits[:n], out=split)
        torch.sub(seq_lens, split, out=left)
        return _Rows(left, split)

    def _gathered(self, rows: StepRows) -> _Tokens:
        found = split_tokens(rows, self.beyond)
        packed = self._to_copy(np.concatenate(found)).to(self._device, non_blocking=True)
        return _Tokens(packed.split([len(part) for part in found]), self._most)

    def _to_copy(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _workspace(self, heads: int, dim: int) -> SplitWorkspace:
        if (heads, dim) not in self._workspaces:
            self._workspaces[heads, dim] = SplitWorkspace.allocate(
                self._most, heads, dim, self._device
            )
        return self._workspaces[heads, dim]

    def _hold(self, impl: Any) -> None:
        forward = impl.forward

        def split_forward(  # noqa: PLR0917 -- as vLLM's
            layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
            output: torch.Tensor, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            rows = getattr(attn_metadata, _ATTRIBUTE, None)
            workspace = self._workspace(impl.num_heads, impl.head_size)
            if rows is None:
                return forward(
                    layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
                )
            rest = copy.copy(attn_metadata)
            rest.seq_lens = rows.left
            result = forward(layer, query, key, value, kv_cache, rest, output, *args, **kwargs)
            keys, values = _caches(kv_cache, impl.head_size)

            def attend(queries: Any, table: Any, lengths: Any, out: Any) -> None:
                self._kernel(queries, keys, values, table, lengths, impl.scale, out, workspace)

            heads = (-1, impl.num_heads, impl.head_size)
            rows.overwrite(attend, query.view(heads), attn_metadata.block_table, output.view(heads))
            return result

        impl.forward = split_forward


def _caches(kv_cache: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    """Keys and values [blocks, block, heads, dim] of a layer's cache."""
    if kv_cache.dim() == 5:  # vLLM 0.25: [blocks, 2, block, heads, dim]
        return kv_cache.unbind(1)
    return kv_cache.transpose(1, 2).split(dim, dim=-1)  # 0.32: [blocks, heads, block, 2 * dim]
