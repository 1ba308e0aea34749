"""How long the requests of a workload are: prompt and output lengths in tokens.

Draws use integers, +, -, *, / and square roots only, which IEEE 754 rounds in one way, so that a
seed gives the same lengths on every machine. The first k requests of a larger draw with the same
seed are the draw of k.
"""

import csv
import hashlib
import os
from array import array
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

REQUEST_SCALE = 801.0
"""Tokens; scale of the prompt lengths of `burstgpt_like`."""
SHORT_SHARE, SHORT_MEDIAN, LONG_MEDIAN = 0.1, 20.0, 345.0
"""Share of short answers, and the medians (tokens) of short and long ones, of `burstgpt_like`."""
LONGEST_REQUEST, LONGEST_RESPONSE = 31_407, 12_472
"""Tokens; the longest prompt and response of BurstGPT's first four months."""

FILE_TOKENS = 1250, 3333
"""Shortest and longest file of `code_editing`, in tokens."""
INSTRUCTION_TOKENS = 150, 350
"""What `code_editing` puts around the file: the change that is asked for and a template."""
EDITED_PERCENT = 90, 110
"""Length of the edited file, in percent of the file's."""

_IN, _OUT, _MODEL = "Request tokens", "Response tokens", "Model"
_ABSURD = 10**9


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of `count` requests.

    n_in, n_out: int64 of shape [count], prompt and output tokens, at least 1 each. source: where
    they come from, in words.
    """

    n_in: NDArray[np.int64]
    n_out: NDArray[np.int64]
    source: str

    def clipped(self, max_model_len: int) -> tuple["Lengths", int]:
        """These lengths, cut so that each request fits `max_model_len` tokens, and how many were.

        The prompt gives way first, down to half of `max_model_len`; then the output.
        """
        assert max_model_len >= 2
        room = np.maximum(max_model_len - self.n_out, max_model_len // 2)
        n_in = np.minimum(self.n_in, room)
        n_out = np.minimum(self.n_out, max_model_len - n_in)
        cut = int(np.count_nonzero((n_in != self.n_in) | (n_out != self.n_out)))
        return Lengths(n_in, n_out, self.source), cut


def fixed(n_in: int, n_out: int, count: int) -> Lengths:
    """Every prompt `n_in` tokens, every output `n_out`: the paper's synthetic workloads."""
    return Lengths(
        np.full(count, n_in, np.int64),
        np.full(count, n_out, np.int64),
        f"every request {n_in} tokens in, {n_out} out",
    )


