"""vLLM's own FLASH_ATTN_MLA over a FlashAttention 3 that marks rows, as in ``fake_flash``."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_flash import BLOCK, SPLITS, FlashAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils

from corun.engine.probes.steps import StepRunner

HEADS, LATENT, ROPE = 3, 512, 64
SHORT = 6  # tokens in a piece that vLLM takes with the decode rows, at most
ROOM = 1 + 4 * 16  # of vLLM's own schedule
MODULE = "vllm.v1.attention.backends.mla.flashattn_mla"


def scheduler(*, headdim_v, num_heads_q, num_heads_kv, headdim, **given):
    """In the place of ``get_scheduler_metadata``; the first value is the longest query."""
    assert (num_heads_q, num_heads_kv, headdim, headdim_v) == (HEADS, 1, ROPE, LATENT)
    assert (given["qkv_dtype"], given["page_size"], given["causal"]) == (
        torch.bfloat16,
        BLOCK,
        True,
    )
    rows = given["batch_size"]
    assert rows == len(given["cache_seqlens"]) == len(given["cu_seqlens_q"]) - 1
    assert given["num_splits"] == SPLITS
    assert given["max_seqlen_k"] >= int(given["cache_seqlens"].max())
    schedule = torch.full((3 * ((rows + 3) // 4 * 4) + 1,), 77, dtype=torch.int32)
    schedule[0] = given["max_seqlen_q"]
    return schedule


class Kernel:
    """In the place of ``flash_attn_varlen_func``; see ``fake_flash.FlashAttention``."""

    def __init__(self):
        self.calls, self.seen = [], []

    def __call__(self, *, q, q_v, k, v, num_splits, scheduler_metadata, **given):
        assert given["fa_version"] == 3 and given["causal"] and not given["return_softmax_lse"]
        assert q.shape[1:] == (HEADS, ROPE) and q_v.shape == (len(q), HEADS, LATENT)
        assert torch.equal(q[:, :, 0], q_v[:, :, 0]), "a row's two parts are kept together"
        starts, lengths = given["cu_seqlens_q"].tolist(), given["seqused_k"].tolist()
        tables = given["block_table"][:, 0].tolist()
        assert len(lengths) == len(tables) == len(starts) - 1
        told = SimpleNamespace(
            seq_lens=lengths, scheduler_metadata=scheduler_metadata, max_num_splits=num_splits,
            max_query_len=given["max_seqlen_q"],
        )  # fmt: skip
        counts = FlashAttention.counts(told)
        self.calls.append(num_splits)
        out = torch.full_like(q_v, 0.5)
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tokens = starts[request + 1] - starts[request]
            assert count == 1 or tokens == 1
            for at in range(starts[request], starts[request + 1]):
                if count > 1:
                    assert count == length + 1
                    self.seen.append((q[at, 0, 0].item(), tables[request], length))
                seen = length - starts[request + 1] + at + 1
                out[at] = -count if count > 1 else max(0, seen)
        return out


@contextmanager
def flash_mla():
    """vLLM's module, with a kernel of ours: (module, kernel)."""
    kernel = Kernel()
    with pytest.MonkeyPatch.context() as patch:
        stub = ModuleType("vllm.vllm_flash_attn")  # where vLLM 0.25 has the two
        for place in (fa_utils, stub):
            patch.setattr(place, "flash_attn_varlen_func", kernel, raising=False)
            patch.setattr(place, "get_scheduler_metadata", scheduler, raising=False)
        patch.setitem(sys.modules, stub.__name__, stub)
        patch.delitem(sys.modules, MODULE, raising=False)
        module = importlib.import_module(MODULE)
        yield module, kernel
        del sys.modules[MODULE]


def layer_of(module, kind=MLAAttention, backend="FLASH_ATTN_MLA", **given):
    """A layer without weights, whose attention is vLLM's; given: what is otherwise."""
    layer, impl = kind.__new__(kind), object.__new__(module.FlashAttnMLAImpl)
    torch.nn.Module.__init__(layer)
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "num_heads": HEADS}
    of_impl = {"kv_cache_dtype": "auto", "need_to_return_lse_for_decode": False}
    vars(impl).update(scale=0.5, dcp_world_size=1, dcp_rank=0, **sizes, **of_impl)
    vars(impl).update({name: value for name, value in given.items() if name in of_impl})
    layer.impl = impl
    for name, value in {**sizes, **given}.items():
        setattr(layer, name, value)
    layer.qk_nope_head_dim = layer.v_head_dim = 1
    layer._chunked_prefill_workspace_size = 1
    layer.attn_backend = SimpleNamespace(get_name=lambda: backend)
    return layer


def builder_of(module, heads=HEADS):
    """vLLM's builder of metadata, without an engine."""
    builder = object.__new__(module.FlashAttnMLAMetadataBuilder)
    vars(builder).update(
        device=torch.device("cpu"), reorder_batch_threshold=SHORT, num_heads=heads,
        mla_dims=SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE), page_size=BLOCK,
        kv_cache_spec=SimpleNamespace(dtype=torch.bfloat16), q_data_type=torch.bfloat16,
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: LATENT + ROPE),
        dcp_world_size=1, dcp_local_block_size=1, dcp_virtual_block_size=1, dcp_manager=None,
        use_pcp=False, chunked_prefill_workspace=None, chunked_prefill_workspace_size=64,
        fa_aot_schedule=True, use_full_cuda_graph=True, max_cudagraph_size=16, max_num_splits=1,
        scheduler_metadata=torch.zeros(ROOM, dtype=torch.int32),
        metadata_cls=module.FlashAttnMLAMetadata,
        _prefill_backend=SimpleNamespace(
            get_name=lambda: "FLASH_ATTN", flash_attn_varlen_func=None,
            prepare_metadata=lambda metadata: None,
        ),
    )  # fmt: skip
    return builder


def common_of(asked, padded=0):
    """What the runner tells builders of requests (prompt, begin, tokens), and rows of padding."""
    sizes = torch.tensor([n for _, _, n in asked] + [0] * padded, dtype=torch.int32)
    ends = torch.tensor([b + n for _, b, n in asked] + [0] * padded, dtype=torch.int32)
    starts = torch.zeros(len(sizes) + 1, dtype=torch.int32)
    starts[1:] = sizes.cumsum(0)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        num_reqs=len(sizes),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(sizes.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=torch.arange(len(sizes), dtype=torch.int32)[:, None] + 100,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        causal=True,
        seq_lens_cpu_upper_bound=ends,
        **StepRunner._older_fields(ends, ends - sizes),
    )


def run(layer, metadata):
    """Each row's mark, of the rows that FlashAttention computes; the query of token t holds t."""
    tokens = metadata.num_decode_tokens
    marks = torch.arange(tokens, dtype=torch.float32)[:, None, None]
    # As the layer lays out the latent part: by head, then turned.
    latent = marks.expand(-1, HEADS, LATENT).transpose(0, 1).contiguous().transpose(0, 1)
    rope = marks.expand(-1, HEADS, ROPE).contiguous()
    cache = torch.zeros(1, BLOCK, LATENT + ROPE)
    out, lse = layer.impl.forward_mqa((latent, rope), cache, metadata, layer)
    assert lse is None and out.shape == (tokens, HEADS, LATENT)
    assert (out == out[:, :1, :1]).all()
    return out[:, 0, 0].tolist()
