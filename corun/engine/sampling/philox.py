"""Philox4x32-10 (Salmon et al., SC'11), the counter-based generator behind every draw. Torch only.

A draw is a pure function of (seed, position, vocabulary entry): no state, nothing to rewind after a
discarded sample, nothing for a padding row to consume. key = the seed's low and high words; counter
= (entry // 4, position low, position high, STREAM); the four output words serve the four entries of
a quad. ``triton_noise`` computes the same words on a GPU.
"""

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
STREAM = 0x436F5275  # "CoRu": sampling noise; another use of the generator would take another word
QUAD = 4
_MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 of broadcastable int64 tensors that hold 32-bit words (0 to 2**32 - 1).

    int64 holds every 32 x 32 bit product modulo 2**64, so plain integer arithmetic is exact. Words
    1 and 3 keep their upper halves between rounds; they only ever enter a masked exclusive or.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK)
        c2 = ((product_0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK)
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + WEYL_0) & _MASK, (k1 + WEYL_1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def noise_words(seeds: torch.Tensor, positions: torch.Tensor, entries: int) -> torch.Tensor:
    """The 32-bit word of every vocabulary entry of every row.

    seeds, positions: [N] int64. entries: vocabulary size V. Returns [N, V] int64, each in
    [0, 2**32).
    """
    quads = torch.arange((entries + QUAD - 1) // QUAD, device=seeds.device)[None, :]
    words = philox4x32(_counter(quads, positions[:, None]), _key(seeds[:, None]))
    return torch.stack(words, dim=-1).flatten(1)[:, :entries]


def token_words(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The words of single entries: seeds, positions, tokens are [M] int64, as the result."""
    words = philox4x32(_counter(tokens // QUAD, positions), _key(seeds))
    return torch.stack(words, dim=-1).gather(-1, (tokens % QUAD)[:, None])[:, 0]


def _counter(quads: torch.Tensor, positions: torch.Tensor) -> Words:
    stream = torch.full_like(quads, STREAM)
    return quads, positions & _MASK, (positions >> 32) & _MASK, stream


def _key(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return seeds & _MASK, (seeds >> 32) & _MASK
