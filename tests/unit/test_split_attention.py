"""Split decode in a worker: which kernel computes which row, over a fake FlashAttention.

The fake marks its rows with the KV length that it was given, the fake kernel with a negative one.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import certified
from vllm.model_executor.layers.attention import Attention

from corun.engine.runner_state import RunnerState
from corun.engine.split_attention import SplitAttention, why_not
from corun.engine.split_rows import StepRows, unsplit
from corun.plan import Plan
from corun.rows import Rows

BEYOND, MOST, HEADS, DIM = 8, 6, 2, 64
DEVICE = torch.device("cpu")


@dataclasses.dataclass
class Metadata:
    """What is read of FlashAttentionMetadata."""

    max_query_len: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor


class FlashAttention:
    """In the place of FlashAttentionImpl."""

    def __init__(self, **given):
        self.num_heads = self.num_kv_heads = HEADS
        self.head_size, self.scale = DIM, 0.5
        self.attn_type, self.kv_cache_dtype = "decoder", "auto"
        self.sliding_window, self.logits_soft_cap = (-1, -1), 0
        self.alibi_slopes = self.sinks = None
        vars(self).update(given)

    def forward(  # noqa: PLR0917 -- as vLLM's
        self, layer, query, key, value, kv_cache, attn_metadata, output
    ):
        if attn_metadata is None:
            return output.fill_(0)
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            tokens = starts[request + 1] - starts[request]
            for i in range(tokens):
                output[starts[request] + i] = max(0, length - tokens + i + 1)
        return output


class Kernel:
    """In the place of ``split_decode``: writes minus the length; remembers what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(  # noqa: PLR0917 -- as the kernel's
        self, query, keys, values, table, lengths, scale, out, workspace
    ):
        assert len(query) == len(out) == len(lengths) <= len(table)
        assert keys.shape == values.shape == (3, 16, HEADS, DIM)
        assert scale == 0.5
        assert len(workspace.partial) == MOST >= len(lengths)
        for row, length in enumerate(lengths.tolist()):
            if length:
                out[row] = -length
                self.seen.append((query[row, 0, 0].item(), table[row, 0].item(), length))


def layer_of(kind=Attention, backend="FLASH_ATTN", **given):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.impl = FlashAttention(**given)
    layer.attn_backend = SimpleNamespace(get_name=lambda: backend)
    return layer


def held(*layers):
    """(SplitAttention, its kernel, its runner's state, the runner) over `layers`."""
    kernel = Kernel()
    split = SplitAttention(BEYOND, MOST, DEVICE, kernel)
    split.hold_layers(torch.nn.ModuleList(layers))
    state = RunnerState(certified(Rows.span(1, 64), Rows.span(1, MOST)), split=split)
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]))
    split.follow(runner, state)
    return split, kernel, state, runner


def metadata_of(asked, padded=0):
    """Metadata of requests (prompt, begin, tokens), with rows of padding behind them."""
    lengths = [begin + n for _, begin, n in asked] + [0] * padded
    sizes = [n for _, _, n in asked]
    starts = np.array([0, *np.cumsum(sizes), *[sum(sizes)] * padded])
    table = torch.arange(len(lengths), dtype=torch.int32)[:, None] + 100
    return Metadata(
        max(sizes), torch.tensor(lengths, dtype=torch.int32), torch.from_numpy(starts), table
    )


def begin(state, runner, asked, order=None):
    """Have the worker's step hold requests (prompt, begin, tokens)."""
    names = [f"r{i}" for i in range(len(asked))]
    state.prompt_lens = {n: prompt for n, (prompt, _, _) in zip(names, asked, strict=True)}
    state.spans = {n: (b, b + k) for n, (_, b, k) in zip(names, asked, strict=True)}
    runner.input_batch.req_ids = names if order is None else [names[i] for i in order]


def run(layer, metadata, tokens, cache=None):
    """Each row's mark [tokens]; the query of token t holds t."""
    query = torch.arange(tokens, dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM)
    cache = torch.zeros(3, 2, 16, HEADS, DIM) if cache is None else cache
    output = torch.full((tokens, HEADS, DIM), 0.5)
    layer.impl.forward(layer, query, query, query, cache, metadata, output=output)
    assert (output == output[:, :1, :1]).all()
    return output[:, 0, 0].tolist()


def expected(asked):
    return [
        -(p + 1) if p >= unsplit(prompt, BEYOND) else p + 1
        for prompt, begin, n in asked
        for p in range(begin, begin + n)
    ]


steps = st.lists(
    st.tuples(st.integers(1, 14), st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 3, 9, 15])),
    min_size=1,
    max_size=MOST,
)


@given(steps)
def test_every_row_is_computed_by_its_own_kernel(asked):
    layer = layer_of()
    split, kernel, state, runner = held(layer)
    begin(state, runner, asked)
    metadata = metadata_of(asked)
    lengths = metadata.seq_lens.clone()
    split.attach(metadata)
    found = run(layer, metadata, sum(n for _, _, n in asked))
    assert found == expected(asked)
    assert torch.equal(metadata.seq_lens, lengths), "other layers still see every length"
    # The kernel got each row's own query and block table.
    token = 0
    for request, (_, _, n) in enumerate(asked):
        for _ in range(n):
            if found[token] < 0:
                assert (token, 100 + request, -found[token]) in kernel.seen
            token += 1
    assert len(kernel.seen) == sum(mark < 0 for mark in found)


