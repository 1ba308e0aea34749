"""Step compositions: which pieces of which sequences run in one step, and what must be equal. Pure.

Row classes say that GEMMs and the like give a row the same bits at some row counts. Attention is no
function of one row, so it is tested by what a scheduler could do: the same sequences are run in
many compositions of steps, and every row is compared with the one that the sequence has when it is
prefilled whole and alone (or decoded alone).
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

PROPERTIES = {
    "decode_rows": "a decode row beside other decode rows",
    "decode_is_prefill": "a decode row against the same row of a prefill",
    "chunks": "a prompt cut in chunks",
    "batched_prefill": "a prompt beside other prompts",
    "mixed": "decode rows beside a prompt's chunk",
}
PACKED = "packed_prefill"
"""As "batched_prefill", of the steps of ``pack``, which all have ``max_num_batched_tokens`` rows.
Tried where shape classes keep the steps of ``certified`` shorter."""
WORDS = {**PROPERTIES, PACKED: "a prompt beside other prompts, in the steps of pack"}
# Prompt lengths beside which decode rows are tried: each up to 40 (FlashAttention 3 takes another
# tile from 65 packed query rows on: 10 tokens at GQA ratio 7), then around powers of two.
BESIDE = (*range(2, 41), 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 500, 512, 1000)
TOGETHER = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200)
RANDOM_TRIALS = 200
LEAST_SEQUENCES = 24
LENGTHS = (1, 2, 3, 7, 17, 33, 64, 65, 100, 129, 200, 257, 400, 700)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` (not included) of one sequence; what is before is in the cache."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.stop - self.start


Step = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Steps to run one after the other; every row of them is compared.

    name: one of PROPERTIES. decode: whether rows of one-token pieces are compared with the row
    decoded alone (else with the prefill's). anew: whether the steps compute all that they read
    (else what comes before their pieces is what the whole prefill left).
    """

    name: str
    steps: tuple[Step, ...]
    decode: bool
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold: tokens and requests in a step, tokens of KV cache, of a sequence."""

    step_tokens: int
    requests: int
    kv_tokens: int
    sequence_tokens: int


def lengths(limits: Limits, thorough: bool) -> list[int]:
    """Lengths of the sequences that the trials use, shortest last; they fit the KV cache twice.

    thorough: more and longer ones (for a GPU). The first is the longest, and spans several steps'
    worth of KV blocks; the many short ones at the end fill decode steps.
    """
    longest = min(limits.step_tokens, limits.sequence_tokens, 3000 if thorough else 600)
    chosen = [longest, *(n for n in reversed(LENGTHS) if n < longest)]
    budget = limits.kv_tokens // 2 - sum(chosen)
    while budget < 0 and len(chosen) > 2:
        budget += chosen.pop(0)
    others = 0
    while len(chosen) < max(limits.requests, LEAST_SEQUENCES) and budget > 40:
        chosen.append(min(longest, 18 + others * 7 % 23))
        budget -= chosen[-1]
        others += 1
    return chosen


def trials(sizes: list[int], limits: Limits, thorough: bool) -> Iterator[Trial]:
    """Every trial over sequences of `sizes` tokens, the kinds by turns."""
    kinds = [
        _decode_rows(sizes, limits),
        _decode_is_prefill(sizes, limits),
        _batched(sizes, limits),
        _chunks(sizes, limits, thorough),
        _mixed(sizes, limits),
    ]
    for turn in itertools.zip_longest(*kinds):
        yield from (trial for trial in turn if trial is not None)


def shuffled(rng: random.Random, pieces: list[Piece]) -> Step:
    """A step of these pieces, in any order."""
    return tuple(rng.sample(pieces, len(pieces)))


def last_row(sizes: list[int], sequence: int) -> Piece:
    """A sequence's last token."""
    return Piece(sequence, sizes[sequence] - 1, sizes[sequence])


