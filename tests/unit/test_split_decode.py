"""Split decode attention: on a GPU, or anywhere with TRITON_INTERPRET=1."""

import dataclasses
import importlib
import os
from types import SimpleNamespace

import pytest
import torch

from corun.engine.kernels.split_config import SplitConfig, SplitWorkspace

pytest.importorskip("triton")
split_decode = importlib.import_module("corun.engine.kernels.split_decode").split_decode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Triton's interpreter multiplies bfloat16 matrices as if their bits were integers.
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
SMALL = SplitConfig(split=64, tile=32, max_splits=16, stages=2, programs_per_sm=3)
# One token, tile and split edges, many splits, past split * max_splits, padding.
UNTOUCHED = 7.0  # in every row of the output before the kernel runs
LENGTHS = [1, 0, 31, 32, 33, 64, 65, 200, 1024, 1025, 1300, 0, 7]


class Batch:
    """Requests whose query and KV are drawn per request, laid out in a paged cache."""

    def __init__(
        self, requests, lengths, heads=(4, 2), dim=64, *, key_dim=None, block=16,
        dtype=torch.float16, width=None, first_page=1,
    ):  # fmt: skip
        """requests: the ids that pick each row's values; a row of length 0 is padding."""
        query_heads, kv_heads = heads
        key_dim = key_dim or dim
        pages = [-(-n // block) for n in lengths]
        cache = torch.full(
            (first_page + sum(pages) + 1, 2, block, kv_heads, key_dim), torch.nan, dtype=dtype
        )
        # Unused table entries name the cache's last page, which holds NaN.
        table = torch.full((len(lengths), width or max(pages)), len(cache) - 1, dtype=torch.int32)
        query = torch.zeros(len(lengths), query_heads, key_dim, dtype=dtype)
        page = first_page
        self.kv = []
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            draw = torch.Generator().manual_seed(request)
            query[row] = torch.randn(query_heads, key_dim, generator=draw)
            kv = torch.randn(length, 2, kv_heads, key_dim, generator=draw).to(dtype)
            self.kv.append(kv)
            # A request's pages lie in no order.
            order = page + torch.randperm(pages[row], generator=draw)
            table[row, : pages[row]] = order
            for i, at in enumerate(order):
                chunk = kv[i * block : (i + 1) * block]
                cache[at, :, : len(chunk)] = chunk.transpose(0, 1)
            page += pages[row]
        self.query, self.cache, self.table = query.to(DEVICE), cache.to(DEVICE), table.to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.dim, self.scale = dim, key_dim**-0.5

    def run(self, config=SMALL, out_dtype=torch.float32, room=0):
        """Output [N, Hq, Dv], in fp32 so that no difference hides behind a rounding."""
        rows, query_heads, _ = self.query.shape
        keys, values = self.cache.unbind(1)
        if keys.shape[3] != self.dim:
            values = keys[..., : self.dim]
        self.workspace = workspace = SplitWorkspace.allocate(
            rows + room, query_heads, self.dim, DEVICE, config
        )
        for scratch in (workspace.partial, workspace.peak, workspace.total):
            scratch.fill_(torch.nan)
        out = torch.full((rows, query_heads, self.dim), UNTOUCHED, dtype=out_dtype, device=DEVICE)
        split_decode(self.query, keys, values, self.table, self.lengths, self.scale, out, workspace)
        return out.cpu()

    def reference(self):
        """Attention in float64 [N, Hq, Dv], and how far a kernel's result may lie from it."""
        ratio = self.query.shape[1] // self.cache.shape[3]
        rounding = torch.finfo(self.query.dtype).eps / 2
        out = torch.zeros(*self.query.shape[:2], self.dim, dtype=torch.float64)
        bound = torch.zeros_like(out)
        for row, kv in enumerate(self.kv):
            if not len(kv):
                continue
            keys, values = kv.double().repeat_interleave(ratio, dim=2).unbind(1)
            values = (values if keys.shape[2] == self.dim else keys)[..., : self.dim]
            query = self.query[row].cpu().double()
            weights = (torch.einsum("hd,thd->ht", query, keys) * self.scale).softmax(dim=-1)
            out[row] = torch.einsum("ht,thd->hd", weights, values)
            # Weights are rounded to the cache's dtype once; small ones in fp16 to 2**-25.
            spread = torch.einsum("ht,thd->hd", weights, values.abs())
            bound[row] = 1.1 * rounding * spread + len(kv) * 2.0**-25 * 4 + 1e-5
        return out, bound


def bits(x):
    return x.view(torch.int32)


def assert_rows(found, expected, rows):
    """`found` [n, ...] has the bits of `expected`'s rows `rows`."""
    assert found.numel() > 0
    assert torch.equal(bits(found), bits(expected[rows]))


@pytest.fixture(scope="module")
def crowd():
    """The whole batch, and its output."""
    batch = Batch(range(len(LENGTHS)), LENGTHS)
    return batch, batch.run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "block"), [((4, 2), 64, 16), ((16, 1), 128, 32), ((3, 3), 256, 16)]
)
def test_reference(heads, dim, block, dtype):
    batch = Batch(range(7), [1, 0, 40, 64, 65, 129, 1100], heads, dim, block=block, dtype=dtype)
    expected, bound = batch.reference()
    expected[1] = UNTOUCHED  # padding
    error = (batch.run().double() - expected).abs()
    assert (error <= bound).all(), f"{(error / bound.clamp(min=1e-9)).max()} times the bound"
    rounded = batch.run(out_dtype=dtype)
    assert torch.equal(rounded, batch.run().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent(dtype):
    """MLA: 20 query heads share one latent, of which the values are the first 512 dimensions."""
    config = dataclasses.replace(SMALL, warps=8)
    batch = Batch([3, 4, 5], [70, 0, 1], (20, 1), 512, key_dim=576, dtype=dtype)
    found = batch.run(config)
    expected, bound = batch.reference()
    expected[1] = UNTOUCHED
    assert ((found.double() - expected).abs() <= bound).all()
    assert_rows(Batch([3], [70], (20, 1), 512, key_dim=576, dtype=dtype).run(config), found, [0])


def test_alone(crowd):
    for row in (0, 2, 4, 6, 8, 9, 10, 12):
        assert_rows(Batch([row], [LENGTHS[row]]).run(), crowd[1], [row])


def test_order_and_neighbors(crowd):
    order = [10, 4, 12, 9, 0, 7, 2]
    shuffled = Batch(order, [LENGTHS[r] for r in order], first_page=9)
    assert_rows(shuffled.run(), crowd[1], order)
    # The same requests between others: longer ones, shorter ones, padding.
    requests, lengths, places = [], [], []
    for r in order:
        requests += [100 + r, r, 0]
        lengths += [(r * 97) % 500, LENGTHS[r], 0]
        places.append(len(requests) - 2)
    assert_rows(Batch(requests, lengths).run()[places], crowd[1], order)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_programs(crowd, programs):
    """Which program computes what changes nothing."""
    config = dataclasses.replace(SMALL, programs_per_sm=programs)
    assert_rows(crowd[0].run(config), crowd[1], slice(None))


def test_room(crowd):
    """Wider block tables and larger workspaces change nothing."""
    wide = Batch(range(len(LENGTHS)), LENGTHS, width=333)
    assert_rows(wide.run(room=5), crowd[1], slice(None))


def test_layout(crowd):
    """Heads before tokens in the cache, queries inside a wider row: the same bits."""
    batch = Batch(range(len(LENGTHS)), LENGTHS)
    batch.cache = batch.cache.transpose(2, 3).contiguous().transpose(2, 3)
    rows, heads, dim = batch.query.shape
    wider = torch.full((rows, 3 * heads * dim), torch.nan, dtype=batch.query.dtype, device=DEVICE)
    wider[:, heads * dim : 2 * heads * dim] = batch.query.reshape(rows, -1)
    batch.query = wider[:, heads * dim : 2 * heads * dim].view(rows, heads, dim)
    assert_rows(batch.run(), crowd[1], slice(None))


def test_many_rows(crowd):
    """More rows than are looked at together when an item looks for its row."""
    lengths = [0] * 260
    requests = [0] * 260
    for place, row in ((0, 4), (255, 6), (256, 7), (257, 8), (259, 10)):
        requests[place], lengths[place] = row, LENGTHS[row]
    found = Batch(requests, lengths).run()
    assert_rows(found[[0, 255, 256, 257, 259]], crowd[1], [4, 6, 7, 8, 10])
    assert (found[torch.tensor(lengths) == 0] == UNTOUCHED).all()


def test_rows_of_another_kernel():
    """Rows of length 0 are left as they are, and nothing of them is read, workspace included."""
    batch = Batch([0, 1], [0, 0], width=1)
    assert (batch.run() == UNTOUCHED).all()
    assert batch.workspace.partial.isnan().all()
    assert batch.workspace.peak.isnan().all()


def test_another_split_is_seen(crowd):
    """The comparison above can fail: another split or tile gives other bits."""
    for change in ({"split": 128}, {"tile": 16}, {"max_splits": 32}):
        found = crowd[0].run(dataclasses.replace(SMALL, **change))
        assert not torch.equal(bits(found), bits(crowd[1]))
        assert torch.equal(bits(found[0]), bits(crowd[1][0]))  # one token has but one order


def test_rule(crowd):
    """How many splits each row made: its own length decides, and max_splits bounds it."""
    batch, _ = crowd
    batch.run()
    made = (~batch.workspace.peak[:, :, 0].isnan()).sum(dim=1).tolist()
    expected = [-(-n // SMALL.split) for n in LENGTHS]
    # Past 16 splits of 64 tokens a split has 96.
    expected[LENGTHS.index(1025)], expected[LENGTHS.index(1300)] = 11, 14
    assert made == expected


def test_refused(crowd):
    batch, _ = crowd
    keys, values = batch.cache.unbind(1)
    workspace = SplitWorkspace.allocate(len(LENGTHS), 4, 64, DEVICE, SMALL)
    given = {
        "query": batch.query,
        "key_cache": keys,
        "value_cache": values,
        "block_table": batch.table,
        "seq_lens": batch.lengths,
        "scale": 0.1,
        "out": torch.empty_like(batch.query),
        "workspace": workspace,
    }
    split_decode(**given)
    small = SplitWorkspace.allocate(2, 4, 64, DEVICE, SMALL)
    for change, message in (
        ({"query": batch.query.float()}, "bfloat16 or float16"),
        ({"seq_lens": batch.lengths.long()}, "int32"),
        ({"seq_lens": batch.lengths[:3]}, "must have 13 rows"),
        ({"out": torch.empty(13, 4, 32, device=DEVICE)}, "must have 13 rows"),
        ({"workspace": small}, "workspace for 2 rows"),
        ({"value_cache": values[..., :32]}, "head dimensions 64 and 32"),
        ({"query": batch.query[:, :3]}, "3 query heads, 2 KV heads"),
        ({"query": batch.query.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        ({"key_cache": keys[:, :, :, :48], "query": batch.query[..., :48]}, "MLA"),
    ):
        with pytest.raises(ValueError, match=message):
            split_decode(**{**given, **change})
    for bad in ({"split": 65, "tile": 16}, {"split": 64, "tile": 8}, {"split": 48, "tile": 48}):
        with pytest.raises(ValueError, match="must be"):
            SplitConfig(**bad)
    with pytest.raises(ValueError, match="head dimension 96"):
        SplitWorkspace.allocate(1, 1, 96, DEVICE)


def test_a_token_decoded_or_recomputed():
    """The kernel inside vLLM's attention: a token's bits in a crowd, alone, and in a chunk."""
    pytest.importorskip("vllm")
    from corun.engine import split_attention
    from corun.engine.split_rows import StepRows

    beyond, prompts, lengths = 64, [1, 100, 70, 30], [200, 130, 90, 40]
    batch = Batch(range(4), lengths)
    tokens = [6, 1, 5, 3]  # of each request in the chunks below
    queries = torch.randn(
        sum(tokens), 4, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float32
    ).to(DTYPES[0])
    starts = [sum(tokens[:i]) for i in range(4)]

    class Impl:
        num_heads, head_size, scale = 4, 64, batch.scale

        def forward(self, *given):
            given[6].fill_(UNTOUCHED)

    impl = Impl()
    split = split_attention.SplitAttention(beyond, 3, DEVICE)  # room for fewer rows than a step has
    split._hold(impl)

    def computed(asked):
        """Rows of a step that computes tokens (request, begin, end); the last is its last."""
        split.give(StepRows.of([prompts[r] for r, _, _ in asked], [(b, e) for _, b, e in asked]))
        ends = torch.tensor([e for _, _, e in asked], dtype=torch.int32, device=DEVICE)
        metadata = SimpleNamespace(
            max_query_len=max(e - b for _, b, e in asked),
            seq_lens=ends,
            block_table=batch.table[[r for r, _, _ in asked]],
        )
        split.attach(metadata)
        places = [starts[r] + tokens[r] - lengths[r] + p for r, b, e in asked for p in range(b, e)]
        out = torch.empty(len(places), 4, 64, dtype=torch.float32, device=DEVICE)
        impl.forward(None, queries[places].to(DEVICE), None, None, batch.cache, metadata, out)
        return dict(zip([(r, p) for r, b, e in asked for p in range(b, e)], out.cpu(), strict=True))

    chunks = [(r, lengths[r] - tokens[r], lengths[r]) for r in (2, 0, 3, 1)]
    whole = computed(chunks)
    assert len(whole) == sum(tokens)
    compared = 0
    for (request, at), row in whole.items():
        if at < max(prompts[request], beyond):
            assert (row == UNTOUCHED).all(), "left to the other kernel"
            continue
        alone = computed([(request, at, at + 1)])[request, at]
        crowd = computed([(3, 39, 40), (request, at, at + 1)])[request, at]
        beside = computed([(3, 37, 40), (request, at, at + 1)])[request, at]
        for other in (alone, crowd, beside):
            assert torch.equal(bits(other), bits(row))
            compared += row.numel()
    assert compared == 3 * 12 * 4 * 64
