"""Split decode of latent attention: how often each row is split, over vLLM's own FLASH_ATTN_MLA."""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from fake_flash import BLOCK, RULE, SPLITS
from fake_flash_mla import (
    HEADS,
    LATENT,
    ROPE,
    SHORT,
    builder_of,
    common_of,
    flash_mla,
    layer_of,
    run,
    scheduler,
)
from hypothesis import given
from hypothesis import strategies as st
from plans import certified
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from corun.certify.compositions import Limits, Piece
from corun.certify.trial import HOME
from corun.engine import attention, split_latent
from corun.engine.probes import measure, steps
from corun.engine.probes.steps import StepRunner
from corun.engine.runner_state import RunnerState
from corun.engine.split_latent import SplitLatent
from corun.engine.split_rows import StepRows, unsplit
from corun.rows import Rows

BEYOND, MOST = 8, 6
DEVICE = torch.device("cpu")
PLAN = certified(Rows.span(1, 64), Rows.span(1, MOST))


@pytest.fixture(scope="module")
def mla():
    """(vLLM's module, the kernel in the place of FlashAttention's)."""
    with flash_mla() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_latent, "LATENT_RULE", RULE)
        yield found


class Held:
    """A layer, its builder and a runner under CoRun."""

    def __init__(self, mla, heads=HEADS, plan=PLAN):
        module, self.kernel = mla
        self.kernel.calls.clear()
        self.kernel.seen.clear()
        self.layer, self.builder = layer_of(module), builder_of(module, heads)
        self.split = SplitLatent(BEYOND, MOST, DEVICE, scheduler)
        self.split.hold_layers(torch.nn.ModuleList([self.layer]))
        self.state = RunnerState(plan, split=self.split)
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN_MLA")
        group = SimpleNamespace(backend=backend, metadata_builders=[self.builder])
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]), attn_groups=[[group]])
        self.batch = runner.input_batch
        self.split.follow(runner, self.state)
        attention.install(runner, self.state)

    def build(self, asked, padded=0):
        """Metadata of a step of requests (prompt, begin, tokens), in the runner's order."""
        names = [f"r{i}" for i in range(len(asked))]
        self.state.prompt_lens = {n: a[0] for n, a in zip(names, asked, strict=True)}
        self.state.spans = {n: (b, b + k) for n, (_, b, k) in zip(names, asked, strict=True)}
        self.batch.req_ids = names
        return self.builder.build(0, common_of(asked, padded))


def expected(asked):
    """Marks of the rows that vLLM's decode part computes."""
    return [
        -(p + 2) if p >= unsplit(prompt, BEYOND) else p + 1
        for prompt, begin, n in asked
        if n <= SHORT
        for p in range(begin, begin + n)
    ]


ROW = st.tuples(st.integers(1, 14), st.integers(0, 20), st.just(1))
PIECE = st.integers(2, 14).flatmap(
    lambda p: st.integers(2, min(p, SHORT)).map(lambda n: (p, p - n, n))
)
PROMPT = st.integers(SHORT + 1, 20).map(lambda n: (n, 0, n))


@given(
    st.lists(ROW, max_size=3), st.lists(PIECE, max_size=2), st.lists(PROMPT, max_size=1),
    st.sampled_from([HEADS, 128]),
)  # fmt: skip
def test_every_row_has_the_splits_of_its_own_length(mla, rows, pieces, prompts, heads):
    asked = [*rows, *pieces, *prompts]
    if not rows + pieces:
        return
    held = Held(mla, heads)
    metadata = held.build(asked)
    assert run(held.layer, metadata) == expected(asked)
    # Where vLLM or others look, there is every length, and one split.
    part = metadata.decode
    assert part.seq_lens.tolist() == [b + n for _, b, n in rows + pieces]
    assert (part.scheduler_metadata, part.max_num_splits) == (None, 1)
    # A split row's query and block table are its own.
    split = [i for i, (p, b, _) in enumerate(rows) if b >= unsplit(p, BEYOND)]
    assert held.kernel.seen == [(i, 100 + i, rows[i][1] + 1) for i in split]
    # Room for partial results is taken for rows of one token only.
    if not pieces:
        assert held.kernel.calls == [SPLITS]
    else:
        assert held.kernel.calls == [1] + [SPLITS] * bool(split)


