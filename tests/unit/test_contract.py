import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.contract import Receipt, digest, fingerprint, float_bits

FLOAT32 = st.floats(width=32, allow_nan=False)


def test_known_digests():
    # Pinned: a change here makes every recorded digest incomparable.
    assert digest([1, 2, 3]) == ("236d8f0c46a2eb38dccf95cf28a66d4196c5be211ba47aaa135a55841b555328")
    assert digest([1, 2, 3], [-0.5, -1.25, -2.0]) == (
        "3c239f93569f57ae0b10ebda59fae33eda346664bf7ede4ffce50c07381d0234"
    )
    assert len(digest([])) == 64


@given(st.lists(st.tuples(st.integers(0, 2**31), FLOAT32), min_size=1, max_size=20), st.data())
def test_one_flipped_bit_changes_the_digest(pairs, data):
    tokens, logprobs = [t for t, _ in pairs], [p for _, p in pairs]
    at = data.draw(st.integers(0, len(pairs) - 1))
    bits = float_bits(logprobs[at]) ^ (1 << data.draw(st.integers(0, 31)))
    other = list(logprobs)
    other[at] = struct.unpack("<f", struct.pack("<I", bits))[0]
    if other[at] != other[at]:
        return  # NaN payloads do not survive Python floats
    assert digest(tokens, logprobs) != digest(tokens, other)


@given(st.lists(st.integers(0, 2**31), max_size=20))
def test_no_logprobs_is_not_zero_logprobs(tokens):
    assert digest(tokens) != digest(tokens, [0.0] * len(tokens))


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 tokens but 1"):
        digest([1, 2], [0.0])


def test_signed_zero_is_told_apart():
    assert float_bits(0.0) == 0
    assert float_bits(-0.0) == 1 << 31
    assert digest([1], [0.0]) != digest([1], [-0.0])


def test_fingerprint_ignores_order_and_sees_values():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint({"a": 1}).startswith("corun1-")
    with pytest.raises(ValueError):
        fingerprint({"a": float("nan")})


def test_receipt():
    receipt = Receipt("corun1-0", 42, digest([1]))
    assert receipt.to_mapping() == {"domain": "corun1-0", "seed": 42, "digest": digest([1])}