def burstgpt_like(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths drawn from a fit to BurstGPT; no trace file is needed.

    Published: the authors' own generator draws lengths from a Zipf law (BurstGPT-Perf, of Wang et
    al., "BurstGPT", arXiv 2401.17644; its defaults are an exponent of 1.1 and fewer than 1,024
    tokens); successful GPT-4 requests average 763 tokens in and 348 out (vLLM pull request 13063,
    which added the trace to vLLM's benchmarks); the longest prompt and response of the releases
    for the first four months are 31,407 and 12,472 tokens; of the CoRun paper's 300 requests "a
    small number" exceed 8K tokens.

    Our fit, to these figures and not to the trace (use `burstgpt_trace` for that):
    prompts: Zipf-Mandelbrot with exponent 3, P(length > n) = (801 / (801 + n))^2 before it is cut
    at 31,407; mean 763, 0.7% above 8192. responses: log-logistic, 10% short ones with median 20
    and shape 2, the others with median 345 and shape 4, cut at 12,472; mean 348. The share of
    short ones and both medians are read off the first 38 successful rows, which the data set's
    page shows. Prompt and response are independent; the trace's are not.
    """
    u = rng.random((count, 3))
    prompt = _lomax(u[:, 0], REQUEST_SCALE, LONGEST_REQUEST)
    short = _log_logistic(u[:, 2], SHORT_MEDIAN, 2, LONGEST_RESPONSE)
    long = _log_logistic(u[:, 2], LONG_MEDIAN, 4, LONGEST_RESPONSE)
    response = np.where(u[:, 1] < SHORT_SHARE, short, long)
    return Lengths(
        _whole(prompt, LONGEST_REQUEST),
        _whole(response, LONGEST_RESPONSE),
        "lengths like BurstGPT's, drawn from CoRun's fit and not from the trace: prompts "
        f"Zipf-Mandelbrot, exponent 3, scale {REQUEST_SCALE:g}, at most {LONGEST_REQUEST}; "
        f"responses log-logistic, {SHORT_SHARE:.0%} with median {SHORT_MEDIAN:g} and shape 2, the "
        f"others with median {LONG_MEDIAN:g} and shape 4, at most {LONGEST_RESPONSE}; fitted to "
        "the published means of 763 tokens in and 348 out (GPT-4 requests, vLLM pull request "
        "13063) within the Zipf family of BurstGPT's own generator (arXiv 2401.17644)",
    )


def code_editing(count: int, rng: np.random.Generator) -> Lengths:
    """Lengths like Blazedit's code editing: a whole file and a request in, the edited file out.

    Published: Blazedit's data sets (edit_5k_char, edit_10k_char) hold files of about 5,000 and
    10,000 characters, and the model writes the whole file again; vLLM's benchmark counts 3
    characters a token, AIPerf's manual about 1,500 prompt tokens for the 5k set. The CoRun paper
    names Blazedit and shows its lengths in Fig. 7 without numbers.

    Our choice: files uniform from 1,250 tokens (5,000 characters of 4 a token) to 3,333 (10,000 of
    3), 150 to 350 tokens of request and template, an output of 90 to 110% of the file. Mean:
    2,542 in, 2,291 out.
    """
    lows, highs = zip(FILE_TOKENS, INSTRUCTION_TOKENS, EDITED_PERCENT, strict=True)
    file, instruction, percent = rng.integers(lows, highs, size=(count, 3), endpoint=True).T
    return Lengths(
        file + instruction,
        file * percent // 100,
        "lengths like Blazedit's, CoRun's choice after its 5k and 10k character files: files of "
        f"{_range(FILE_TOKENS)} tokens, {_range(INSTRUCTION_TOKENS)} tokens of request around "
        f"them, outputs of {_range(EDITED_PERCENT)}% of the file, all uniform",
    )


def burstgpt_trace(
    path: str | os.PathLike[str], model: str | None, count: int, rng: np.random.Generator
) -> Lengths:
    """Lengths of `count` rows of a BurstGPT trace, drawn without replacement.

    path: CSV with the columns "Model", "Request tokens" and "Response tokens" (others are
    ignored). model: the rows of this model only, such as "GPT-4". Rows with 0 response tokens are
    failed requests: they are left out and counted in the source, as are rows with an empty prompt.
    Raises ValueError for a file that cannot be read or holds fewer than `count` usable rows.
    """
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            n_in, n_out = _columns(name, file, model)
        with open(path, "rb") as raw:
            checksum = hashlib.file_digest(raw, "sha256").hexdigest()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"cannot read the BurstGPT trace {os.fspath(path)}: {error}; give the path of a CSV "
            "from BurstGPT's releases"
        ) from error
    failed = n_out == 0
    empty = ~failed & (n_in == 0)
    usable = np.flatnonzero(~failed & ~empty)
    whose = f" of {model}" if model else ""
    if len(usable) < count:
        raise ValueError(
            f"{name} holds {len(usable)} successful requests{whose} ({failed.sum()} failed, "
            f"{empty.sum()} with an empty prompt), too few for {count}; ask for fewer requests, "
            "or give a longer trace"
        )
    rows = usable[rng.permutation(len(usable))[:count]]
    return Lengths(
        n_in[rows],
        n_out[rows],
        f"BurstGPT trace {name} (sha256 {checksum}): {count} of {len(usable)} successful "
        f"requests{whose}, drawn without replacement; left out: {failed.sum()} failed, "
        f"{empty.sum()} with an empty prompt",
    )


def _columns(
    name: str, file: TextIO, model: str | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The token columns of an open CSV, shape [rows] each, for one model or all."""
    reader = csv.reader(file)
    header = [column.strip() for column in next(reader, [])]
    missing = [column for column in (_MODEL, _IN, _OUT) if column not in header]
    if missing:
        raise ValueError(
            f"{name} has no column {' and no column '.join(map(repr, missing))}; a BurstGPT trace "
            "begins with 'Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type'"
        )
    at_model, at_in, at_out = (header.index(column) for column in (_MODEL, _IN, _OUT))
    # Millions of rows: 16 bytes each, not two Python integers.
    n_in, n_out = array("q"), array("q")
    for row in reader:
        if not row:
            continue
        try:
            request, response, whose = int(row[at_in]), int(row[at_out]), row[at_model]
        except (ValueError, IndexError):
            request, response, whose = -1, -1, ""
        if not (0 <= request < _ABSURD and 0 <= response < _ABSURD):
            raise ValueError(
                f"{name}, line {reader.line_num}: {_IN!r} and {_OUT!r} must be whole numbers from "
                f"0 to {_ABSURD - 1}; correct or remove the line"
            )
        if model is None or whose == model:
            n_in.append(request)
            n_out.append(response)
    return np.array(n_in, np.int64), np.array(n_out, np.int64)


def _lomax(u: NDArray[np.float64], scale: float, limit: int) -> NDArray[np.float64]:
    """Quantiles of P(x > t) = (scale / (scale + t))^2, given x < limit, at `u` in [0, 1)."""
    least = scale / (scale + limit)
    return scale / np.sqrt(1 - u * (1 - least * least)) - scale


def _log_logistic(
    u: NDArray[np.float64], median: float, shape: int, limit: int
) -> NDArray[np.float64]:
    """Quantiles of P(x > t) = 1 / (1 + (t / median)^shape), given x < limit; shape 2 or 4."""
    assert shape in (2, 4)
    square = (limit / median) * (limit / median)
    most = square if shape == 2 else square * square
    p = u * (most / (1 + most))
    root = np.sqrt(p / (1 - p))
    return median * (root if shape == 2 else np.sqrt(root))


def _whole(x: NDArray[np.float64], limit: int) -> NDArray[np.int64]:
    """Lengths 1, 2, .. limit from real ones in [0, limit)."""
    return np.minimum(np.floor(x).astype(np.int64) + 1, limit)


def _range(ends: tuple[int, int]) -> str:
    return f"{ends[0]} to {ends[1]}"
