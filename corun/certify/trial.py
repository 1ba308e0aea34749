"""Runs trials and turns them into claims. Torch only; the engine gives the function that runs."""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from corun.certify import lockstep
from corun.certify.certificate import StepClaim
from corun.certify.compositions import PACKED, WORDS, Piece, Step, Trial
from corun.certify.probe import MIN_VALUES, bits, mismatches

HOME, SCRATCH = 0, 1
_COMPANY = ("batched_prefill", "mixed", PACKED)
Run = Callable[[Step, int], list[torch.Tensor]]
"""Runs one step: (step, place of its KV cache) -> the rows of each piece, [tokens, width]."""


class TrialBench:
    """One operation, its reference rows, and what became of every trial.

    run: see ``Run``. sizes: tokens of each sequence. Sequences are prefilled whole and alone at
    place HOME, where everything else finds what comes before it; what computes all of it anew runs
    at SCRATCH.

    A row that was computed otherwise than by that prefill may leave other KV behind. Once a trial
    shows a difference, its property is refuted, is not tried again, and the sequences that it
    touched are prefilled anew: what it left behind must not speak against another property.
    given_kv: keys and values are given, not computed, so nothing else is ever left behind.
    """

    def __init__(
        self, operation: str, run: Run, sizes: list[int], *, given_kv: bool = False
    ) -> None:
        self.operation, self._run, self._given_kv = operation, run, given_kv
        self._prefill = [bits(run((Piece(i, 0, n),), HOME)[0]) for i, n in enumerate(sizes)]
        last = [Piece(i, n - 1, n) for i, n in enumerate(sizes)]
        self._decode = {p: bits(run((p,), HOME)[0]) for p in last if p.start > 0}
        self._sizes = sizes
        self._wrong: dict[str, str] = {}
        self._values: dict[str, int] = {}
        self._trials: dict[str, int] = {}

    def work(self, trials: Iterable[Trial], budget_s: float, least: int = 1) -> list[StepClaim]:
        """Run `trials`, the properties by turns; a claim for each property tried.

        First those of properties with fewer than `least` trials or MIN_VALUES values; one that ends
        with fewer values is not shown to hold. Then all others until `budget_s` seconds are over.
        """
        started = lockstep.now()
        queue = _Queue(trials)
        while waiting := [n for n in WORDS if n not in self._wrong and queue.has(n)]:
            few = [n for n in waiting if self._few(n, least)]
            if not few and lockstep.now() - started > budget_s:
                break
            self._one(queue.take(min(few or waiting, key=lambda n: self._trials.get(n, 0))))
        return [self._claim(name) for name in WORDS if name in self._trials]

    def _few(self, name: str, least: int) -> bool:
        return self._trials.get(name, 0) < least or self._values[name] < MIN_VALUES

    def _one(self, trial: Trial) -> None:
        self._trials[trial.name] = self._trials.get(trial.name, 0) + 1
        place = SCRATCH if trial.anew else HOME
        counts: list[tuple[torch.Tensor | int, torch.Tensor, Step, Piece]] = []
        for step in trial.steps:
            for piece, rows in zip(step, self._run(step, place), strict=True):
                found = bits(rows)
                self._values[trial.name] = self._values.get(trial.name, 0) + found.numel()
                wrong = mismatches(found, self._expected(trial, piece, place))
                counts.append((wrong, found, step, piece))
        totals = lockstep.total([int(wrong) for wrong, *_ in counts])
        for wrong, (_, found, step, piece) in zip(totals, counts, strict=True):
            differing = wrong
            if wrong and piece.start == 0 and self._is_chunk_in_company(trial, piece):
                (differing,) = lockstep.total([int(mismatches(found, self._alone(piece, place)))])
            if differing:
                words = _words(trial, step, piece, self._sizes)
                self._wrong[trial.name] = f"{differing} values of {words}"
                self._restore({p.sequence for step in trial.steps for p in step})
                return

    def _restore(self, sequences: set[int]) -> None:
        """Prefill them whole and alone at HOME, as at first, where that may change anything."""
        for i in () if self._given_kv else sorted(sequences):
            self._run((Piece(i, 0, self._sizes[i]),), HOME)

    def _expected(self, trial: Trial, piece: Piece, place: int) -> torch.Tensor:
        last = piece.stop == self._sizes[piece.sequence]
        if trial.decode and piece.tokens == 1 and piece.start > 0 and (last or self._given_kv):
            return self._decoded(piece)
        if piece.start > 0 and self._is_chunk_in_company(trial, piece):
            return self._alone(piece, place)
        return self._prefill[piece.sequence][piece.start : piece.stop]

    def _decoded(self, row: Piece) -> torch.Tensor:
        """The bits of a row that is decoded alone."""
        if row not in self._decode:
            self._decode[row] = bits(self._run((row,), HOME)[0])
        return self._decode[row]

    def _is_chunk_in_company(self, trial: Trial, piece: Piece) -> bool:
        """Whether it is compared with itself alone, where it is unlike the uncut prompt's rows.

        Whether company changes a chunk is one question; whether cutting the prompt there does,
        which "chunks" asks, another.
        """
        cut = piece.tokens < self._sizes[piece.sequence]
        return trial.name in _COMPANY and piece.tokens > 1 and cut

    def _alone(self, piece: Piece, place: int) -> torch.Tensor:
        """The bits that a chunk has alone."""
        alone = bits(self._run((piece,), place)[0])
        whole = self._prefill[piece.sequence][piece.start : piece.stop]
        if any(lockstep.total([int(mismatches(alone, whole))])):
            self._restore({piece.sequence})
        return alone

    def _claim(self, name: str) -> StepClaim:
        example = self._wrong.get(name)
        if example is None and self._values[name] < MIN_VALUES:
            example = f"only {self._values[name]} values could be compared, not {MIN_VALUES}"
        return StepClaim(
            self.operation,
            name,
            example is None,
            self._trials[name],
            self._values[name],
            example,
        )


class _Queue:
    """A stream of trials, from which the next one of any property can be taken."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._stream = iter(trials)
        self._passed: dict[str, deque[Trial]] = {}

    def has(self, name: str) -> bool:
        """Whether there is another trial of this property."""
        while not self._passed.get(name):
            if (trial := next(self._stream, None)) is None:
                return False
            self._passed.setdefault(trial.name, deque()).append(trial)
        return True

    def take(self, name: str) -> Trial:
        """The next one of a property that ``has`` another."""
        return self._passed[name].popleft()


def _words(trial: Trial, step: Step, piece: Piece, sizes: list[int]) -> str:
    size = sizes[piece.sequence]
    if piece.tokens == 1 and piece.start > 0:
        what = f"the row decoded at position {piece.start}"
    else:
        what = f"tokens {piece.start} to {piece.stop - 1} of a prompt of {size}"
    longest = max((p for p in step if p is not piece), key=lambda p: p.tokens, default=None)
    if longest is None:
        return f"{what}, alone"
    return f"{what}, beside {len(step) - 1} others, the longest of {longest.tokens} tokens"
