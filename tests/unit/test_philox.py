"""Philox4x32-10 against Random123's known answers, and the way draws are addressed."""

import random

import pytest
import torch

from corun.engine.sampling.philox import STREAM, noise_words, philox4x32, token_words

ONES = 0xFFFFFFFF
# Random123 1.14, tests/kat_vectors: philox4x32 10 rounds: counter, key, expected.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference(counter, key):
    """Philox4x32-10 in Python's integers, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & ONES, (a >> 32) ^ c3 ^ k1, a & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


def tensors(values):
    return tuple(torch.tensor([v]) for v in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert tuple(int(w) for w in philox4x32(tensors(counter), tensors(key))) == expected
    assert reference(counter, key) == expected


def test_random_counters():
    rng = random.Random(0)
    drawn = [[rng.getrandbits(32) for _ in range(6)] for _ in range(2000)]
    columns = torch.tensor(drawn).T
    words = torch.stack(philox4x32(tuple(columns[:4]), tuple(columns[4:]))).T.tolist()
    assert words == [list(reference(d[:4], d[4:])) for d in drawn]


def test_address_of_a_draw():
    """Word i is output i % 4 of counter (i // 4, position low, position high, STREAM)."""
    seeds, positions = [5, -1, -(2**63), 2**62 + 7], [0, 3, 2**31, 2**35 + 1]
    words = noise_words(torch.tensor(seeds), torch.tensor(positions), 11).tolist()
    for seed, position, row in zip(seeds, positions, words, strict=True):
        key = (seed & ONES, (seed >> 32) & ONES)
        for i, word in enumerate(row):
            counter = (i // 4, position & ONES, position >> 32, STREAM)
            assert word == reference(counter, key)[i % 4]


def test_token_words_are_entries_of_noise_words():
    seeds = torch.randint(-(2**62), 2**62, (40,))
    positions = torch.randint(0, 2**40, (40,))
    tokens = torch.randint(0, 1003, (40,))
    table = noise_words(seeds, positions, 1003)
    assert torch.equal(
        token_words(seeds, positions, tokens), table.gather(1, tokens[:, None])[:, 0]
    )


def test_rows_do_not_see_each_other():
    seeds, positions = torch.arange(9) * 977, torch.arange(9) * 31
    table = noise_words(seeds, positions, 501)
    for row in range(9):
        alone = noise_words(seeds[row : row + 1], positions[row : row + 1], 501)
        assert torch.equal(alone[0], table[row])


def test_words_are_spread_evenly():
    """Every bit of 400,000 words is set half of the time, and neighbours agree half of the time."""
    words = noise_words(torch.arange(100), torch.arange(100) % 7, 4000).flatten()
    bits = (words[:, None] >> torch.arange(32)) & 1
    agree = bits[1:] == bits[:-1]
    spread = 5 * 0.5 / len(words) ** 0.5  # five standard deviations
    assert float((bits.double().mean(0) - 0.5).abs().max()) < spread
    assert float((agree.double().mean(0) - 0.5).abs().max()) < spread
