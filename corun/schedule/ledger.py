"""KV cache accounting in blocks: what a request may ever hold, and what has been promised. Pure.

Mirrors vLLM's block pool: every request holds, in each KV cache group, one block per ``block_size``
tokens, at most ``max_blocks`` of them where the group gives blocks back (sliding windows). All
groups draw from one pool. The ledger promises a request its whole length (prompt + max_tokens)
before it starts, so no later step can run out of blocks and preempt it (paper, Section IV-B).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group.

    block_size: tokens in a block. max_blocks: the most blocks that one request holds at any moment,
    or None where it keeps every block until it ends. extra_blocks: blocks held beside the tokens'.
    """

    block_size: int
    max_blocks: int | None = None
    extra_blocks: int = 0

    def blocks(self, tokens: int) -> int:
        """The most blocks that a request of `tokens` tokens ever holds in this group."""
        needed = -(-tokens // self.block_size)
        if self.max_blocks is not None:
            needed = min(needed, self.max_blocks)
        return needed + self.extra_blocks


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV cache of one engine.

    groups: its KV cache groups. capacity: blocks that requests can hold, all groups together
    (vLLM's null block is not one of them). max_model_len: the longest sequence in tokens.
    """

    groups: tuple[KVGroup, ...]
    capacity: int
    max_model_len: int

    def sequence_tokens(self, prompt_tokens: int, max_tokens: int) -> int:
        """The longest that a request can become, in tokens."""
        return min(prompt_tokens + max_tokens, self.max_model_len)

    def blocks(self, tokens: int) -> int:
        """The most blocks that a request of `tokens` tokens ever holds."""
        return sum(group.blocks(tokens) for group in self.groups)

    def reservation(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks to promise to a request before it starts."""
        return self.blocks(self.sequence_tokens(prompt_tokens, max_tokens))

    def longest_sequence(self) -> int:
        """The longest sequence, in tokens, that fits when nothing else runs (0 for none)."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks(middle) <= self.capacity:
                low = middle
            else:
                high = middle - 1
        return low

    def never_fits_message(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why this request could not run even alone, or None if it could."""
        needed = self.reservation(prompt_tokens, max_tokens)
        if needed <= self.capacity:
            return None
        longest = self.longest_sequence()
        if longest > prompt_tokens:
            advice = f"lower max_tokens to {longest - prompt_tokens} or less"
        else:
            advice = f"shorten the request to {longest} tokens, output included"
        return (
            f"CoRun reserves KV cache for a whole request before it starts. This one may become "
            f"{self.sequence_tokens(prompt_tokens, max_tokens)} tokens long ({prompt_tokens} of "
            f"prompt, max_tokens {max_tokens}, max_model_len {self.max_model_len}) and would need "
            f"{needed} KV cache blocks, but the engine has {self.capacity}. Either {advice}, or "
            f"give the KV cache more memory (gpu_memory_utilization or kv_cache_memory_bytes)."
        )

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> "KVGeometry":
        """The inverse of ``to_mapping``."""
        groups = tuple(KVGroup(**group) for group in given["groups"])
        return cls(groups, given["capacity"], given["max_model_len"])


def never_fits_message(
    prompt_tokens: int,
    max_tokens: int,
    *,
    groups: Sequence[KVGroup],
    capacity: int,
    max_model_len: int,
) -> str | None:
    """Why a request could not run even alone in such an engine, or None if it could.

    For checks made where no engine is at hand; see ``KVGeometry`` for the arguments.
    """
    geometry = KVGeometry(tuple(groups), capacity, max_model_len)
    return geometry.never_fits_message(prompt_tokens, max_tokens)


class BlockLedger:
    """Blocks promised to the running requests, by request id; never more than there are."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        self.reserved = 0
        self._promises: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    def fits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request's whole length fits beside every promise made so far."""
        needed = self.geometry.reservation(prompt_tokens, max_tokens)
        return self.reserved + needed <= self.geometry.capacity

    def reserve(self, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Promise a request its whole length. It must fit and hold no promise yet."""
        assert request_id not in self._promises, f"{request_id} already holds KV cache"
        assert self.fits(prompt_tokens, max_tokens), f"{request_id} does not fit"
        needed = self.geometry.reservation(prompt_tokens, max_tokens)
        self._promises[request_id] = needed
        self.reserved += needed

    def release_all_but(self, live: Collection[str]) -> None:
        """Take back the promises of every request that is not in `live`."""
        for request_id in [held for held in self._promises if held not in live]:
            self.reserved -= self._promises.pop(request_id)
