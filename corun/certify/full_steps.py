"""Step compositions that fill a step with long pieces: how much company a piece can have. Pure.

Kernels divide their work by everything that is in a step. (vLLM's CPU attention in float32 gives
two prompts of 1,000 tokens in one step other bits than each has alone, or beside a short one.) So
prompts, and decode rows far in, are tried in steps as full as an engine may have them.
"""

import random
from collections.abc import Iterator

from corun.certify.compositions import PACKED, Limits, Piece, Trial, last_row, shuffled

SHARES = ((1, 1), (3, 1), (1, 1, 1), (15, 1), (1, 1, 1, 1, 1, 1, 1))
"""How the first steps are divided among prompts; those that follow are divided at random."""
FEWEST = 2  # tokens of a prompt's piece: one alone runs as a decode row
PACKED_TURNS = 40
NEAR = 40  # tokens from a sequence's end
MANY_ROWS = 64  # decode rows beside a prompt, at most


def full_steps(
    rng: random.Random, turn: int, sizes: list[int], limits: Limits, *, distinct: bool
) -> Iterator[Trial]:
    """The trials of a turn: prompts together, one beside decode rows, and several beside them.

    The first turns fill the step. sizes: tokens of the sequences, the longest first. distinct: a
    sequence may stand in a step once only (its KV is computed there); else pieces of the first one
    stand for as many requests as are wanted, since every piece leaves the same KV behind.
    """
    most = min(limits.requests, len(sizes)) if distinct else limits.requests
    full = fullest(sizes, limits, distinct=distinct)
    if most < 2 or full < 2 * FEWEST:
        return
    total = full if turn < len(SHARES) else rng.randint(2 * FEWEST, full)
    if prompts := _prompts(rng, turn, sizes, total, most, distinct):
        yield Trial("batched_prefill", (shuffled(rng, prompts),), decode=False)
    rows = _decode_rows(rng, turn, sizes, min(most - 1, MANY_ROWS, total - FEWEST), distinct)
    rest = [sizes[0]] if not distinct else sizes[: len(sizes) - len(rows)]
    if rows and (one := _prompts(rng, turn, rest, total - len(rows), 1, distinct)):
        yield Trial("mixed", (shuffled(rng, [*rows, *one]),), decode=True)
    if rows and (two := _prompts(rng, turn, rest, total - len(rows), most - len(rows), distinct)):
        yield Trial("batched_prefill", (shuffled(rng, [*rows, *two]),), decode=True)


def packed_steps(sizes: list[int], limits: Limits) -> Iterator[Trial]:
    """Prompts packed in steps, without decode rows; pieces of the first sequence stand for all."""
    rng = random.Random(0)
    for turn in range(PACKED_TURNS):
        for trial in full_steps(rng, turn, sizes, limits, distinct=False):
            if trial.name == "batched_prefill" and not trial.decode:
                yield Trial(PACKED, trial.steps, decode=False)


def fullest(sizes: list[int], limits: Limits, *, distinct: bool) -> int:
    """Tokens in the fullest step that ``full_steps`` makes."""
    if distinct:
        return min(limits.step_tokens, sum(sizes[: limits.requests]))
    return min(limits.step_tokens, sizes[0] * limits.requests)


def _prompts(  # noqa: PLR0917
    rng: random.Random, turn: int, sizes: list[int], total: int, most: int, distinct: bool
) -> list[Piece]:
    """Pieces of `most` prompts or fewer, `total` tokens together where the sizes allow it."""
    shares: tuple[int, ...]
    if turn < len(SHARES):
        shares = SHARES[turn]
    else:
        shares = tuple(rng.randint(1, 8) for _ in range(rng.randint(2, 6)))
    shares = shares[: min(most, len(sizes)) if distinct else most]
    sources = list(range(len(shares))) if distinct else [0] * len(shares)
    wanted = [total * share // sum(shares) for share in shares]
    pieces: list[Piece] = []
    left = total
    while left >= FEWEST and (sources or (not distinct and len(pieces) < most)):
        # Where a request is too short for its share, more of them fill the step.
        source = sources.pop(0) if sources else 0
        tokens = min(max(FEWEST, wanted.pop(0) if wanted else left), sizes[source], left)
        if tokens >= FEWEST:
            pieces.append(_piece(rng, turn, source, tokens, sizes[source]))
            left -= tokens
        elif not sources:
            break
    return pieces


def _piece(rng: random.Random, turn: int, source: int, tokens: int, size: int) -> Piece:
    """A prompt's first tokens; in every third turn some that follow what is in the cache."""
    last = size - tokens
    start = rng.choice((last, rng.randint(0, last))) if turn % 3 == 2 else 0
    return Piece(source, start, start + tokens)


def _decode_rows(
    rng: random.Random, turn: int, sizes: list[int], most: int, distinct: bool
) -> list[Piece]:
    """One to `most` rows: last ones, or (not distinct) any but the first of the long sequence.

    In even turns they are near its end: there they are most work.
    """
    if most < 1:
        return []
    count = (most, most, 1, max(1, most // 2))[turn] if turn < 4 else rng.randint(1, most)
    if distinct:
        able = [i for i in range(1, len(sizes)) if sizes[i] > 1][::-1]
        return [last_row(sizes, i) for i in able[:count]]
    end = sizes[0] - 1
    if end < 1:
        return []
    first = max(1, end - NEAR) if turn % 2 == 0 else 1
    return [
        Piece(0, at, at + 1) for at in (end, *(rng.randint(first, end) for _ in range(count - 1)))
    ]
