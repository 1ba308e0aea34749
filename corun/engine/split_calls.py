"""How a layer calls FlashAttention in a step of split decode: at once, or in two turns."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

Query = torch.Tensor | tuple[torch.Tensor, ...]
Call = Callable[[Any, Any, torch.Tensor | None], torch.Tensor]
"""FlashAttention: (query, metadata, where to put the result, if that matters) -> the result.

query: [tokens, Hq, D]; of latent attention a tuple of two. The result: [tokens, Hq, Dv].
"""


def _rows(query: Query, tokens: torch.Tensor) -> Query:
    if isinstance(query, tuple):
        return tuple(part.index_select(0, tokens) for part in query)
    return query.index_select(0, tokens)


class Decode:
    """A step of one token for each request: one call, with the splits of `schedule`."""

    def __init__(self, schedule: torch.Tensor, most: int) -> None:
        self._schedule, self._most = schedule, most

    def attend(
        self, call: Call, query: Query, metadata: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of `query`, by `call`; into `out` if there is one."""
        split = copy.copy(metadata)
        split.scheduler_metadata, split.max_num_splits = self._schedule, self._most
        return call(query, split, out)


class Chunks:
    """A step that holds chunks: its split rows are computed by calls of their own.

    left: KV lengths for the first call. parts: of each of the others, its rows' places among the
    step's tokens, their requests' places, and its metadata but for the block table.
    """

    def __init__(
        self, left: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor, Any]]
    ) -> None:
        self.left, self._parts = left, parts
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self, call: Call, query: Query, metadata: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``Decode.attend``."""
        rest = copy.copy(metadata)
        rest.seq_lens = self.left
        found = call(query, rest, out)
        for part, (tokens, requests, split) in enumerate(self._parts):
            given = copy.copy(split)
            given.block_table = self._table(part, metadata.block_table, requests)
            found.index_copy_(0, tokens, call(_rows(query, tokens), given, None))
        return found

    def _table(self, part: int, table: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Rows of a group's block table, gathered once a step and not once a layer."""
        key = (part, table.data_ptr())
        if key not in self._tables:
            self._tables[key] = table.index_select(0, requests)
        return self._tables[key]
