from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from plans import certified, isolate

from corun.engine import attention
from corun.engine.runner_state import RunnerState
from corun.plan import Plan
from corun.rows import Rows


def runner(name, builder):
    backend = SimpleNamespace(get_name=lambda: name)
    group = SimpleNamespace(backend=backend, metadata_builders=[builder])
    return SimpleNamespace(attn_groups=[[group]])


def mla(build=None, heads=128, prefill="FLASH_ATTN"):
    kernel = SimpleNamespace(get_name=lambda: prefill, flash_attn_varlen_func=lambda **k: k)
    return SimpleNamespace(build=build, num_heads=heads, _prefill_backend=kernel)


def latent(decode=None, prefill=None):
    return SimpleNamespace(decode=decode, prefill=prefill)


def flash(splits, headdim=128, longest=1):
    metadata = SimpleNamespace(
        max_num_splits=splits, scheduler_metadata="schedule", max_query_len=longest
    )
    return metadata, SimpleNamespace(build=lambda *a, **k: metadata, headdim=headdim)


def test_eager_decode_has_one_split_and_no_schedule():
    metadata, builder = flash(0)
    state = RunnerState(isolate(8), decode_step=True)
    assert attention.install(runner("FLASH_ATTN", builder), state) == ["FLASH_ATTN"]
    assert builder.build(0, None).max_num_splits == 1
    assert metadata.scheduler_metadata is None


def test_prefill_keeps_its_splits():
    metadata, builder = flash(0)
    attention.install(runner("FLASH_ATTN", builder), RunnerState(isolate(8), decode_step=False))
    builder.build(0, None)
    assert (metadata.max_num_splits, metadata.scheduler_metadata) == (0, "schedule")


def test_a_graph_that_splits_is_an_error():
    _, builder = flash(32)
    attention.install(
        runner("FLASH_ATTN", builder), RunnerState(isolate(8), decode_step=True, graph=True)
    )
    with pytest.raises(RuntimeError, match="32 ways"):
        builder.build(0, None)


def test_a_graph_with_one_split_keeps_its_schedule():
    metadata, builder = flash(1)
    attention.install(
        runner("FLASH_ATTN", builder), RunnerState(isolate(8), decode_step=True, graph=True)
    )
    builder.build(0, None)
    assert metadata.scheduler_metadata == "schedule"


def test_mla_constrains_its_decode_part():
    inner = SimpleNamespace(max_num_splits=0, scheduler_metadata="schedule", max_query_len=1)
    builder = mla(lambda *a, **k: latent(inner))
    attention.install(runner("FLASH_ATTN_MLA", builder), RunnerState(isolate(8), decode_step=True))
    builder.build(0, None)
    assert (inner.max_num_splits, inner.scheduler_metadata) == (1, None)


def test_triton_takes_the_unsplit_kernel_for_every_batch():
    builder = SimpleNamespace(seq_threshold_3D=128)
    attention.install(runner("TRITON_ATTN", builder), RunnerState(8))
    assert builder.seq_threshold_3D == 0


def test_triton_mla_has_one_split(monkeypatch):
    from vllm.v1.attention.backends.mla import triton_mla

    monkeypatch.setattr(triton_mla, "_compute_num_kv_splits", triton_mla._compute_num_kv_splits)
    attention.install(runner("TRITON_MLA", mla()), RunnerState(isolate(8)))
    assert triton_mla._compute_num_kv_splits(100_000, 132) == 1


def test_cpu_needs_its_variable(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    with pytest.raises(RuntimeError, match="VLLM_CPU_ATTN_SPLIT_KV"):
        attention.install(runner("CPU_ATTN", SimpleNamespace()), RunnerState(8))
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    assert attention.install(runner("CPU_ATTN", SimpleNamespace()), RunnerState(8)) == ["CPU_ATTN"]


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match=r"FLASHINFER.*FLASH_ATTN"):
        attention.install(runner("FLASHINFER", SimpleNamespace()), RunnerState(8))


CERTIFIED = certified(Rows.span(1, 64), Rows.span(1, 8))
PACK = Plan("pack", 8, 64, False, "test")


@pytest.mark.parametrize("decode_step", [True, False])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("splits", [0, 32])
def test_certified_has_one_split_and_no_schedule_always(decode_step, graph, splits):
    metadata, builder = flash(splits)
    builder.aot_schedule = True
    state = RunnerState(CERTIFIED, decode_step=decode_step, graph=graph)
    attention.install(runner("FLASH_ATTN", builder), state)
    assert builder.aot_schedule is False
    builder.build(0, None)
    assert (metadata.max_num_splits, metadata.scheduler_metadata) == (1, None)


