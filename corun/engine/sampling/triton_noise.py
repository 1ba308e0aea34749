# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917 -- a kernel takes its pointers and sizes by position
"""Philox words and exponential noise inside Triton kernels. Needs Triton."""

import torch
import triton
import triton.language as tl

from corun.engine.sampling.philox import QUAD, STREAM

_QUAD, _STREAM = tl.constexpr(QUAD), tl.constexpr(STREAM)
_LN2_PER_STEP = tl.constexpr(0.6931471805599453 / (1 << 23))


@triton.jit
def exponential(word):
    """Exponential noise (fp32, > 0) from 32-bit words: -log1p(-u) with u = (word + 0.5) / 2**32.

    The winning tail is u -> 0, where fp32 keeps all 32 bits (smallest value 2**-33); u is held
    below 1, so the value is finite. 1 - u = 2**e * (1 + f) with f in [-1/3, 1/3], where f is -u
    itself while e is 0; then a degree-9 polynomial for log(1 + f), relative error 2e-7.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # e << 23, for a mantissa in [2/3, 4/3)
    f = tl.where(exponent == 0, -u, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
    q = f * 0.1342574954032898 - 0.15040764212608337
    q = q * f + 0.14118309319019318
    q = q * f - 0.16483017802238464
    q = q * f + 0.20003780722618103
    q = q * f - 0.2500414550304413
    q = q * f + 0.33333319425582886
    q = q * f - 0.49999985098838806
    return -(exponent.to(tl.float32) * _LN2_PER_STEP + (f * f * q + f))


@triton.jit
def quad_words(seed, quads, position):
    """Philox words of quads (int32, any shape [..., Q]): shape [..., Q, 2, 2], in entry order."""
    low = tl.zeros_like(quads) + (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = tl.zeros_like(quads) + (position >> 32).to(tl.int32)
    stream = tl.zeros_like(quads) + _STREAM
    w0, w1, w2, w3 = tl.philox(seed, quads, low, high, stream)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def _noise_words(seeds_ptr, positions_ptr, words_ptr, entries, blocks, block: tl.constexpr):
    index = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    quads = index * (block // _QUAD) + tl.arange(0, block // _QUAD)
    words = quad_words(tl.load(seeds_ptr + row), quads, tl.load(positions_ptr + row))
    entry = index * block + tl.arange(0, block)
    words = tl.reshape(words, (block,)).to(tl.int64)
    tl.store(words_ptr + row * entries + entry, words, mask=entry < entries)


def noise_words(seeds: torch.Tensor, positions: torch.Tensor, entries: int) -> torch.Tensor:
    """What ``philox.noise_words`` returns, computed by the kernels' own code."""
    rows, block = seeds.shape[0], 1024
    blocks = triton.cdiv(entries, block)
    words = torch.empty((rows, entries), dtype=torch.int64, device=seeds.device)
    _noise_words[(rows * blocks,)](seeds, positions, words, entries, blocks, block=block)
    return words
