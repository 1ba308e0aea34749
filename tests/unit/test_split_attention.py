"""Split decode in a worker: how often each row is split, over a fake FlashAttention 3."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from fake_flash import BUILDER, DIM, HEADS, RULE, SPLITS, Metadata, layer_of, scheduler
from hypothesis import given
from hypothesis import strategies as st
from plans import certified
from vllm.model_executor.layers.attention import Attention

from corun.engine import attention, split_attention
from corun.engine.runner_state import RunnerState
from corun.engine.split_attention import SplitAttention, why_not
from corun.engine.split_rows import StepRows, unsplit
from corun.plan import Plan
from corun.rows import Rows

BEYOND, MOST = 8, 6
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def rule():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_attention, "RULES", {64: RULE, 128: RULE, 256: RULE})
        yield


def held(*layers):
    """(SplitAttention, its runner's state, the runner) over `layers`."""
    split = SplitAttention(BEYOND, MOST, DEVICE, scheduler)
    split.hold_layers(torch.nn.ModuleList(layers))
    state = RunnerState(certified(Rows.span(1, 64), Rows.span(1, MOST)), split=split)
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]))
    split.follow(runner, state)
    return split, state, runner


def metadata_of(asked, padded=0):
    """Metadata of requests (prompt, begin, tokens), with rows of padding behind them."""
    lengths = [begin + n for _, begin, n in asked] + [0] * padded
    sizes = [n for _, _, n in asked]
    starts = np.array([0, *np.cumsum(sizes), *[sum(sizes)] * padded])
    table = torch.arange(len(lengths), dtype=torch.int32)[:, None] + 100
    lengths = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.from_numpy(starts)
    return Metadata(sum(sizes), max(sizes), int(lengths.max()), lengths, starts, table)


def attach(split, metadata, longest=1):
    """As the hold of attention does."""
    decode = metadata.max_query_len == 1
    metadata.max_query_len = max(metadata.max_query_len, longest)
    split.attach(metadata, BUILDER, decode=decode, longest=longest)


def begin(state, runner, asked, order=None):
    """Have the worker's step hold requests (prompt, begin, tokens)."""
    names = [f"r{i}" for i in range(len(asked))]
    state.prompt_lens = {n: prompt for n, (prompt, _, _) in zip(names, asked, strict=True)}
    state.spans = {n: (b, b + k) for n, (_, b, k) in zip(names, asked, strict=True)}
    runner.input_batch.req_ids = names if order is None else [names[i] for i in order]


def run(layer, metadata, tokens):
    """Each row's mark [tokens]; the query of token t holds t."""
    query = torch.arange(tokens, dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM)
    query = query.contiguous()
    output = torch.full((tokens, HEADS, DIM), 0.5)
    layer.impl.forward(layer, query, query, query, None, metadata, output=output)
    assert (output == output[:, :1, :1]).all()
    return output[:, 0, 0].tolist()


def expected(asked):
    return [
        -(p + 2) if p >= unsplit(prompt, BEYOND) else p + 1
        for prompt, begin, n in asked
        for p in range(begin, begin + n)
    ]


steps = st.lists(
    st.tuples(st.integers(1, 14), st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 3, 9, 15])),
    min_size=1,
    max_size=MOST,
)


@given(steps, st.sampled_from([1, 256]))
def test_every_row_has_the_splits_of_its_own_length(asked, longest):
    layer = layer_of()
    split, state, runner = held(layer)
    begin(state, runner, asked)
    metadata = metadata_of(asked)
    lengths = metadata.seq_lens.clone()
    attach(split, metadata, longest)
    found = run(layer, metadata, sum(n for _, _, n in asked))
    assert found == expected(asked)
    # Other layers still see every length, and one split.
    assert torch.equal(metadata.seq_lens, lengths)
    assert (metadata.scheduler_metadata, metadata.max_num_splits) == (None, 1)
    # A split row's query and block table are its own.
    token, seen = 0, layer.impl.seen
    for request, (_, _, n) in enumerate(asked):
        for _ in range(n):
            if found[token] < 0:
                assert (token, 100 + request, -found[token] - 1) in seen
            token += 1
    assert len(seen) == sum(mark < 0 for mark in found)


