"""Seeds as plain integers: drawing one, deriving those of the ``n`` samples, folding to 64 bits.

Pure Python: the front end, the HTTP commands and the workers all use it, on any machine.
"""

import hashlib
import operator
import secrets
from typing import SupportsIndex

DRAWN_SEED_BITS = 53
_WORD, _HALF = 1 << 64, 1 << 63
# Stands for the folded seed -1, which vLLM reads as no seed wherever it makes or decodes sampling
# parameters. Any fixed number would do; this one has 53 bits, as those that are drawn.
_MINUS_ONE = 6159043798729602


def draw_seed() -> int:
    """A fresh seed for a request that brought none: 53 random bits.

    53 bits survive JSON readers that keep numbers as doubles: a reported seed replays as printed.
    """
    return secrets.randbits(DRAWN_SEED_BITS)


def fold_seed(seed: SupportsIndex) -> int:
    """The signed 64-bit integer that stands for `seed`, in [-2**63, 2**63) and never -1.

    Two's complement, but for 2**64 - 1 and -1, which are one fixed seed instead: vLLM would lose a
    -1 on its way to another process. (A user's -1 is no seed at all to vLLM, and does not get
    here.) ValueError for what is no integer, or does not fit 64 bits.
    """
    try:
        value = operator.index(seed)
    except TypeError:
        raise ValueError(f"a seed is an integer, not {seed!r}") from None
    if not -_HALF <= value < _WORD:
        raise ValueError(f"seed {value} does not fit 64 bits; use one from -2**63 to 2**64 - 1")
    folded = (value + _HALF) % _WORD - _HALF
    return _MINUS_ONE if folded == -1 else folded


def child_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with ``n`` samples and seed `seed`.

    Sample 0 keeps the seed itself, so ``n=1`` with a reported seed replays that sample. The others
    get the top 63 bits of BLAKE2b-64 over the seed and the index (both little endian, 8 bytes):
    unlike ``seed + index``, sample 1 of seed 7 is then not sample 0 of seed 8.
    """
    if index < 0:
        raise ValueError(f"a sample's index is 0 or more, not {index}")
    if index == 0:
        return seed
    message = (fold_seed(seed) % _WORD).to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"corun.child").digest()
    return int.from_bytes(digest, "little") >> 1


def session_seed(request_id: str) -> int:
    """The seed of an unseeded streaming-input session: 53 bits of BLAKE2b over its request id.

    vLLM sends such a session in chunks, each with parameters of its own; all must share one seed,
    and the id (which carries vLLM's random suffix) is what they share.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"corun.session").digest()
    return int.from_bytes(digest, "little") >> (64 - DRAWN_SEED_BITS)
