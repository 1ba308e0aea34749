"""One line of the output of ``corun generate``. Pure Python: vLLM's outputs are read by attribute.

Logprobs are written with as many digits as give the same float back; a logprob that JSON has no
number for is written as the string "-inf".
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from corun.contract import digest
from corun.jobs.lines import BadLine, Job


def request_digest(prompt_token_ids: Sequence[int], params: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of what was asked: the prompt's token ids and the sampling parameters."""
    asked = {"prompt_token_ids": list(prompt_token_ids), "params": params}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _value(logprob: float) -> float | str:
    return logprob if math.isfinite(logprob) else str(logprob)


def _top(entries: Mapping[int, Any]) -> list[list[Any]]:
    """[token id, logprob] of every token returned for one position, most likely first."""
    ranked = sorted(entries.items(), key=lambda item: (item[1].rank, item[0]))
    return [[token, _value(entry.logprob)] for token, entry in ranked]


def _output(completion: Any, seed: int | None, asked: int | None) -> dict[str, Any]:
    tokens = [int(t) for t in completion.token_ids]
    record: dict[str, Any] = {
        "index": completion.index,
        "seed": seed,
        "token_ids": tokens,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.stop_reason is not None:
        record["stop_reason"] = completion.stop_reason
    sampled = None
    if asked is not None:
        positions = list(completion.logprobs)
        sampled = [positions[i][token].logprob for i, token in enumerate(tokens)]
        record["logprobs"] = [_value(v) for v in sampled]
        if asked != 0:
            record["top_logprobs"] = [_top(entries) for entries in positions]
    record["digest"] = digest(tokens, sampled)
    return record


def _prompt_logprobs(output: Any, asked: int) -> dict[str, Any]:
    """The prompt's own logprobs: null for its first token, which nothing precedes."""
    tokens, positions = output.prompt_token_ids, list(output.prompt_logprobs)
    values = [positions[i][tokens[i]].logprob for i in range(1, len(tokens))]
    result: dict[str, Any] = {"prompt_logprobs": [None, *map(_value, values)]}
    if asked != 0:
        result["prompt_top_logprobs"] = [None, *(_top(entries) for entries in positions[1:])]
    result["prompt_digest"] = digest(tokens[1:], values)
    return result


def answer(
    job: Job, params: Mapping[str, Any], output: Any, seeds: Sequence[int], domain: str | None
) -> dict[str, Any]:
    """The record of an answered line.

    params: the sampling parameters used, the seed among them. output: vLLM's finished
    RequestOutput. seeds: the seed of each sample. domain: the fingerprint, None without CoRun.
    """
    record: dict[str, Any] = {
        "index": job.index,
        "id": job.id,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            _output(completion, seeds[completion.index], params.get("logprobs"))
            for completion in sorted(output.outputs, key=lambda c: c.index)
        ],
    }
    if params.get("prompt_logprobs") is not None:
        record.update(_prompt_logprobs(output, params["prompt_logprobs"]))
    record["domain"] = domain
    record["request_digest"] = request_digest(output.prompt_token_ids, params)
    return record


def failure(bad: BadLine) -> dict[str, Any]:
    """The record of a line that was skipped."""
    return {"index": bad.index, "id": bad.id, "error": str(bad)}


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as its line of the output, newline included."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def digest_of_all(records: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 (hex) over the digests of all outputs, in order: equal where every bit is equal."""
    h = hashlib.sha256()
    for record in records:
        if "error" in record:
            h.update(f"{record['index']} error\n".encode())
            continue
        if "prompt_digest" in record:
            h.update(f"{record['index']} prompt {record['prompt_digest']}\n".encode())
        for output in record["outputs"]:
            h.update(f"{record['index']} {output['index']} {output['digest']}\n".encode())
    return h.hexdigest()
