"""What is kept of one request's output: every token id and the raw bits of every logprob.

Built from vLLM's RequestOutput by its attributes alone, so this module imports neither vLLM nor
torch. Logprobs are float32 numbers that vLLM hands out as Python floats; they are kept as their 32
bits, because two different bit patterns may print alike and ``-0.0 == 0.0``.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple

from corun.contract import float_bits


class Entry(NamedTuple):
    """One logprob that vLLM returned: of which token, at which rank (1 is likeliest), its bits."""

    token_id: int
    rank: int | None
    bits: int

    @property
    def logprob(self) -> float:
        """The float32 value that the bits stand for."""
        return float_of(self.bits)


Step = tuple[Entry, ...]
"""The logprobs of one position, in vLLM's order: the sampled token first, then by rank."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    index: its place among the request's n completions.
    token_ids: the sampled tokens.
    logprobs: one Step for each token, or None where none were asked for.
    finish_reason: vLLM's ("stop", "length", "abort"). stop_reason: the stop token or string.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Step, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Record:
    """One request's whole output.

    name: the request's name in the workload. seed: the seed it was sampled with, if known.
    prompt_tokens: length of its prompt.
    prompt_logprobs: one Step for each prompt position (None for the first), or None.
    samples: its completions, ordered by index.
    """

    name: str
    seed: int | None
    prompt_tokens: int
    prompt_logprobs: tuple[Step | None, ...] | None
    samples: tuple[Sample, ...]

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the longest completion."""
        return self.prompt_tokens + max((len(s.token_ids) for s in self.samples), default=0)


def step_of(position: Mapping[int, Any]) -> Step:
    """A Step from one position's ``{token id: Logprob}``."""
    return tuple(
        Entry(int(token_id), given.rank, _bits(given.logprob))
        for token_id, given in position.items()
    )


def sample_of(completion: Any) -> Sample:
    """A Sample from vLLM's CompletionOutput."""
    logprobs = completion.logprobs
    return Sample(
        index=completion.index,
        token_ids=tuple(int(token) for token in completion.token_ids),
        logprobs=None if logprobs is None else tuple(step_of(position) for position in logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def record_of(
    name: str, seed: int | None, final: Any, completions: Sequence[Any] | None = None
) -> Record:
    """A Record from vLLM's RequestOutput.

    final: the request's last RequestOutput. completions: its CompletionOutputs where they came in
    several RequestOutputs (n > 1, streamed); by default ``final.outputs``.
    """
    prompt_logprobs = final.prompt_logprobs
    return Record(
        name=name,
        seed=seed,
        prompt_tokens=len(final.prompt_token_ids),
        prompt_logprobs=(
            None
            if prompt_logprobs is None
            else tuple(None if not position else step_of(position) for position in prompt_logprobs)
        ),
        samples=tuple(
            sorted(
                (sample_of(c) for c in (final.outputs if completions is None else completions)),
                key=lambda sample: sample.index,
            )
        ),
    )


def float_of(bits: int) -> float:
    """The float32 value whose 32 bits these are."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _bits(logprob: float) -> int:
    """The 32 bits of `logprob`; ValueError where it is no float32 and bits would be lost."""
    try:
        bits = float_bits(logprob)
    except OverflowError:
        bits = None
    if bits is None or (not isnan(logprob) and float_of(bits) != logprob):
        raise ValueError(
            f"logprob {logprob!r} is not a float32 number; CoRun compares float32 bits, "
            f"so this engine's logprobs cannot be verified"
        )
    return bits
