"""The draw: its distribution, what the filters keep, and that a row depends on itself alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.engine.sampling.core import processed_logits, sample_rows
from corun.engine.sampling.cpu_race import exact_score
from corun.engine.sampling.logprobs import RowScores
from corun.engine.sampling.params import RowParams
from corun.engine.sampling.philox import noise_words

CPU = torch.device("cpu")
DRAWS = 100_000
INF = float("inf")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def params(rows, vocab, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, seeds=None):
    def column(value):
        return np.broadcast_to(np.asarray(value), (rows,))

    return RowParams.build(
        rows,
        vocab,
        CPU,
        temperature=column(temperature),
        top_k=np.minimum(column(vocab if top_k is None else top_k), vocab),
        top_p=column(top_p),
        min_p=column(min_p),
        seeds=column(np.arange(rows) if seeds is None else seeds),
    )


def chi_square_p(counts, expected):
    """The chance of counts at least this far from `expected` (same total), by chi-square."""
    counts, expected = (torch.as_tensor(v, dtype=torch.float64) for v in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def kept_by_definition(logits, top_k, top_p, min_p, temperature):
    """The kept entries of one row, in order, from the definitions, in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass = np.exp((np.asarray(logits, dtype=np.float64) - max(logits)) / temperature)
    kept = [i for i in order if mass[i] >= min_p * mass.max()][:top_k]
    if top_p < 1:
        target, before, head = top_p * sum(mass[i] for i in kept), 0.0, []
        for i in kept:
            if before >= target and head:
                break
            head.append(i)
            before += mass[i]
        kept = head
    return kept


# Distribution

ODD = torch.linspace(-3, 2, 37)[torch.randperm(37, generator=torch.Generator().manual_seed(1))]
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8, "temperature": 0.9},
    "min_p": {"min_p": 0.15},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_distribution(case, over):
    """Chi-square of 100,000 draws, over seeds at one position and over positions of one seed."""
    given_params = {"temperature": 1.0, "top_k": 37, "top_p": 1.0, "min_p": 0.0, **CASES[case]}
    kept = kept_by_definition(ODD.tolist(), **given_params)
    mass = torch.softmax(ODD[kept].double() / given_params["temperature"], dim=0).numpy()
    rows = torch.arange(DRAWS)
    fixed = torch.full((DRAWS,), 123_456_789)
    p = params(DRAWS, 37, seeds=(rows if over == "seeds" else fixed).numpy(), **CASES[case])
    tokens, _, _ = sample_rows(ODD.expand(DRAWS, 37), p, fixed if over == "seeds" else rows)
    counts = np.bincount(tokens.numpy(), minlength=37)
    assert counts[kept].sum() == DRAWS, "a token outside of the filters was drawn"
    assert chi_square_p(counts[kept], mass * DRAWS) > 1e-4


def test_draws_of_neighbouring_positions_and_seeds_are_independent():
    """Chi-square over pairs of consecutive draws, 16 equally likely tokens, 100,000 pairs."""
    logits = torch.zeros(DRAWS, 16)
    for seeds, positions in (
        (torch.full((DRAWS,), 7), torch.arange(DRAWS)),
        (torch.arange(DRAWS), torch.full((DRAWS,), 7)),
    ):
        p = params(DRAWS, 16, seeds=seeds.numpy())
        tokens = sample_rows(logits, p, positions)[0].numpy()
        pairs = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
        assert chi_square_p(pairs, np.full(256, pairs.sum() / 256)) > 1e-4


def test_chi_square_against_tables():
    """Critical values at 5%: 3.841 for 1 degree of freedom, 18.307 for 10."""
    assert chi_square_p([50 + 9.80, 50 - 9.80], [50, 50]) == pytest.approx(0.05, abs=1e-3)
    far = [100 + 30.25] + [100] * 9 + [100 - 30.25]
    assert chi_square_p(far, [100] * 11) == pytest.approx(0.05, abs=1e-3)


# What exactly is drawn


