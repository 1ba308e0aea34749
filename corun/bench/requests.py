"""Request sets: what every mode of a benchmark is given, drawn once from a seed and saved.

One seed feeds four separate streams: 0 lengths, 1 prompt tokens (a stream for each request),
2 sampling seeds, 3 arrival times. So the first k requests of a set are the set of k, whatever the
workload, and another max_model_len changes nothing but the requests that it cuts.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corun.bench import lengths, sharegpt
from corun.bench.workload import Workload
from corun.jobs.files import replace_file

FORMAT = "corun-bench-requests/1"
SPECIAL_IDS = 10
"""Ids at either end of the vocabulary that random prompts leave out."""

_LENGTHS, _TOKENS, _SEEDS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: ids of the prompt's tokens, output tokens, and the sampling seed."""

    id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int

    def as_json(self) -> dict[str, Any]:
        """The form that is saved and digested."""
        return {
            "id": self.id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class RequestSet:
    """Requests of one workload. source: where they come from and what was cut, in words."""

    workload: str
    source: str
    seed: int
    requests: tuple[BenchRequest, ...]

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) over the requests in order; the workload's name does not count."""
        sha = hashlib.sha256(FORMAT.encode())
        for request in self.requests:
            line = json.dumps(request.as_json(), sort_keys=True, separators=(",", ":"))
            sha.update(b"\n" + line.encode())
        return sha.hexdigest()

    def save(self, path: str | os.PathLike[str], arrival_s: list[float] | None = None) -> None:
        """Write the set to `path`, all of it or nothing, one request a line.

        arrival_s: each request's arrival in seconds, kept beside it for readers of the file; it is
        no part of the digest.
        """
        times: list[float | None] = [*arrival_s] if arrival_s else [None] * len(self.requests)
        assert len(times) == len(self.requests)
        rows = [
            json.dumps({**request.as_json(), "arrival_s": time}, allow_nan=False)
            for request, time in zip(self.requests, times, strict=True)
        ]
        head = {
            "format": FORMAT,
            "workload": self.workload,
            "source": self.source,
            "seed": self.seed,
            "digest": self.digest,
        }
        text = json.dumps(head)[:-1] + ', "requests": [\n' + ",\n".join(rows) + "\n]}\n"
        target = Path(path)
        temporary = target.with_name(target.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        replace_file(target, temporary)


def load(path: str | os.PathLike[str]) -> RequestSet:
    """Read a saved set; ValueError where it cannot be read or is not what was saved."""
    where = os.fspath(path)
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the request set {where}: {error}; build it again") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"{where} is not a request set of format {FORMAT}; build it again")
    try:
        loaded = RequestSet(
            str(value["workload"]),
            str(value["source"]),
            int(value["seed"]),
            tuple(
                BenchRequest(
                    str(r["id"]),
                    tuple(map(int, r["prompt_token_ids"])),
                    int(r["max_tokens"]),
                    int(r["seed"]),
                )
                for r in value["requests"]
            ),
        )
        digest = value["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the request set {where} is damaged ({error!r}); build it again"
        ) from error
    if digest != loaded.digest:
        raise ValueError(f"the request set {where} was changed after it was saved; build it again")
    return loaded


def build(
    spec: Workload,
    *,
    count: int,
    vocabulary: int,
    seed: int,
    max_model_len: int,
    tokenize: sharegpt.Tokenize | None = None,
) -> RequestSet:
    """Draw `count` requests of `spec`; every prompt and output together fit `max_model_len`.

    vocabulary: the model's number of token ids. tokenize: text to token ids, for ShareGPT only.
    Requests that are too long are cut and counted in the source; a fixed grid is never cut.
    Raises ValueError for numbers that make no sense, a grid that does not fit and bad files.
    """
    _check(count=count, vocabulary=vocabulary, seed=seed, max_model_len=max_model_len)
    rng = _stream(seed, _LENGTHS)
    if spec.kind == "sharegpt":
        if tokenize is None:
            raise ValueError(
                f"workload {spec.name} needs the model's tokenizer; use a model that has one, or "
                "a workload of random tokens"
            )
        assert spec.path is not None
        talk = sharegpt.read(spec.path, count, rng, tokenize)
        whole = lengths.Lengths(
            np.array([len(p) for p in talk.prompts], np.int64),
            np.array(talk.n_out, np.int64),
            talk.source,
        )
        fitting, cut = whole.clipped(max_model_len)
        prompts = [p[:n] for p, n in zip(talk.prompts, fitting.n_in.tolist(), strict=True)]
    else:
        fitting, cut = _lengths(spec, count, rng, max_model_len).clipped(max_model_len)
        prompts = [
            _random_tokens(_stream(seed, _TOKENS, i), n, vocabulary)
            for i, n in enumerate(fitting.n_in.tolist())
        ]
    seeds = _stream(seed, _SEEDS).integers(0, 2**31, size=count).tolist()
    requests = tuple(
        BenchRequest(str(i), prompts[i], n_out, seeds[i])
        for i, n_out in enumerate(fitting.n_out.tolist())
    )
    source = f"{fitting.source}; {cut} of {count} cut to fit {max_model_len} tokens"
    return RequestSet(spec.name, source, seed, requests)


def _lengths(
    spec: Workload, count: int, rng: np.random.Generator, max_model_len: int
) -> lengths.Lengths:
    if spec.kind == "burstgpt":
        return lengths.burstgpt_like(count, rng)
    if spec.kind == "codeedit":
        return lengths.code_editing(count, rng)
    if spec.kind == "burstgpt-trace":
        assert spec.path is not None
        return lengths.burstgpt_trace(spec.path, spec.model, count, rng)
    # Cut, it would be another workload under this name.
    if spec.n_in + spec.n_out > max_model_len:
        raise ValueError(
            f"workload {spec.name} needs {spec.n_in + spec.n_out} tokens a request, the engine "
            f"holds {max_model_len}; raise max_model_len or choose a smaller grid"
        )
    return lengths.fixed(spec.n_in, spec.n_out, count)


def _random_tokens(rng: np.random.Generator, n: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.integers(SPECIAL_IDS, vocabulary - SPECIAL_IDS, size=n).tolist())


def _stream(seed: int, *key: int) -> np.random.Generator:
    # PCG64 by name: numpy may change what default_rng() means.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def _check(*, count: int, vocabulary: int, seed: int, max_model_len: int) -> None:
    if count < 1:
        raise ValueError(f"{count} requests cannot be measured; ask for 1 or more")
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give 0 or more")
    if max_model_len < 2:
        raise ValueError(
            f"max_model_len is {max_model_len}; 2 tokens, one in and one out, are the least"
        )
    if vocabulary <= 2 * SPECIAL_IDS:
        raise ValueError(
            f"a vocabulary of {vocabulary} ids leaves none for random prompts; use a model with "
            f"more than {2 * SPECIAL_IDS}"
        )