@given(steps)
def test_a_decode_step_is_one_call_and_a_step_with_chunks_takes_no_room_for_every_token(asked):
    layer = layer_of()
    split, state, runner = held(layer)
    begin(state, runner, asked)
    metadata = metadata_of(asked)
    attach(split, metadata)
    run(layer, metadata, sum(n for _, _, n in asked))
    rows = sum(mark < 0 for mark in expected(asked))
    if max(n for _, _, n in asked) == 1:
        assert layer.impl.calls == [SPLITS]
    else:
        assert layer.impl.calls == [1] + [SPLITS] * -(-rows // MOST)


@given(st.lists(steps.map(lambda s: [(p, b, 1) for p, b, _ in s]), min_size=2, max_size=5))
def test_a_graph_reads_the_same_buffer_in_every_step(batches):
    """What a graph captured, run again after each later ``attach``, computes that step."""
    layer = layer_of()
    split, state, runner = held(layer)
    captured = metadata_of([(1, 0, 1)] * MOST)
    attach(split, captured)  # outside of steps: capture
    assert run(layer, captured, MOST) == [1.0] * MOST
    assert layer.impl.calls == [SPLITS], "a graph's kernel is the one that splits"
    schedule = captured.corun_split._schedule
    state.graph = True
    for asked in batches:
        begin(state, runner, asked)
        padded = MOST - len(asked)
        metadata = metadata_of(asked, padded)
        attach(split, metadata)
        again = metadata.corun_split._schedule
        assert (again.data_ptr(), len(again)) == (schedule.data_ptr(), len(schedule))
        for name in ("seq_lens", "query_start_loc"):  # buffers of vLLM's own
            getattr(captured, name).copy_(getattr(metadata, name))
        captured.num_actual_tokens = len(asked)
        found = run(layer, captured, MOST)
        assert found == expected(asked) + [0.5] * padded


def test_what_lies_behind_a_smaller_steps_schedule_is_zero():
    split, state, runner = held(layer_of())
    for n in (MOST, 2):
        begin(state, runner, [(1, 30, 1)] * n)
        metadata = metadata_of([(1, 30, 1)] * n)
        attach(split, metadata)
    (kept,) = split._schedules.values()
    schedule = metadata.corun_split._schedule
    assert schedule.data_ptr() == kept.data_ptr()
    assert len(kept) >= 3 * 8 + 1 and not kept[len(schedule) :].any()


def test_each_builder_has_a_buffer_of_its_own():
    split, state, runner = held(layer_of())
    begin(state, runner, [(3, 30, 1)])
    first, second = metadata_of([(3, 30, 1)]), metadata_of([(3, 30, 1)])
    split.attach(first, BUILDER, decode=True, longest=1)
    split.attach(second, SimpleNamespace(**vars(BUILDER)), decode=True, longest=1)
    assert first.corun_split._schedule.data_ptr() != second.corun_split._schedule.data_ptr()


def test_chunks_without_a_split_row_are_left_alone():
    layer = layer_of()
    split, state, runner = held(layer)
    for asked in ([(20, 0, 20)], [(20, 4, 16), (5, 7, 1)]):
        begin(state, runner, asked)
        metadata = metadata_of(asked)
        attach(split, metadata)
        assert "corun_split" not in vars(metadata)
        assert run(layer, metadata, sum(n for _, _, n in asked)) == expected(asked)
    assert not layer.impl.seen


def test_groups_of_layers_have_block_tables_of_their_own():
    """vLLM gives a group that is like another a copy of its metadata, with another table."""
    layer = layer_of()
    split, state, runner = held(layer)
    asked = [(9, 7, 1), (1, 30, 3)]
    begin(state, runner, asked)
    metadata = metadata_of(asked)
    attach(split, metadata)
    run(layer, metadata, 4)
    other = dataclasses.replace(metadata, block_table=metadata.block_table + 50)
    other.corun_split = metadata.corun_split
    run(layer, other, 4)
    run(layer, metadata, 4)
    assert [table for _, table, _ in layer.impl.seen] == [101] * 3 + [151] * 3 + [101] * 3


def test_rows_follow_the_order_of_the_runner():
    layer = layer_of()
    split, state, runner = held(layer)
    asked = [(3, 30, 1), (40, 30, 1), (3, 4, 1)]
    order = [2, 0, 1]
    begin(state, runner, asked, order)
    moved = [asked[i] for i in order]
    metadata = metadata_of(moved)
    attach(split, metadata)
    assert run(layer, metadata, 3) == expected(moved) == [5.0, -32.0, 31.0]


def test_the_second_runner_says_its_order_when_it_prepares_attention():
    layer = layer_of()
    split, state, _ = held(layer)
    calls = []

    def prepare_attn(input_batch, mode, for_capture=False):
        calls.append((mode, for_capture))
        return "prepared"

    runner = SimpleNamespace(model_state=SimpleNamespace(prepare_attn=prepare_attn))
    split.follow(runner, state)
    state.prompt_lens, state.spans = {"a": 3, "b": 40}, {"a": (30, 31), "b": (30, 31)}
    batch = SimpleNamespace(req_ids=["b", "a"])
    assert runner.model_state.prepare_attn(batch, "FULL", for_capture=True) == "prepared"
    assert calls == [("FULL", True)]
    metadata = metadata_of([(40, 30, 1), (3, 30, 1)])
    attach(split, metadata)
    assert run(layer, metadata, 2) == [31.0, -32.0]


def test_a_request_that_the_worker_does_not_know_is_an_error():
    split, state, runner = held(layer_of())
    begin(state, runner, [(3, 30, 1)])
    runner.input_batch.req_ids = ["other"]
    with pytest.raises(KeyError, match="other"):
        attach(split, metadata_of([(3, 30, 1)]))


def test_probes_give_their_own_rows():
    layer = layer_of()
    split, _, _ = held(layer)
    asked = [(3, 30, 1), (9, 7, 4)]
    metadata = metadata_of(asked)
    split.give(StepRows.of([p for p, _, _ in asked], [(b, b + n) for _, b, n in asked]))
    attach(split, metadata)
    split.give(None)
    assert run(layer, metadata, 5) == expected(asked)


def test_room_is_taken_while_vllm_profiles_memory(monkeypatch):
    layer = layer_of()
    held(layer)
    taken = []
    monkeypatch.setattr(torch, "empty", lambda shape, **_: taken.append(shape))
    output = torch.ones(2, HEADS * DIM)
    assert layer.impl.forward(layer, None, None, None, None, None, output).sum() == 0
    assert taken == [(SPLITS, MOST, HEADS, DIM + 1)]


def test_layers_that_cannot_be_split_keep_one_split():
    plain, window, wide = layer_of(), layer_of(sliding_window=(31, 0)), layer_of(head_size=128)
    split, state, runner = held(plain, window, wide)
    assert split.one_split == {
        "it has a sliding window": 1,
        "its heads are not as those of the first layer that is split": 1,
    }
    begin(state, runner, [(3, 30, 1)])
    metadata = metadata_of([(3, 30, 1)])
    attach(split, metadata)
    assert run(plain, metadata, 1) == [-32.0]
    assert run(window, metadata, 1) == [31.0]
    assert run(wide, metadata, 1) == [31.0]


class Chunked(Attention):
    """A layer of another kind."""


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"head_size": 96}, "96"),
        ({"head_size": 512}, "512"),
        ({"sliding_window": (127, 0)}, "window"),
        ({"logits_soft_cap": 30.0}, "caps"),
        ({"alibi_slopes": torch.ones(2)}, "ALiBi"),
        ({"sinks": torch.ones(2)}, "sinks"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"vllm_flash_attn_version": 2}, "FlashAttention 2"),
        ({"vllm_flash_attn_version": 4}, "FlashAttention 4"),
        ({"attn_type": "encoder_only"}, "causal"),
        ({"backend": "TRITON_ATTN"}, "TRITON_ATTN"),
        ({"kind": Chunked}, "causal"),
    ],
)
def test_why_a_layer_cannot_be_split(given, word):
    assert word in why_not(layer_of(**given))
    with pytest.raises(ValueError, match=f"no attention layer.*{word}"):
        held(layer_of(**given))