@given(st.lists(st.lists(ROW, min_size=1, max_size=MOST), min_size=2, max_size=5))
def test_a_graph_reads_the_same_buffer_in_every_step(mla, batches):
    """What a graph captured, run again after each later ``build``, computes that step."""
    held = Held(mla)
    captured = held.builder.build_for_cudagraph_capture(common_of([(1, 0, 1)] * MOST))
    assert run(held.layer, captured) == [1.0] * MOST
    assert held.kernel.calls == [SPLITS], "a graph's kernel is the one that splits"
    schedule = captured.decode.corun_split._schedule
    held.state.graph = True
    for asked in batches:
        padded = MOST - len(asked)
        metadata = held.build(asked, padded)
        again = metadata.decode.corun_split._schedule
        assert (again.data_ptr(), len(again)) == (schedule.data_ptr(), len(schedule))
        for name in ("seq_lens", "query_start_loc", "block_table"):  # buffers of the runner's
            getattr(captured.decode, name).copy_(getattr(metadata.decode, name))
        assert run(held.layer, captured) == expected(asked) + [0.5] * padded


def test_a_graph_may_be_captured_with_requests_of_no_token(mla):
    held = Held(mla)
    common = dataclasses.replace(common_of([(1, 4, 0)] * 3), max_query_len=0)
    metadata = held.builder.build(0, common)
    assert metadata.decode.corun_split._schedule[0] == 256  # 3 heads: always the larger tile
    assert metadata.decode.max_query_len == 256


@pytest.mark.parametrize(("heads", "longest"), [(HEADS, 256), (64, 256), (65, 1), (128, 1)])
def test_split_rows_are_told_of_the_same_longest_query_in_every_step(mla, heads, longest):
    held = Held(mla, heads)
    for asked in ([(3, 30, 1)], [(3, 30, 1), (9, 4, 5)], [(3, 30, 1), (20, 0, 20)]):
        metadata = held.build(asked)
        step = metadata.decode.corun_split
        if hasattr(step, "_parts"):
            ((_, _, split),) = step._parts
            assert split.max_query_len == split.scheduler_metadata[0] == longest
            assert metadata.decode.max_query_len == max(longest, 5)
        else:
            assert metadata.decode.max_query_len == step._schedule[0] == longest
        assert run(held.layer, metadata)[0] == -32.0
    assert held.kernel.calls == [SPLITS, 1, SPLITS, SPLITS]


def test_pieces_without_a_split_row_are_left_alone(mla):
    held = Held(mla)
    asked = [(5, 7, 1), (20, 4, 5)]
    metadata = held.build(asked)
    assert not hasattr(metadata.decode, "corun_split")
    assert run(held.layer, metadata) == expected(asked)
    assert held.kernel.calls == [1]
    assert held.build([(20, 0, 20)]).decode is None


def test_more_split_rows_than_a_step_has_requests_take_turns(mla):
    """As the probes may give them: rows of a piece past its prompt."""
    held = Held(mla)
    asked = [(1, 20, 5), (1, 30, 4)]
    held.split.give(StepRows.of([1, 1], [(20, 25), (30, 34)]))
    metadata = held.builder.build(0, common_of(asked))
    assert run(held.layer, metadata) == expected(asked)
    assert held.kernel.calls == [1, SPLITS, SPLITS]