@st.composite
def batches(draw):
    """Logits [N, V] with ties and masked entries, mixed parameters, seeds and positions."""
    rows, vocab = draw(st.integers(1, 9)), draw(st.integers(2, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(size=(rows, vocab)) * draw(st.sampled_from([0.1, 2.0, 30.0]))
    step = draw(st.sampled_from([0.0, 0.25, 2.0]))
    if step:
        logits = np.round(logits / step) * step
    logits[rng.random((rows, vocab)) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = -INF
    logits[:, rng.integers(vocab)] = 1.0  # no row without a finite entry
    columns = {
        "temperature": [0.0, 0.01, 0.7, 1.0, 3.0],
        "top_k": [1, 2, 5, vocab - 1, vocab],
        "top_p": [0.01, 0.5, 0.95, 1.0],
        "min_p": [0.0, 0.01, 0.3, 1.0],
    }
    chosen = {name: rng.choice(values, rows) for name, values in columns.items()}
    seeds = rng.integers(-(2**63), 2**63, rows, dtype=np.int64)
    positions = torch.from_numpy(rng.integers(0, 2**33, rows))
    return torch.from_numpy(logits.astype(np.float32)), chosen, seeds, positions


def exact(values):
    """`values` in a form where equal means equal bits."""
    return [v.view(torch.int32) if v.dtype == torch.float32 else v for v in values]


def everything(logits, p, positions):
    """All that a row gets: token, cut, processed logits, and their scores."""
    tokens, cut_logit, cut_entry = sample_rows(logits, p, positions)
    processed = processed_logits(logits, p, cut_logit, cut_entry)
    scores = RowScores(logits, tokens)
    count = min(20, logits.shape[1])
    top = scores.top(count)
    parts = [tokens, cut_logit, cut_entry, processed, scores.rank, top, scores.at(top)]
    return exact([*parts, scores.at(tokens[:, None])])


@settings(max_examples=150, deadline=None)
@given(batches())
def test_draw_follows_the_definition(batch):
    """Token and kept entries against the definitions, entry by entry in float64."""
    logits, chosen, seeds, positions = batch
    rows, vocab = logits.shape
    p = params(rows, vocab, seeds=seeds, **chosen)
    tokens, cut_logit, cut_entry = sample_rows(logits, p, positions)
    processed = processed_logits(logits, p, cut_logit, cut_entry)
    assert not processed.isnan().any()
    words = noise_words(p.seeds, positions, vocab)
    for row in range(rows):
        values = logits[row].tolist()
        temperature = float(p.temperature[row])
        if temperature < 1e-5:
            assert int(tokens[row]) == values.index(max(values))
            assert torch.equal(processed[row], logits[row])
            continue
        filters = (int(p.top_k[row]), float(p.top_p[row]), float(p.min_p[row]))
        kept = kept_by_definition(values, *filters, temperature)
        found = set((processed[row] > -INF).nonzero()[:, 0].tolist())
        finite = {i for i in kept if values[i] > -INF}
        if found != finite:  # a cut within float32 rounding of the definition's
            mass = np.exp((np.array(values, dtype=np.float64) - max(values)) / temperature)
            share = sum(mass[list(found ^ finite)]) / mass.sum()
            edge = {mass[i] / mass.max() - filters[2] for i in found ^ finite}
            reached = sum(mass[list(finite)]) / sum(mass[list(finite | found)])
            near = min(abs(e) for e in edge) < 1e-6 or share < 1e-6 or reached > 1 - 1e-6
            assert near or _at_the_edge(mass, finite, found, filters[1])
            kept = sorted(found)
        best = max(
            kept, key=lambda i: (exact_score(values[i], temperature, int(words[row, i])), -i)
        )
        assert int(tokens[row]) == best


def _at_the_edge(mass, wanted, found, top_p):
    """Whether the larger head only adds entries at a mass within rounding of top_p."""
    small, large = sorted((wanted, found), key=len)
    if not small <= large:
        return False
    total = sum(mass[list(large)])
    return abs(sum(mass[list(small)]) / total - top_p) < 1e-5 or top_p * total < 1e-30


@settings(max_examples=120, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_a_row_is_the_same_alone_and_in_any_batch(batch, random):
    """Every row alone, and in a shuffled batch among others' rows: the same bits throughout."""
    logits, chosen, seeds, positions = batch
    rows, vocab = logits.shape
    p = params(rows, vocab, seeds=seeds, **chosen)
    together = everything(logits, p, positions)
    for row in range(rows):
        one = torch.tensor([row])
        alone = everything(logits[one], p.select(one), positions[one])
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
    order = torch.tensor(random.choices(range(rows), k=2 * rows + 1))
    mixed = everything(logits[order], p.select(order), positions[order])
    assert all(torch.equal(a, b[order]) for a, b in zip(mixed, together, strict=True))


@pytest.mark.parametrize("vocab", [4099, 4096])
def test_place_and_number_of_rows(vocab):
    """Ten rows of mixed parameters at every place of batches of 1 to 300 rows, bit by bit."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(10, vocab, generator=generator) * 3
    logits[5:] = (logits[5:] * 8).round() / 8  # ties, as from a bf16 LM head
    p = params(
        10,
        vocab,
        temperature=[0, 1, 0.6, 1, 1, 1, 0.8, 1.2, 2, 1],
        top_k=[vocab, vocab, vocab, 50, vocab, 1500, 20, vocab, vocab, 3],
        top_p=[1, 1, 1, 1, 0.9, 1, 0.95, 0.99, 0.999, 0.5],
        min_p=[0, 0, 0, 0, 0, 0, 0, 0.01, 0, 0.1],
        seeds=np.arange(10) * 7919 - 5,
    )
    positions = torch.arange(10) * 100
    reference = everything(logits, p, positions)
    compared = 0
    for rows, first in ((1, 0), (1, 7), (2, 3), (3, 5), (7, 2), (8, 9), (9, 4), (64, 1), (300, 6)):
        order = (torch.arange(rows) + first) % 10
        found = everything(logits[order], p.select(order), positions[order])
        for a, b in zip(found, reference, strict=True):
            assert torch.equal(a, b[order])
            compared += a.numel()
    assert compared >= 100_000
    print(f"compared {compared} values")


def test_row_stride_and_dtype_do_not_matter():
    """A bf16 row, the same row in fp32, and a row of a wider table: the same draw."""
    wide = torch.randn(6, 1100).to(torch.bfloat16)
    p = params(6, 1003, temperature=[0, 1, 1, 0.5, 1, 1], top_k=[1003, 1003, 40, 1003, 7, 900])
    positions = torch.arange(6)
    view = wide[:, :1003]
    reference = everything(view.to(torch.float32), p, positions)
    for logits in (view, view.contiguous(), wide.to(torch.float32)[:, :1003]):
        found = everything(logits, p, positions)
        assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


# Corners


def test_ties_go_to_the_lower_entry():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, -0.0, 0.0, 2.0]])
    greedy = sample_rows(logits, params(1, 7, temperature=0.0), torch.zeros(1, dtype=torch.long))
    assert greedy[0].tolist() == [1]
    p = params(1, 7, top_k=2)
    _, cut_logit, cut_entry = sample_rows(logits, p, torch.zeros(1, dtype=torch.long))
    kept = processed_logits(logits, p, cut_logit, cut_entry) > -INF
    assert kept.nonzero()[:, 1].tolist() == [1, 2]
    assert RowScores(logits, torch.tensor([0])).top(7).tolist() == [[1, 2, 3, 6, 0, 4, 5]]


def test_rank_counts_every_entry_at_least_as_high():
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]]).expand(4, 4)
    assert RowScores(logits, torch.arange(4)).rank.tolist() == [4, 2, 2, 3]


def test_masked_entries_are_never_drawn():
    logits = torch.full((400, 50), -INF)
    logits[:, [3, 17, 49]] = torch.tensor([0.0, 1.0, 2.0])
    for extra in ({}, {"top_k": 30}, {"top_p": 0.9999}, {"min_p": 0.001}, {"temperature": 0.0}):
        tokens, _, _ = sample_rows(logits, params(400, 50, **extra), torch.arange(400))
        assert set(tokens.tolist()) <= {3, 17, 49}


def test_a_row_of_masked_entries_harms_nobody():
    logits = torch.randn(4, 33)
    p = params(4, 33, top_k=[33, 5, 33, 5], top_p=[1, 0.5, 1, 0.5])
    positions = torch.arange(4)
    before = everything(logits, p, positions)
    broken = logits.clone()
    broken[2:] = -INF
    tokens, cut_logit, cut_entry = sample_rows(broken, p, positions)
    after = everything(broken, p, positions)
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(after, before, strict=True))
    assert tokens[2:].tolist() == [0, 0]
    assert not processed_logits(broken, p, cut_logit, cut_entry).isnan().any()


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_noise_is_finite_at_the_ends(word):
    assert math.isfinite(exact_score(0.0, 1.0, word))


def test_near_ties_are_decided_exactly():
    """Two entries whose scores differ by less than float32 resolves, at every place of a row."""
    seed, position = torch.tensor([9]), torch.tensor([4])
    words = noise_words(seed, position, 257)[0].tolist()
    decided = 0
    for a, b in zip(range(0, 120, 3), range(255, 135, -3), strict=True):
        logits = torch.full((1, 257), -50.0)
        logits[0, a] = 3.0
        gap = exact_score(3.0, 1.0, words[a]) - exact_score(0.0, 1.0, words[b])
        logits[0, b] = gap
        exact_a = exact_score(3.0, 1.0, words[a])
        exact_b = exact_score(float(logits[0, b]), 1.0, words[b])
        assert abs(exact_a - exact_b) < 1e-5
        token = int(sample_rows(logits, params(1, 257, seeds=[9]), position)[0])
        assert token == (a if exact_a >= exact_b else b)
        decided += token == a
    assert 5 < decided < 35  # both sides win


def test_seed_position_and_row_are_what_keys_a_draw():
    logits = torch.zeros(64, 5000)
    same = params(64, 5000, seeds=[5] * 64)
    at = torch.full((64,), 11)
    assert len(set(sample_rows(logits, same, at)[0].tolist())) == 1
    assert len(set(sample_rows(logits, same, torch.arange(64))[0].tolist())) > 50
    assert len(set(sample_rows(logits, params(64, 5000), at)[0].tolist())) > 50
