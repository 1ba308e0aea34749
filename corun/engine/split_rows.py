"""Which rows of a step are split rows, by each row's own facts. NumPy only.

A request's token at position p (0-based) has a KV length of p + 1, its own token included. Its row
is split if p is not among the request's first ``unsplit(prompt, beyond)`` positions: those of its
prompt, and those up to `beyond`. So the same token is always computed the same way, as a decode
step's row or in a chunk that is recomputed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


def unsplit(prompt: int, beyond: int) -> int:
    """How many leading positions of a request are never split rows."""
    return max(prompt, beyond)


@dataclass(frozen=True)
class StepRows:
    """The requests of a step, in the runner's order; each array int32 [N].

    prompts: tokens in a request's prompt. begins, ends: positions that the step computes of it.
    """

    prompts: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, prompts: list[int], spans: list[tuple[int, int]]) -> "StepRows":
        """From lists; spans: (begin, end) of each request."""
        both = np.array(spans, dtype=np.int32).reshape(-1, 2)
        return cls(np.array(prompts, dtype=np.int32), both[:, 0], both[:, 1])

    def first(self, count: int) -> "StepRows":
        """The first `count` requests, or all where there are fewer."""
        return StepRows(self.prompts[:count], self.begins[:count], self.ends[:count])

    def limits(self, beyond: int) -> np.ndarray:
        """``unsplit`` of each request."""
        return np.maximum(self.prompts, np.int32(beyond))

    def any_split(self, beyond: int) -> bool:
        """Whether the step has a split row."""
        return bool((self.ends > self.limits(beyond)).any())


class SplitTokens(NamedTuple):
    """The split rows of a step that holds chunks, and what is left for the others; int32.

    left: KV length of each request [N], 0 where its only row is split. Of each split row, [M]:
    tokens: its place among the step's tokens. requests: its request's place. lengths: of its KV.
    """

    left: np.ndarray
    tokens: np.ndarray
    requests: np.ndarray
    lengths: np.ndarray


def split_tokens(rows: StepRows, beyond: int) -> SplitTokens:
    """The split rows of any step."""
    first = np.maximum(rows.begins, rows.limits(beyond))
    counts = np.maximum(rows.ends - first, 0)
    sizes = rows.ends - rows.begins
    offsets = np.cumsum(sizes) - sizes
    requests = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = first[requests] + within
    tokens = offsets[requests] + positions - rows.begins[requests]
    left = np.where(counts == sizes, 0, rows.ends)
    left = np.where(sizes == 1, left, rows.ends)  # a chunk's mask is aligned to its end
    return SplitTokens(*(a.astype(np.int32) for a in (left, tokens, requests, positions + 1)))