def _decode_rows(sizes: list[int], limits: Limits) -> Iterator[Trial]:
    able, most = list(range(len(sizes))), min(len(sizes), limits.requests)
    some = sorted({n for n in (*TOGETHER, most) if n <= most})
    chosen = [some, some[::-1]]
    rng = random.Random(0)
    if most > 1:  # with one request at a time there is nothing beside it
        chosen.append([rng.randint(2, most) for _ in range(RANDOM_TRIALS)])
    for together in itertools.chain(*chosen):
        step = tuple(last_row(sizes, i) for i in rng.sample(able, together))
        yield Trial("decode_rows", (step,), decode=True)


def _decode_is_prefill(sizes: list[int], limits: Limits) -> Iterator[Trial]:
    alone = [
        (Piece(i, at, at + 1),)
        for i, size in enumerate(sizes[: len(LENGTHS) + 1])
        for at in sorted({size - 1, size // 2, min(16, size - 1)})
    ]
    # Every sequence at once, each at another position from its end.
    crowds = [
        tuple(Piece(i, sizes[i] - back, sizes[i] - back + 1) for i in chosen[: limits.requests])
        for back in range(1, 41)
        if (chosen := [i for i, size in enumerate(sizes) if size > back])
    ]
    for turn in itertools.zip_longest(alone, crowds[::2], crowds[1::2]):
        yield from (Trial("decode_is_prefill", (step,), decode=False) for step in turn if step)


def _batched(sizes: list[int], limits: Limits) -> Iterator[Trial]:
    every = list(range(len(sizes)))
    turned = [every[i:] + every[:i] for i in range(1, min(len(every), 24))]
    for order in (every, every[::-1], *turned):
        step: list[Piece] = []
        for i in order:
            full = sum(p.tokens for p in step) + sizes[i] > limits.step_tokens
            if step and (full or len(step) == limits.requests):
                break
            if sizes[i] <= limits.step_tokens:
                step.append(Piece(i, 0, sizes[i]))
        yield Trial("batched_prefill", (tuple(step),), decode=False)
    for i in range(1, min(len(sizes) - 1, 40)):
        if sizes[i] + sizes[i + 1] <= limits.step_tokens and limits.requests > 1:
            pair = (Piece(i, 0, sizes[i]), Piece(i + 1, 0, sizes[i + 1]))
            yield Trial("batched_prefill", (pair,), decode=False)
            # The same behind what is in the cache, as after a cut or a cache hit.
            later = tuple(
                Piece(p.sequence, p.stop * (1 + n) // 3, p.stop)
                for n, p in enumerate(pair)
                if p.stop * (1 + n) // 3 < p.stop - 1
            )
            if len(later) > 1:
                yield Trial("batched_prefill", (later,), decode=False)


def _chunks(sizes: list[int], limits: Limits, thorough: bool) -> Iterator[Trial]:
    long = [i for i, size in enumerate(sizes) if size > 8][:40]
    for i in long:
        size = sizes[i]
        cuts = {2, 15, 16, 17, size // 2, size - 2, *((64, 128, 129, 512) if thorough else (64,))}
        for cut in sorted(c for c in cuts if 1 < c < size - 1):
            yield Trial("chunks", ((Piece(i, 0, cut),), (Piece(i, cut, size),)), False, anew=True)
    if long:
        i, size = long[0], sizes[long[0]]
        edges = [*range(0, size - 1, max(2, size // 5)), size]
        if edges[-1] - edges[-2] < 2:
            edges.pop(-2)
        steps = tuple((Piece(i, a, b),) for a, b in itertools.pairwise(edges))
        yield Trial("chunks", steps, decode=False, anew=True)


def _mixed(sizes: list[int], limits: Limits) -> Iterator[Trial]:
    prompt = 0
    decoding = [i for i in range(1, len(sizes)) if sizes[i] > 1]
    for length in BESIDE:
        most = 12 if length % 2 else limits.requests - 1  # few and many by turns
        beside = min(len(decoding), most, limits.requests - 1, limits.step_tokens - length)
        if length > sizes[prompt] or beside < 1:
            continue
        chosen = [decoding[(length * 3 + i) % len(decoding)] for i in range(beside)]
        decode = tuple(last_row(sizes, i) for i in chosen)
        for start in {0, (sizes[prompt] - length) // 2}:
            yield Trial("mixed", ((*decode, Piece(prompt, start, start + length)),), decode=True)