def test_the_probes_steps_have_the_same_rows(mla, monkeypatch):
    """Pieces in any order, of sequences with prompts of their own."""
    held, seen = Held(mla), []

    @contextmanager
    def context(metadata, *_, **__):
        seen.append(metadata["layer"])
        yield

    def model(input_ids, positions, **_):
        marks = torch.full((len(input_ids),), 99.0)
        marks[: seen[-1].num_decode_tokens] = torch.tensor(run(held.layer, seen[-1]))
        return marks[:, None]

    monkeypatch.setattr(steps, "set_forward_context", context)
    held.builder.kv_cache_spec.block_size = BLOCK
    group = SimpleNamespace(
        kv_cache_spec=held.builder.kv_cache_spec,
        layer_names=["layer"],
        get_metadata_builder=lambda _: held.builder,
    )
    runner = SimpleNamespace(
        corun=held.state,
        device=DEVICE,
        attn_groups=[[group]],
        kv_cache_config=SimpleNamespace(num_blocks=100),
        model=model,
    )
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    sizes, prompts = [40, 30, 5, 20], [1, 12, 5, 20]
    step = (Piece(2, 0, 5), Piece(3, 0, 20), Piece(1, 29, 30), Piece(0, 39, 40))
    probe = StepRunner(runner, config, sizes, prompts)
    run_step = probe.model([torch.zeros(n, dtype=torch.int32) for n in sizes], lambda n: n + 1)
    found = [rows[:, 0].tolist() for rows in run_step(step, HOME)]
    assert found == [[1.0, 2.0, 3.0, 4.0, 5.0], [99.0] * 20, [-31.0], [-41.0]]
    assert run_step((Piece(0, 8, 9), Piece(1, 11, 12)), HOME)[1].item() == 12.0
    assert held.kernel.calls == [1, SPLITS, SPLITS]


def test_the_probes_try_rows_that_are_only_decoded(monkeypatch):
    asked = []
    limits = Limits(step_tokens=64, requests=4, kv_tokens=1000, sequence_tokens=64)
    bench = SimpleNamespace(work=lambda *_: [])
    monkeypatch.setattr(measure, "_model_run", lambda *_: (lambda *_: None, limits))
    monkeypatch.setattr(measure, "TrialBench", lambda *_: bench)
    monkeypatch.setattr(measure, "split_claims", lambda *_, decoded: asked.append(decoded) or [])
    runner = SimpleNamespace(
        device=DEVICE,
        kv_cache_config=SimpleNamespace(num_blocks=100),
        corun=SimpleNamespace(split=SimpleNamespace(beyond=BEYOND)),
    )
    for latent in (True, False):
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(use_mla=latent),
        )
        measure._model_claims(runner, config, None, limits, 1.0)
    assert asked == [True, False]


def test_vllm_makes_no_schedule_that_nobody_reads(mla):
    held = Held(mla)
    assert held.builder.fa_aot_schedule is False
    held.build([(3, 30, 1)])
    assert not held.builder.scheduler_metadata.any()


def test_room_is_taken_while_vllm_profiles_memory(mla, monkeypatch):
    held = Held(mla)
    rows, taken = torch.ones(2, 1), []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda s, **k: taken.append(tuple(s)) or empty(1))
    found = held.layer.forward_impl(rows, rows, rows, None, None, output=torch.ones(2, HEADS))
    assert not found.any()
    assert taken[0] == (SPLITS, MOST, HEADS, LATENT + 1)


def test_layers_of_other_heads_keep_one_split(mla):
    module, kernel = mla
    kernel.calls.clear()
    layers = torch.nn.ModuleList([layer_of(module), layer_of(module, num_heads=HEADS + 1)])
    split = SplitLatent(BEYOND, MOST, DEVICE, scheduler)
    split.hold_layers(layers)
    assert split.one_split == {
        "its heads are not as those of the first layer that is split": 1,
    }
    assert "forward_mqa" not in vars(layers[1].impl)


class Sparse(MLAAttention):
    """A layer of another kind."""


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"kv_lora_rank": 256}, r"\(256, 64\), not \(512, 64\)"),
        ({"qk_rope_head_dim": 32}, r"\(512, 32\)"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"need_to_return_lse_for_decode": True}, "decode_context_parallel_size"),
        ({"backend": "TRITON_MLA"}, "TRITON_MLA, not FLASH_ATTN_MLA"),
        ({"kind": Sparse}, "another kind .Sparse"),
    ],
)
def test_why_a_layer_cannot_be_split(mla, given, word):
    layers = torch.nn.ModuleList([layer_of(mla[0], **given)])
    with pytest.raises(ValueError, match=f"no attention layer.*{word}"):
        SplitLatent(BEYOND, MOST, DEVICE, scheduler).hold_layers(layers)


def test_the_dimensions_are_those_of_deepseek():
    assert split_latent.LATENT == (LATENT, ROPE)