def test_ordinary_layers_can_be_split():
    for size in (64, 128, 256):
        assert why_not(layer_of(head_size=size)) is None
    assert why_not(layer_of(sliding_window=None, kv_cache_dtype="bfloat16")) is None
    with pytest.raises(ValueError, match="it has none"):
        SplitAttention(BEYOND, MOST, DEVICE, scheduler).hold_layers(torch.nn.Linear(2, 2))


def test_a_plan_says_that_it_splits():
    plan = dataclasses.replace(certified(Rows.span(1, 64), Rows.span(1, 8)), split_beyond=2048)
    assert "decode split beyond 2048 tokens" in plan.summary()
    assert Plan.from_mapping(plan.to_mapping()) == plan
    assert "split" not in dataclasses.replace(plan, split_beyond=0).summary()


@pytest.mark.parametrize(("headdim", "longest"), [(64, 256), (128, 1)])
def test_the_hold_of_attention_tells_decode_steps_whatever_the_longest_query(
    monkeypatch, headdim, longest
):
    """At head_dim 64 FlashAttention is told of 256 tokens, in the schedule as in the call."""
    monkeypatch.setattr(attention, "_is_fa3", lambda: True)
    layer = layer_of()
    _, state, runner = held(layer)
    made = []
    builder = SimpleNamespace(**vars(BUILDER), headdim=headdim, build=lambda *_: made[-1])
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    group = SimpleNamespace(backend=backend, metadata_builders=[builder])
    attention.install(SimpleNamespace(attn_groups=[[group]]), state)
    for asked in ([(3, 30, 1), (9, 4, 1)], [(3, 30, 1), (9, 0, 9)], [(1, 0, 33)]):
        begin(state, runner, asked)
        made.append(metadata_of(asked))
        metadata = builder.build(0, None)
        assert metadata.max_query_len == max(longest, *(n for _, _, n in asked))
        assert run(layer, metadata, metadata.num_actual_tokens) == expected(asked)
    assert layer.impl.calls == [SPLITS, 1, SPLITS, 1] + [SPLITS] * 5
