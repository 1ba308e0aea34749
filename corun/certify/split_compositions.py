"""Step compositions for split decode: what must be equal of rows that are split.

As in ``corun.certify.compositions``, but with sequences longer than what is left unsplit, each with
a prompt of its own length: rows past it are split rows, whether decoded or recomputed in a chunk.
The reference is again the sequence computed whole and alone, as after a preemption.

Latent attention (MLA) has another algorithm for prompts, so its plans recompute nothing, and a
split row is only ever decoded. There the reference is the row decoded alone (``decoded_trials``).
"""

import random
from collections.abc import Callable, Iterator

from corun.certify.certificate import StepClaim
from corun.certify.compositions import LENGTHS, PROPERTIES, Limits, Piece, Trial
from corun.certify.trial import Run, TrialBench

# How far the long sequences reach past what is never split.
PAST = (952, 600, 300, 130, 65, 17, 2)
SHORT = 33  # sequences without split rows, to stand beside the others
CROWDS = 100
CHUNKS = (2, 5, 17, 40, 64, 65, 200, 500)
PROMPTS = (2, 9, 17, 64, 65, 129, 400, 512, 513, 700, 1500)
"""Tokens of prompts beside rows of latent attention, which takes those of more than 512 apart."""
SEVERAL = 3  # prompts beside such rows


def split_lengths(limits: Limits, beyond: int, *, decoded: bool = False) -> list[int]:
    """Lengths of the sequences, long ones first; empty where the engine cannot hold enough of them.

    beyond: tokens of KV up to which no row is split. decoded: for ``decoded_trials``; then there is
    one as long as a step and a sequence may be, where it fits.
    """
    longest = min(limits.step_tokens, limits.sequence_tokens)
    long = [beyond + n for n in PAST if beyond + n <= longest]
    short = [LENGTHS[i % len(LENGTHS)] for i in range(min(SHORT, limits.requests))]
    if len(long) < 2 or sum(long + short) > limits.kv_tokens // 2:
        return []
    if decoded and longest > long[0] and sum([longest, *long, *short]) <= limits.kv_tokens // 2:
        long.insert(0, longest)
    return long + [n for n in short if n <= longest]