@pytest.mark.parametrize("decode_step", [True, False])
def test_certified_mla_has_one_split_always(decode_step):
    inner = SimpleNamespace(max_num_splits=32, scheduler_metadata="schedule", max_query_len=1)
    builder = mla(lambda *a, **k: latent(inner))
    state = RunnerState(CERTIFIED, decode_step=decode_step, graph=True)
    attention.install(runner("FLASH_ATTN_MLA", builder), state)
    builder.build(0, None)
    assert (inner.max_num_splits, inner.scheduler_metadata) == (1, None)


def test_an_mla_prefill_has_no_decode_part():
    builder = mla(lambda *a, **k: latent())
    attention.install(runner("FLASH_ATTN_MLA", builder), RunnerState(CERTIFIED))
    assert builder.build(0, None).decode is None


def test_packed_prefills_have_one_split():
    metadata, builder = flash(0)
    state = RunnerState(Plan("pack", 8, 64, False, "test"), decode_step=False)
    attention.install(runner("FLASH_ATTN", builder), state)
    builder.build(0, None)
    assert (metadata.max_num_splits, metadata.scheduler_metadata) == (1, None)


@pytest.mark.parametrize(
    ("plan", "headdim", "longest", "told"),
    [
        (CERTIFIED, 64, 1, 256),
        (CERTIFIED, 64, 10, 256),
        (CERTIFIED, 64, 300, 300),
        (PACK, 64, 1, 256),
        (isolate(8), 64, 1, 1),  # decode and prefill never meet, and a prefill is alone
        (CERTIFIED, 128, 1, 1),
    ],
)
def test_fa3_at_head_dim_64_always_takes_one_tile(monkeypatch, plan, headdim, longest, told):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 3)
    metadata, builder = flash(1, headdim, longest)
    attention.install(runner("FLASH_ATTN", builder), RunnerState(plan, decode_step=longest == 1))
    builder.build(0, None)
    assert metadata.max_query_len == told


@pytest.mark.parametrize("backend", ["FLASH_ATTN_MLA", "TRITON_MLA"])
def test_mla_prefill_has_one_split_where_prompts_meet(monkeypatch, backend):
    from vllm.v1.attention.backends.mla import triton_mla

    monkeypatch.setattr(triton_mla, "_compute_num_kv_splits", triton_mla._compute_num_kv_splits)
    for plan, told in ((CERTIFIED, 1), (PACK, 1), (isolate(8), 0)):
        builder = mla()
        attention.install(runner(backend, builder), RunnerState(plan))
        kernel = builder._prefill_backend.flash_attn_varlen_func
        assert kernel(q="q", num_splits=0) == {"q": "q", "num_splits": told}


def test_an_mla_prefill_backend_that_is_not_held_is_refused_but_alone():
    with pytest.raises(ValueError, match=r"FLASHINFER.*'certified'.*mla_prefill_backend"):
        attention.install(
            runner("FLASH_ATTN_MLA", mla(prefill="FLASHINFER")), RunnerState(CERTIFIED)
        )
    attention.install(runner("FLASH_ATTN_MLA", mla(prefill="FLASHINFER")), RunnerState(isolate(8)))


@pytest.mark.parametrize(("heads", "told"), [(128, 1), (16, 256)])
def test_mla_decode_always_takes_one_tile(heads, told):
    inner = SimpleNamespace(max_num_splits=0, scheduler_metadata=None, max_query_len=1)
    builder = mla(lambda *a, **k: latent(inner), heads)
    attention.install(runner("FLASH_ATTN_MLA", builder), RunnerState(CERTIFIED))
    builder.build(0, None)
    assert inner.max_query_len == told


@pytest.mark.parametrize(
    ("parts", "lens", "fault"),
    [(1, [5, 9], False), (2, [90, 0], False), (2, [5, 90], True)],
)
@pytest.mark.parametrize("old", [True, False])
def test_several_contexts_in_parts_are_an_error(old, parts, lens, fault):
    if old:
        context = SimpleNamespace(seq_tot=[1] * parts, seq_lens=torch.tensor([lens] * parts))
    else:
        context = SimpleNamespace(chunks=[None] * parts, context_lens_list=lens)
    builder = mla(lambda *a, **k: latent(prefill=SimpleNamespace(chunked_context=context)))
    attention.install(runner("FLASH_ATTN_MLA", builder), RunnerState(CERTIFIED))
    if not fault:
        builder.build(0, None)
        return
    with pytest.raises(RuntimeError, match="context of 2 prompts"):
        builder.build(0, None)