@given(st.lists(steps.map(lambda s: [(p, b, 1) for p, b, _ in s]), min_size=2, max_size=5))
def test_a_graph_reads_the_same_buffers_in_every_step(batches):
    """What a graph captured, run again after each later ``attach``, computes that step."""
    layer = layer_of()
    split, kernel, state, runner = held(layer)
    captured = metadata_of([(1, 0, 1)] * MOST)
    split.attach(captured)  # outside of steps: capture
    assert run(layer, captured, MOST) == [1.0] * MOST
    assert not kernel.seen
    state.graph = True
    for asked in batches:
        begin(state, runner, asked)
        padded = MOST - len(asked)
        split.attach(metadata_of(asked, padded))
        found = run(layer, captured, MOST)
        assert found == expected(asked) + [0.0] * padded


def test_nothing_is_launched_where_the_host_knows_that_no_row_is_split():
    layer = layer_of()
    split, kernel, state, runner = held(layer)
    for asked in ([(3, 5, 1), (20, 19, 1)], [(20, 0, 20)], [(20, 4, 16), (5, 7, 1)]):
        begin(state, runner, asked)
        metadata = metadata_of(asked)
        split.attach(metadata)
        assert "corun_split" not in vars(metadata)
        assert run(layer, metadata, sum(n for _, _, n in asked)) == expected(asked)
    assert not kernel.seen


def test_rows_follow_the_order_of_the_runner():
    layer = layer_of()
    split, _, state, runner = held(layer)
    asked = [(3, 30, 1), (40, 30, 1), (3, 4, 1)]
    order = [2, 0, 1]
    begin(state, runner, asked, order)
    moved = [asked[i] for i in order]
    metadata = metadata_of(moved)
    split.attach(metadata)
    assert run(layer, metadata, 3) == expected(moved) == [5.0, -31.0, 31.0]


def test_the_second_runner_says_its_order_when_it_prepares_attention():
    layer = layer_of()
    split, _, state, _ = held(layer)
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
    split.attach(metadata)
    assert run(layer, metadata, 2) == [31.0, -31.0]


def test_a_request_that_the_worker_does_not_know_is_an_error():
    split, _, state, runner = held(layer_of())
    begin(state, runner, [(3, 30, 1)])
    runner.input_batch.req_ids = ["other"]
    with pytest.raises(KeyError, match="other"):
        split.attach(metadata_of([(3, 30, 1)]))


def test_probes_give_their_own_rows():
    layer = layer_of()
    split, _, _, _ = held(layer)
    asked = [(3, 30, 1), (9, 7, 4)]
    metadata = metadata_of(asked)
    split.give(StepRows.of([p for p, _, _ in asked], [(b, b + n) for _, b, n in asked]))
    split.attach(metadata)
    split.give(None)
    assert run(layer, metadata, 5) == expected(asked)


def test_the_cache_of_vllm_032_is_read_too():
    """[blocks, heads, block, 2 * dim] there, [blocks, 2, block, heads, dim] in 0.25."""
    layer = layer_of()
    split, kernel, state, runner = held(layer)
    begin(state, runner, [(3, 30, 1)])
    metadata = metadata_of([(3, 30, 1)])
    split.attach(metadata)
    assert run(layer, metadata, 1, torch.zeros(3, HEADS, 16, 2 * DIM)) == [-31.0]
    assert kernel.seen


def test_room_is_taken_while_vllm_profiles_memory():
    layers = [layer_of(), layer_of(), layer_of(head_size=128)]
    split, _, _, _ = held(*layers)
    assert not split._workspaces
    for layer in layers:
        assert layer.impl.forward(layer, None, None, None, None, None, torch.ones(2, 4)).sum() == 0
    assert sorted(split._workspaces) == [(HEADS, 64), (HEADS, 128)]


def test_layers_that_cannot_be_split_keep_one_split():
    plain, window = layer_of(), layer_of(sliding_window=(31, 0))
    split, _, state, runner = held(plain, window)
    assert split.one_split == {"it has a sliding window": 1}
    begin(state, runner, [(3, 30, 1)])
    metadata = metadata_of([(3, 30, 1)])
    split.attach(metadata)
    assert run(plain, metadata, 1) == [-31.0]
    assert run(window, metadata, 1) == [31.0]


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
        SplitAttention(BEYOND, MOST, DEVICE, Kernel()).hold_layers(torch.nn.Linear(2, 2))


def test_a_plan_says_that_it_splits():
    plan = dataclasses.replace(certified(Rows.span(1, 64), Rows.span(1, 8)), split_beyond=2048)
    assert "decode split beyond 2048 tokens" in plan.summary()
    assert Plan.from_mapping(plan.to_mapping()) == plan
    assert "split" not in dataclasses.replace(plan, split_beyond=0).summary()
