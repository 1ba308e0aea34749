"""A FlashAttention 3 that marks rows with what it was told, as far as split decode looks at it.

A row of one split is marked with the KV length that it saw, another with minus its number of
splits; by ``RULE``, which stands in for the real ones, that tells the length as well.
"""

import dataclasses
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.attention import Attention

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
SPLITS = 99  # the bound that every call with splits has
RULE = SimpleNamespace(most=SPLITS, counts=lambda lengths: lengths + 1)
BUILDER = SimpleNamespace(kv_cache_dtype=torch.bfloat16, block_size=BLOCK)


@dataclasses.dataclass
class Metadata:
    """What is read of FlashAttentionMetadata; as vLLM builds it under `certified`."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    causal: bool = True
    scheduler_metadata: torch.Tensor | None = None
    max_num_splits: int = 1


def scheduler(  # noqa: PLR0917 -- as vLLM's
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype, cu_seqlens_q, page_size, causal, num_splits,
):  # fmt: skip
    """In the place of ``get_scheduler_metadata``; the first value is the longest query."""
    assert batch_size == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert (num_heads_q, num_heads_kv, headdim) == (HEADS, KV_HEADS, DIM)
    assert (qkv_dtype, page_size, causal) == (torch.bfloat16, BLOCK, True)
    assert num_splits == SPLITS
    assert max_seqlen_k >= int(cache_seqlens.max())
    padded = (batch_size + 3) // 4 * 4
    schedule = torch.full((3 * padded + 1,), 77, dtype=torch.int32)
    schedule[0] = max_seqlen_q
    return schedule


class FlashAttention:
    """In the place of FlashAttentionImpl; remembers the rows that it split."""

    def __init__(self, **given):
        self.num_heads, self.num_kv_heads = HEADS, KV_HEADS
        self.head_size, self.scale = DIM, 0.5
        self.attn_type, self.kv_cache_dtype = "decoder", "auto"
        self.sliding_window, self.logits_soft_cap = (-1, -1), 0
        self.alibi_slopes = self.sinks = None
        self.vllm_flash_attn_version = 3
        vars(self).update(given)
        self.seen, self.calls = [], []

    def forward(  # noqa: PLR0917 -- as vLLM's
        self, layer, query, key, value, kv_cache, attn_metadata, output
    ):
        if attn_metadata is None:
            return output.fill_(0)
        starts = attn_metadata.query_start_loc.tolist()
        lengths, tables = attn_metadata.seq_lens.tolist(), attn_metadata.block_table[:, 0].tolist()
        assert len(lengths) == len(tables) == len(starts) - 1
        assert starts[-1] == attn_metadata.num_actual_tokens
        counts = self.counts(attn_metadata)
        self.calls.append(attn_metadata.max_num_splits)
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tokens = starts[request + 1] - starts[request]
            assert count == 1 or tokens == 1
            for i in range(tokens):
                at = starts[request] + i
                if count > 1:
                    assert count == length + 1
                    self.seen.append((query[at, 0, 0].item(), tables[request], length))
                output[at] = -count if count > 1 else max(0, length - tokens + i + 1)
        return output

    @staticmethod
    def counts(metadata):
        """Splits of each sequence, from where FlashAttention 3 reads them."""
        rows, schedule = len(metadata.seq_lens), metadata.scheduler_metadata
        if metadata.max_num_splits == 1:
            assert schedule is None
            return [1] * rows
        padded = (rows + 3) // 4 * 4
        assert metadata.max_num_splits == SPLITS
        assert len(schedule) == 3 * padded + 1
        assert schedule[0] == metadata.max_query_len
        assert schedule[1:padded].eq(77).all() and schedule[padded + rows :].eq(77).all()
        return schedule[padded : padded + rows].tolist()


def layer_of(kind=Attention, backend="FLASH_ATTN", **given):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.impl = FlashAttention(**given)
    layer.attn_backend = SimpleNamespace(get_name=lambda: backend)
    return layer
