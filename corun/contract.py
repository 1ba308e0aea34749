"""The contract's nouns: domain fingerprint, output digest, receipt. Pure Python.

A *domain* is everything that must stay fixed for outputs to be comparable (weights, software,
device, parallelism, the engine settings that reach the arithmetic). Its fingerprint names it. A
*digest* names one output to the bit. A *receipt* is both, with the seed that replays it.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FINGERPRINT_PREFIX = "corun1"


def fingerprint(domain: Mapping[str, Any]) -> str:
    """``corun1-`` and 16 hex digits over the canonical JSON of `domain` (JSON values only)."""
    canonical = json.dumps(domain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{FINGERPRINT_PREFIX}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def float_bits(value: float) -> int:
    """The 32 bits of a float32 value. vLLM hands out float32 logprobs as Python floats."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def digest(token_ids: Sequence[int], logprobs: Iterable[float] | None = None) -> str:
    """SHA-256 (hex) over token ids (int64, little endian) and the bits of their logprobs (float32).

    token_ids: the sampled tokens. logprobs: the sampled tokens' logprobs, one each, or None where
    none were asked for; the two cases never share a digest.
    """
    h = hashlib.sha256(struct.pack(f"<Q{len(token_ids)}q", len(token_ids), *token_ids))
    if logprobs is None:
        h.update(b"no logprobs")
    else:
        values = list(logprobs)
        if len(values) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens but {len(values)} logprobs")
        h.update(struct.pack(f"<{len(values)}f", *values))
    return h.hexdigest()


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one output can be checked by: its domain, the seed it was drawn with, its digest."""

    domain: str
    seed: int | None
    digest: str

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)
