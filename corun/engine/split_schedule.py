"""FlashAttention 3's own KV splits, their number set by each request's own length.

FlashAttention 3 reads the number of splits of each sequence from its scheduler metadata, an int32
tensor that vLLM makes once a step. Its own numbers follow from the whole batch. ``write_splits``
puts others in their place, each a function of that sequence's length alone. A sequence of n KV
tiles in s splits has splits of ceil(n / s) tiles, counted from its start, and the partial results
are merged in the order of the splits. So a row's bits depend on its own length, query and KV, as
long as ``num_splits`` (the upper bound) is the same constant wherever a row is split.

The metadata of a batch of b sequences, padded to a multiple of 4: tiles of query rows per sequence,
splits per sequence, then one more vector if the kernel is causal, then one counter. It has no
splits where ``num_splits`` is 1 or b exceeds 992; ``write_splits`` refuses those.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Tokens of KV up to which a row keeps one split, which is as fast there.
SPLIT_BEYOND = 2048
MOST_SEQUENCES = 992  # more, and FlashAttention 3 does not split
_PADDING = 4  # sequences; FlashAttention aligns the vectors of its metadata to 16 bytes
_MOST_SPLITS = 255  # it packs the number into 8 bits


@dataclass(frozen=True)
class SplitRule:
    """Splits of a request by its length: as short as `least` allows, `most` of them or fewer.

    tile: tokens in one of the kernel's KV tiles. least: tiles in a split at least. most: splits of
    a request at most. ValueError for values that no kernel here can take.
    """

    tile: int
    least: int
    most: int

    def __post_init__(self) -> None:
        if self.tile < 16 or self.tile % 16 or self.least < 1:
            raise ValueError(f"{self}: tile must be a multiple of 16, least 1 or more")
        if not 2 <= self.most <= _MOST_SPLITS:
            raise ValueError(f"{self}: most must be between 2 and {_MOST_SPLITS}")

    def counts(self, lengths: np.ndarray) -> np.ndarray:
        """Splits of requests of these lengths (in tokens, 0 or more), int32 of the same shape.

        Between 1 and `most`; 1 for length 0.
        """
        tiles = -(-lengths // self.tile)
        per_split = np.maximum(-(-tiles // self.most), self.least)
        return np.maximum(-(-tiles // per_split), 1).astype(np.int32)


# By head dimension. The tiles are FlashAttention 3's on Hopper; another tile costs speed, not bits.
RULES = {64: SplitRule(128, 4, 32), 128: SplitRule(128, 4, 32), 256: SplitRule(80, 4, 32)}
LATENT = (512, 64)  # dimensions of latent attention (MLA): its latent, its rotary part
LATENT_RULE = SplitRule(64, 4, 64)


def reaching_bits(*, latent: bool = False) -> dict[str, Any]:
    """What decides a split row's bits, as JSON values: whose splits they are, and the rules.

    latent: of a model with latent attention.
    """
    named = {"+".join(map(str, LATENT)): LATENT_RULE} if latent else RULES
    rules = {str(dim): dataclasses.asdict(rule) for dim, rule in named.items()}
    return {"beyond": SPLIT_BEYOND, "kernel": "FlashAttention 3", "rules": rules}


def write_splits(schedule: torch.Tensor, counts: torch.Tensor) -> None:
    """Set the number of splits of every sequence in FlashAttention 3's `schedule`, in place.

    schedule: int32, from vLLM's ``get_scheduler_metadata`` for this batch, with ``num_splits`` the
    most that `counts` may hold. counts: [b] int32. Reads nothing on the host. ValueError where the
    schedule holds no splits.
    """
    rows = len(counts)
    padded = -(-rows // _PADDING) * _PADDING
    vectors, rest = divmod(schedule.numel() - 1, max(padded, 1))
    if schedule.dtype != torch.int32 or rows > MOST_SEQUENCES or rest or vectors not in (2, 3):
        raise ValueError(
            f"a schedule of {schedule.numel()} {schedule.dtype} values holds no splits for {rows} "
            f"sequences: at most {MOST_SEQUENCES}, and made with num_splits of 2 or more"
        )
    schedule[padded : padded + rows].copy_(counts, non_blocking=True)
