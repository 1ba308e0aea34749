"""The GPU sampler's kernels against the CPU's: on a GPU, or anywhere with TRITON_INTERPRET=1."""

import importlib
import os

import numpy as np
import pytest
import torch

from corun.engine.sampling import cpu_race, philox
from corun.engine.sampling.core import processed_logits
from corun.engine.sampling.logprobs import GROUP, RowScores
from corun.engine.sampling.params import RowParams

pytest.importorskip("triton")
triton_noise = importlib.import_module("corun.engine.sampling.triton_noise")
triton_race = importlib.import_module("corun.engine.sampling.triton_race")
triton_scores = importlib.import_module("corun.engine.sampling.triton_scores")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"
)
CPU, DEVICE = torch.device("cpu"), torch.device("cpu" if INTERPRETED else "cuda")
# temperature, top_k (0: off), top_p, min_p: greedy, plain, each filter, together, wide and narrow
KINDS = [
    (0, 0, 1, 0),
    (1, 0, 1, 0),
    (0.6, 0, 1, 0),
    (1, 50, 1, 0),
    (1, 0, 0.9, 0),
    (1, 50, 0.9, 0),
    (1, 1, 1, 0),
    (0.5, 0, 1, 0.1),
    (2, 300, 0.999, 0),
    (1, 0, 0.3003, 0.05),  # no multiple of 1 / V: there fp32 and float64 may round apart
    (3, 0, 0.9999, 0),
    (0.001, 0, 1, 0),
]


def params(vocab, device):
    t, k, p, m = np.array(KINDS).T
    top_k = np.where(k == 0, vocab, np.minimum(k, vocab)).astype(int)
    seeds = np.arange(len(KINDS)) * 977 - 3
    return RowParams.build(
        len(KINDS), vocab, device, temperature=t, top_k=top_k, top_p=p, min_p=m, seeds=seeds
    )


def rows(vocab, kind):
    logits = torch.randn(len(KINDS), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "masked":
        logits[:, ::2] = -torch.inf
        logits[5] = logits[4] = -torch.inf
    if kind == "flat":
        logits = logits * 0 - 0.0
    return logits


def test_words():
    seeds, positions = torch.tensor([1, -5, 2**62, -(2**63)]), torch.tensor([0, 7, 2**35, 2**31])
    found = triton_noise.noise_words(seeds.to(DEVICE), positions.to(DEVICE), 1003)
    assert torch.equal(found.cpu(), philox.noise_words(seeds, positions, 1003))


@pytest.mark.parametrize("kind", ["plain", "ties", "masked", "flat"])
@pytest.mark.parametrize("vocab", [333, 4100])
def test_draw(vocab, kind):
    logits, positions = rows(vocab, kind), torch.arange(len(KINDS)) * 1001
    p = params(vocab, CPU)
    found = triton_race.race(logits.to(DEVICE), params(vocab, DEVICE), positions.to(DEVICE))
    token, *cut = (x.cpu() for x in found)
    expected, *expected_cut = cpu_race.race(logits, p, positions)
    assert torch.equal(token, expected)
    assert torch.equal(
        processed_logits(logits, p, *cut), processed_logits(logits, p, *expected_cut)
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("plain", torch.float32),
        ("ties", torch.bfloat16),
        ("masked", torch.float16),
        ("flat", torch.float32),
    ],
)
def test_draw_with_little_room(monkeypatch, kind, dtype):
    """Tiles and brackets far smaller than a row: many passes, and plateaus of ties that overflow.

    The kept entries may differ from the CPU's, whose sums are float64, by what rounding explains.
    """
    monkeypatch.setattr(triton_race, "TILE", 256)
    monkeypatch.setattr(triton_race, "BRACKET", 16)
    vocab, positions = 801, torch.arange(len(KINDS)) * 1001
    logits, p = rows(vocab, kind).to(dtype), params(vocab, CPU)
    found = triton_race.race(logits.to(DEVICE), params(vocab, DEVICE), positions.to(DEVICE))
    token, *cut = (x.cpu() for x in found)
    expected, *expected_cut = cpu_race.race(logits, p, positions)
    assert torch.equal(token, expected)
    kept = processed_logits(logits, p, *cut) > -torch.inf
    expected_kept = processed_logits(logits, p, *expected_cut) > -torch.inf
    temperature = torch.where(p.random(), p.temperature, 1.0)[:, None]
    mass = (logits.float() / temperature).softmax(dim=-1).nan_to_num()
    moved = kept ^ expected_kept
    # Under top-p alone; one entry at most, and only where its mass is next to nothing.
    assert not moved[p.top_p == 1.0].any()
    assert moved.sum(dim=-1).max() <= 1
    assert (mass * moved).max() < 2e-5


def test_ties_are_kept_in_entry_order(monkeypatch):
    """Plateaus of more equal logits than the bracket holds: the first entries are kept."""
    monkeypatch.setattr(triton_race, "TILE", 128)
    monkeypatch.setattr(triton_race, "BRACKET", 16)
    vocab = 512
    logits = torch.zeros(2, vocab)
    logits[:, 1::2] = 2.0
    top_k, top_p = [vocab, 300], [0.5, 1.0]
    p = RowParams.build(
        2, vocab, DEVICE, temperature=np.ones(2), top_k=np.array(top_k), top_p=np.array(top_p),
        min_p=np.zeros(2), seeds=np.arange(2),
    )  # fmt: skip
    _, cut_logit, cut_entry = triton_race.race(logits.to(DEVICE), p, torch.arange(2).to(DEVICE))
    # 256 entries weigh e**2 and 256 weigh 1: half of all mass is 145.3 of the first.
    assert cut_logit.tolist() == [2.0, 0.0]
    assert cut_entry.tolist() == [2 * 145 + 1, 2 * 43]


def test_scores():
    logits = rows(4100, "ties")
    tokens = torch.arange(len(KINDS)) * 7
    found = triton_scores.row_scores(logits.to(DEVICE), tokens.to(DEVICE), GROUP)
    top, log_sum, rank, leaders = (x.cpu() for x in found)
    expected = RowScores(logits, tokens)
    assert torch.equal(top, logits.amax(dim=-1))
    assert torch.equal(rank, expected.rank)
    assert torch.equal(leaders, expected._leaders)
    torch.testing.assert_close(top + log_sum, logits.logsumexp(dim=-1))  # other sums, other bits
