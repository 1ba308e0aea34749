"""Seeds for the members of a list: the lines of a job, the prompts of one HTTP request.

Apart from ``corun.seeds.child_seed``, which is for the samples of one request: a list's members may
have samples of their own, and no two of them may share a seed.
"""

import hashlib

from corun.seeds import DRAWN_SEED_BITS, fold_seed


def member_seed(base: int, index: int) -> int:
    """The seed of member `index` of the list with base seed `base`: 53 bits of BLAKE2b."""
    message = fold_seed(base).to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"corun.list").digest()
    return int.from_bytes(digest, "little") >> (64 - DRAWN_SEED_BITS)
