"""The CPU sampler: the same race as ``triton_race``, in torch, decided in float64.

Torch's vectorised log may give other last bits in the tail of a loop than in its body, that is,
other bits by where an entry lies. The race is therefore decided in two steps: a vectorised upper
bound of every entry's score, good to ``MARGIN``, leaves the few entries that can win; the C
library's scalar log decides among them. A row's token depends on nothing else.
"""

import math

import torch

from corun.engine.sampling.order import highest
from corun.engine.sampling.params import RowParams
from corun.engine.sampling.philox import noise_words, token_words

MARGIN = 1e-4  # relative to 1 + |score|; the float32 bounds are good to 1e-5
HEAD = 1024  # entries that are put in order first; few filters keep more
CHUNK = 1 << 17  # entries at a time: the working set stays in cache, and Philox in one thread


def race(
    logits: torch.Tensor, params: RowParams, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row on the CPU; arguments and results as in ``triton_race.race``."""
    logits = logits.to(torch.float32)
    vocab = logits.shape[1]
    tokens = logits.argmax(dim=-1)
    cut_logit = torch.full(tokens.shape, float("-inf"))
    cut_entry = torch.full(tokens.shape, vocab, dtype=torch.int32)
    filtered = params.filtered(vocab)
    for rows in _chunks(params.random() & ~filtered, vocab):
        chosen = params.select(rows)
        words = noise_words(chosen.seeds, positions[rows], vocab)
        tokens[rows] = _winners(logits[rows], chosen.temperature, words)
    for rows in _chunks(filtered, vocab):
        chosen = params.select(rows)
        entries, kept = _heads(logits[rows], chosen)
        width = int(kept.max())
        entries = entries[:, :width]
        found = logits[rows].gather(1, entries)
        last = (kept - 1)[:, None]
        cut_logit[rows] = found.gather(1, last)[:, 0]
        cut_entry[rows] = entries.gather(1, last)[:, 0].to(torch.int32)
        outside = torch.arange(width)[None, :] >= kept[:, None]
        words = token_words(
            chosen.seeds.repeat_interleave(width),
            positions[rows].repeat_interleave(width),
            entries.flatten(),
        ).view(entries.shape)
        found = found.masked_fill(outside, float("-inf"))
        tokens[rows] = _winners(found, chosen.temperature, words, entries)
    return tokens, cut_logit, cut_entry


def _chunks(asked: torch.Tensor, vocab: int) -> list[torch.Tensor]:
    """The indices of the rows that asked, a few rows at a time."""
    rows = asked.nonzero()[:, 0]
    return list(rows.split(max(1, CHUNK // vocab))) if rows.numel() else []


def _heads(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's entries in falling order [n, C] int64, and how many the filters keep [n] int64.

    C is the least of HEAD and V that holds every row's kept entries. Sums run over one row, entry
    by entry, in an order that this row alone fixes.
    """
    vocab = logits.shape[1]
    # A row of -inf alone has no distribution; any finite shape of it avoids NaN.
    scaled = (logits / params.temperature[:, None]).nan_to_num_(neginf=-1e30)
    mass = scaled.softmax(dim=-1)  # row by row in torch, in one fixed order for a given V
    base = (mass >= params.min_p[:, None] * mass.amax(dim=-1, keepdim=True)).sum(dim=-1)
    base = torch.minimum(base, params.top_k.to(torch.int64))
    whole = mass.to(torch.float64).cumsum(dim=-1)[:, -1]
    every = torch.arange(vocab).expand_as(logits)
    entries, kept = every, base
    for size in sorted({min(HEAD, vocab), vocab}):
        entries = highest(logits, every, size)
        reached = mass.gather(1, entries).to(torch.float64).cumsum(dim=-1)
        at_base = reached.gather(1, base.clamp(max=size)[:, None] - 1)[:, 0]
        target = params.top_p.to(torch.float64) * torch.where(base == vocab, whole, at_base)
        nucleus = 1 + (reached < target[:, None]).sum(dim=-1)
        kept = torch.where(params.top_p < 1.0, torch.minimum(base, nucleus), base)
        known = (kept <= size) & ((base <= size) | (base == vocab))
        if bool(known.all()):
            break
    return entries, kept.clamp(max=vocab)


def _winners(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    words: torch.Tensor,
    entries: torch.Tensor | None = None,
) -> torch.Tensor:
    """The entry that wins each row's race: [n] int64; the lower one on equal scores.

    logits: [n, C] fp32. temperature: [n] fp32. words: [n, C] int64. entries: [n, C], the vocabulary
    entry of each column where it is not the column itself.
    """
    # -log1p(-u) >= u, so -log(u) bounds the noise from above.
    bounds = logits / temperature[:, None] - ((words.to(torch.float32) + 0.5) * 2.0**-32).log_()
    every = torch.arange(len(bounds))
    lead = bounds.argmax(dim=-1)
    scores = torch.tensor(
        _exact_scores(logits, temperature, words, every, lead), dtype=torch.float64
    )
    floor = scores - MARGIN * (1.0 + scores.abs())
    rows, columns = (bounds >= floor[:, None]).nonzero(as_tuple=True)
    names = columns if entries is None else entries[rows, columns]
    # A row of -inf alone has no rivals; its first column stands.
    winner = (lead if entries is None else entries.gather(1, lead[:, None])[:, 0]).tolist()
    best = [-math.inf] * len(winner)
    rivals = _exact_scores(logits, temperature, words, rows, columns)
    for row, name, score in zip(rows.tolist(), names.tolist(), rivals, strict=True):
        if score > best[row] or (score == best[row] and name < winner[row]):
            winner[row], best[row] = name, score
    return torch.tensor(winner)


def _exact_scores(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    words: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> list[float]:
    """``exact_score`` of the entries at (rows, columns), each [M] int64."""
    values = (logits[rows, columns], temperature[rows], words[rows, columns])
    return [exact_score(*v) for v in zip(*(x.tolist() for x in values), strict=True)]


def exact_score(logit: float, temperature: float, word: int) -> float:
    """An entry's score (logit / temperature + Gumbel noise) in float64 by the C library's log."""
    return logit / temperature - math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