def split_prompts(sizes: list[int], beyond: int) -> list[int]:
    """Tokens in each sequence's prompt: of a long one less, as many, or more than `beyond`."""
    return [
        (1, beyond + (size - beyond) // 2, beyond, beyond // 2)[i % 4] if size > beyond else size
        for i, size in enumerate(sizes)
    ]


def split_trials(
    sizes: list[int], prompts: list[int], limits: Limits, beyond: int
) -> Iterator[Trial]:
    """Every trial, the kinds by turns."""
    bench = _Bench(sizes, prompts, limits, beyond)
    return _by_turns(
        [bench.alone(), bench.crowds(), bench.recomputed(), bench.beside(), bench.together()]
    )


def decoded_trials(
    sizes: list[int], prompts: list[int], limits: Limits, beyond: int
) -> Iterator[Trial]:
    """As ``split_trials``, where a split row is only ever decoded: its sequence's last."""
    bench = _Bench(sizes, prompts, limits, beyond)
    several = min(SEVERAL, limits.requests - 1)
    kinds = [bench.beside_prompts(n) for n in sorted({1, several}) if 0 < n <= several]
    return _by_turns([bench.last_rows(), *kinds])


def _by_turns(kinds: list[Iterator[Trial]]) -> Iterator[Trial]:
    while kinds:
        for kind in list(kinds):
            trial = next(kind, None)
            if trial is None:
                kinds.remove(kind)
            else:
                yield trial


class _Bench:
    """The kinds of trials; `first` is each long sequence's first split position."""

    def __init__(self, sizes: list[int], prompts: list[int], limits: Limits, beyond: int) -> None:
        self.sizes, self.limits = sizes, limits
        self.first = {
            i: max(prompt, beyond)
            for i, (size, prompt) in enumerate(zip(sizes, prompts, strict=True))
            if size > max(prompt, beyond)
        }
        self.rng = random.Random(0)

    def _edges(self, i: int) -> list[int]:
        first, size = self.first[i], self.sizes[i]
        return [at for at in sorted({first - 1, first, first + 1, size - 1}) if at < size]

    def _row(self, i: int, at: int) -> Piece:
        return Piece(i, at, at + 1)

    def alone(self) -> Iterator[Trial]:
        """One row by itself: decoded, against recomputed."""
        for i in self.first:
            for at in self._edges(i):
                yield Trial("decode_is_prefill", ((self._row(i, at),),), decode=False)

    def _several(self, turn: int) -> list[int]:
        """Some of the long sequences, and in every other turn some that have no split row."""
        long, every = list(self.first), range(len(self.sizes))
        most = min(self.limits.requests, len(every), self.limits.step_tokens)
        several = self.rng.sample(long, self.rng.randint(1, min(len(long), most)))
        others = [i for i in every if i not in self.first]
        room = min(most - len(several), len(others)) if turn % 2 else 0
        several += self.rng.sample(others, self.rng.randint(0, room))
        self.rng.shuffle(several)
        return several

    def last_rows(self) -> Iterator[Trial]:
        """Last rows in crowds and at any place, with and without others that are not split."""
        for turn in range(CROWDS):
            rows = tuple(self._row(i, self.sizes[i] - 1) for i in self._several(turn))
            yield Trial("decode_rows", (rows,), decode=True)

    def beside_prompts(self, prompts: int) -> Iterator[Trial]:
        """Last rows beside a prompt, or a part of one that has its beginning in the cache.

        prompts: how many; several have nothing in the cache.
        """
        name = "mixed" if prompts == 1 else "batched_prefill"
        ends = [self.first.get(i, size) for i, size in enumerate(self.sizes)]
        for turn, tokens in enumerate(PROMPTS * 2):
            # A prompt of one token is another prompt, not a decode row.
            several = [i for i in self._several(turn) if self.sizes[i] > 1]
            decoded = several[: max(0, self.limits.requests - prompts)]
            left = self.limits.step_tokens - len(decoded)
            able = [i for i in range(len(ends)) if i not in decoded]
            self.rng.shuffle(able)
            step: list[Piece] = []
            for i in sorted(able, key=lambda i: ends[i] < tokens):
                n = min(tokens, left, ends[i])
                if n > 1 and len(step) < prompts:
                    start = self.rng.choice((0, ends[i] - n)) if prompts == 1 else 0
                    step.append(Piece(i, start, start + n))
                    left -= n
            rows = [self._row(i, self.sizes[i] - 1) for i in decoded]
            if any(i in self.first for i in decoded) and len(step) == prompts:
                yield Trial(name, ((*rows, *step),), decode=True)

    def crowds(self) -> Iterator[Trial]:
        """Rows in crowds and at any place, with and without others that are not split."""
        for turn in range(CROWDS):
            several = self._several(turn)
            rows = tuple(self._row(i, self.sizes[i] - 1) for i in several)
            yield Trial("decode_rows", (rows,), decode=True)
            rows = tuple(
                self._row(i, self.rng.choice(self._edges(i)))
                if i in self.first
                else self._row(i, self.rng.randrange(self.sizes[i]))
                for i in several
            )
            yield Trial("decode_is_prefill", (rows,), decode=False)

    def recomputed(self) -> Iterator[Trial]:
        """A sequence in two chunks, cut around its first split row and past it."""
        for i, first in self.first.items():
            size = self.sizes[i]
            for cut in sorted({64, first - 1, first, first + 1, first + 17, size - 2}):
                if 1 < cut < size - 1:
                    steps = ((Piece(i, 0, cut),), (Piece(i, cut, size),))
                    yield Trial("chunks", steps, decode=False, anew=True)

    def beside(self) -> Iterator[Trial]:
        """Rows decoded beside a chunk: of another's prompt, or itself of split rows."""
        long = list(self.first)
        others = [i for i, n in enumerate(self.sizes) if i not in self.first and n > 1]
        for turn, tokens in enumerate(CHUNKS * 2):
            source = long if turn % 2 or not others else others
            i = source[turn % len(source)]
            length = min(tokens, self.sizes[i])
            start = max(0, self.first.get(i, 0) - length // 2)
            chunk = Piece(i, start, min(start + length, self.sizes[i]))
            room = min(self.limits.requests - 1, self.limits.step_tokens - chunk.tokens)
            decoded = [n for n in long if n != i][:room]
            if decoded and chunk.tokens > 1:
                rows = [self._row(n, self.sizes[n] - 1) for n in decoded]
                yield Trial("mixed", ((*rows, chunk),), decode=True)

    def together(self) -> Iterator[Trial]:
        """Chunks of several sequences in one step, each with split rows."""
        for _ in range(12):
            step: list[Piece] = []
            for i in self.rng.sample(list(self.first), len(self.first)):
                start = self.first[i] - self.rng.choice((0, 1, 5, 40))
                piece = Piece(i, min(start, self.sizes[i] - 2), self.sizes[i])
                tokens = sum(p.tokens for p in step) + piece.tokens
                if len(step) < self.limits.requests and tokens <= self.limits.step_tokens:
                    step.append(piece)
            yield Trial("batched_prefill", (tuple(step),), decode=False)


def split_claims(
    operation: str,
    made: Callable[[list[int], list[int]], Run],
    limits: Limits,
    beyond: int,
    budget_s: float,
    *,
    decoded: bool = False,
) -> list[StepClaim]:
    """The claims about `operation`'s split rows, each on values of its own.

    made: makes the function that runs a step, of (sizes, prompts). decoded: a split row is only
    ever decoded (``decoded_trials``). Where the engine cannot hold sequences that are long enough
    no property is shown to hold.
    """
    sizes = split_lengths(limits, beyond, decoded=decoded)
    if not sizes:
        why = (
            f"no row of more than {beyond} tokens could be tried: steps hold {limits.step_tokens} "
            f"tokens, sequences {limits.sequence_tokens}, the KV cache {limits.kv_tokens}"
        )
        return [StepClaim(operation, name, False, 0, 0, why) for name in PROPERTIES]
    prompts = split_prompts(sizes, beyond)
    bench = TrialBench(operation, made(sizes, prompts), sizes)
    found = (decoded_trials if decoded else split_trials)(sizes, prompts, limits, beyond)
    return bench.work(found, budget_s)
