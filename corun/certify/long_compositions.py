"""Step compositions of one long sequence: what must be equal of attention rows far in. Torch only.

As in ``corun.certify.compositions``, but as long as a request may be: kernels change with the KV's
length too. (vLLM's CPU attention in float32 adds up a prompt's rows otherwise from about 1,400
tokens on, and then a row depends on where its prompt was cut.) The reference is the sequence whole
and alone; every other step holds little of it, since its KV does not depend on how it is computed.
For attention by itself, where keys and values are given; of latent attention for the whole model.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from corun.certify import lockstep
from corun.certify.certificate import StepClaim
from corun.certify.compositions import Limits, Piece, Trial, last_row, shuffled
from corun.certify.full_steps import full_steps, fullest, packed_steps
from corun.certify.trial import Run, TrialBench

OTHERS = (400, 129, 65, 33, 17, 9, 2)
"""Lengths of the sequences that stand beside the long one."""

FULL_TURNS, FULL_EVERY = 40, 2
"""Full steps are tried in the first turns, and then every so often: they take longest."""
PACKED_LEAST = 12  # steps of pack tried whatever the time
MARGIN = 5 / 4
"""Where the KV is given, sequences are tried so much longer than a request may be: near the length
from which a kernel divides its work otherwise, few compositions show it."""
CHUNKS = (2, 9, 16, 17, 40, 64, 65, 129, 200, 500)
TURNS = 2000  # enough values also where a row has few


def long_sizes(limits: Limits, longest: int, *, distinct: bool = False) -> list[int]:
    """Lengths of the sequences, the long one first: as long as a request may be, or `longest`.

    longest: tokens of KV that there is room for. distinct: see ``full_steps``; then two more that
    fill a step stand behind the first, where there is room.
    """
    others = [n for n in OTHERS if n <= limits.step_tokens][: max(0, limits.requests - 1)]
    first = max(1, min(limits.sequence_tokens, longest - sum(others)))
    half = min(first, limits.step_tokens // 2)
    room = longest - sum(others) - first >= 2 * half and half > max(others, default=0)
    more = [half, half] if distinct and room else []
    return [first, *more, *others][: max(1, limits.requests)]


def long_trials(sizes: list[int], limits: Limits, *, distinct: bool = False) -> Iterator[Trial]:
    """Every trial, the kinds by turns. distinct: see ``full_steps``."""
    size, others = sizes[0], range(1, len(sizes))
    rng = random.Random(0)
    for turn in range(TURNS):
        if turn < FULL_TURNS or turn % FULL_EVERY == 0:
            yield from full_steps(rng, turn, sizes, limits, distinct=distinct)
        at = _position(rng, size, turn)
        yield Trial("decode_is_prefill", ((Piece(0, at, at + 1),),), decode=False)
        tokens = min(CHUNKS[turn % len(CHUNKS)], size - 1, limits.step_tokens)
        start = min(at, size - tokens)
        if tokens > 1 and start > 0:
            chunk = Piece(0, start, start + tokens)
            yield Trial("chunks", ((chunk,),), decode=False)
            if beside := [i for i in others if sizes[i] <= limits.step_tokens - tokens]:
                prompt = _whole(sizes, rng.choice(beside))
                yield Trial("batched_prefill", (shuffled(rng, [chunk, prompt]),), decode=False)
        if others and size > 1:
            last = last_row(sizes, 0)
            rows = [last_row(sizes, i) for i in rng.sample(others, rng.randint(1, len(others)))]
            yield Trial("decode_rows", (shuffled(rng, [last, *rows]),), decode=True)
            if prompts := [i for i in others if sizes[i] < limits.step_tokens]:
                prompt = _whole(sizes, prompts[turn % len(prompts)])
                yield Trial("mixed", (shuffled(rng, [last, prompt]),), decode=True)


def _position(rng: random.Random, size: int, turn: int) -> int:
    """A position: the last, around powers of two, or any, the far half more often."""
    powers = [p + d for k in range(9, size.bit_length()) for p in (1 << k,) for d in (-1, 0, 1)]
    known = [size - 1, size // 2, *reversed(powers)]
    found = known[turn] if turn < len(known) else rng.randrange(size // 2 if turn % 3 else 0, size)
    return max(0, min(found, size - 1))


def _whole(sizes: list[int], sequence: int) -> Piece:
    return Piece(sequence, 0, sizes[sequence])


def long_claims(
    operation: str,
    made: Callable[[list[int]], Run],
    limits: Limits,
    longest: int,
    budget_s: float,
    *,
    given_kv: bool = True,
    least: int = 1,
) -> tuple[list[StepClaim], int, int]:
    """The claims about `operation` with a long sequence, its tokens, and those of the fullest step.

    made: makes the function that runs a step, of the sequences' sizes. given_kv, least: see
    ``TrialBench``. Where the device's memory does not hold the sequence's rows, one of half the
    length is tried.
    """
    while True:
        further = math.ceil(limits.sequence_tokens * (MARGIN if given_kv else 1))
        tried = replace(limits, sequence_tokens=further)
        sizes = long_sizes(tried, longest, distinct=not given_kv)
        try:
            bench = TrialBench(operation, made(sizes), sizes, given_kv=given_kv)
            trials = long_trials(sizes, tried, distinct=not given_kv)
            claims = bench.work(trials, budget_s, least)
            reached = min(sizes[0], limits.sequence_tokens)
            return claims, reached, fullest(sizes, tried, distinct=not given_kv)
        except torch.OutOfMemoryError:
            if sizes[0] <= limits.step_tokens or lockstep.several():  # others may have had room
                raise
            longest = sizes[0] // 2 + sum(sizes[1:])


def packed_claims(
    operation: str, made: Callable[[list[int]], Run], limits: Limits, longest: int, budget_s: float
) -> list[StepClaim]:
    """The claim about attention in the steps of ``pack``; arguments as of ``long_claims``.

    A prompt has up to a step's tokens in the cache there, as in its second chunk.
    """
    size = min(2 * limits.step_tokens, limits.sequence_tokens, longest)
    bench = TrialBench(operation, made([size]), [size], given_kv=True)
    return bench.work(packed_steps([size], limits), budget_s, PACKED_LEAST)
