"""Logprobs, ranks and the top entries of every row, the same bits wherever the row stands.

The top entries are taken in one fixed total order (logit descending, entry ascending), so neither
ties nor the number that a neighbour asked for can change which ones a row reports, or in which
order: a request's top 5 are the first 5 of any longer list.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from corun.engine.sampling.order import highest

GROUP = 32
CHUNK = 1 << 25  # keys at a time, 8 bytes each


@dataclass(frozen=True, slots=True)
class OwnEntries:
    """Rows that named the entries to score instead of asking for the highest ones.

    entries: [N, C] int64. counts: [N] int64, how many of them count; 0 for every other row.
    """

    entries: torch.Tensor
    counts: torch.Tensor


def score_table(
    scores: "RowScores", tokens: torch.Tensor, count: int, own: OwnEntries | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's logprobs table: entries [N, 1 + C] int64 and their scores [N, 1 + C] fp32.

    Column 0 is the row's token, then its `count` highest entries, or those it named. Cells that
    mean nothing (another row asked for more) hold entry 0 and -inf; vLLM cuts them per request.
    """
    parts = [tokens[:, None]]
    if count:
        parts.append(scores.top(count))
    entries = torch.cat(parts, dim=1)
    if own is None:
        return entries, scores.at(entries)
    width = max(count, own.entries.shape[1])
    entries = pad(entries, (0, 1 + width - entries.shape[1]))
    column = torch.arange(1 + width, device=entries.device)[None, :]
    chose = own.counts[:, None] > 0
    named = pad(own.entries, (1, width - own.entries.shape[1]))
    entries = torch.where(chose & (column > 0), named, entries)
    meant = column <= torch.where(chose, own.counts[:, None], count)
    entries = entries.masked_fill(~meant, 0)
    return entries, scores.at(entries).masked_fill(~meant, float("-inf"))


class RowScores:
    """The scores of N rows of logits, computed as they are asked for.

    logits: [N, V], any floating dtype. tokens: [N] int64, one per row. as_logits: scores are the
    logits themselves (vLLM's ``*_logits`` modes), not log-softmax in fp32.
    rank: [N] int64, how many entries have a logit at least as high as the token's; 1 is best.
    """

    def __init__(
        self, logits: torch.Tensor, tokens: torch.Tensor, *, as_logits: bool = False
    ) -> None:
        self._logits, self._as_logits = logits, as_logits
        self._full: torch.Tensor | None = None
        if logits.device.type == "cuda":
            from corun.engine.sampling.triton_scores import row_scores

            self._top, self._log_sum, self.rank, self._leaders = row_scores(logits, tokens, GROUP)
            return
        logits = logits.to(torch.float32)
        # On a CPU torch's log_softmax goes row by row, in one fixed order for a given V.
        self._full = logits if as_logits else logits.log_softmax(dim=-1)
        self.rank = (logits >= logits.gather(1, tokens[:, None])).sum(dim=-1)
        self._leaders = _grouped(logits).amax(dim=-1)

    def at(self, entries: torch.Tensor) -> torch.Tensor:
        """The scores [N, C] fp32 of entries [N, C] int64."""
        if self._full is not None:
            return self._full.gather(1, entries)
        logits = self._logits.gather(1, entries).to(torch.float32)
        if self._as_logits:
            return logits
        return (logits - self._top[:, None]) - self._log_sum[:, None]

    def full(self) -> torch.Tensor:
        """The scores [N, V] fp32 of every entry."""
        if self._full is not None:
            return self._full
        logits = self._logits.to(torch.float32)
        if self._as_logits:
            return logits
        return (logits - self._top[:, None]) - self._log_sum[:, None]

    def top(self, count: int) -> torch.Tensor:
        """The `count` highest entries of each row: [N, count] int64, ties in entry order."""
        rows, groups = self._leaders.shape
        width = min(count, groups) * GROUP
        step = max(1, CHUNK // width)
        found = [self._top_of(slice(start, start + step), count) for start in range(0, rows, step)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _top_of(self, rows: slice, count: int) -> torch.Tensor:
        """`top` of some rows. The count highest entries lie in the count highest groups.

        If an entry's group is not among them, that many groups have a leader that comes before it.
        """
        leaders, logits = self._leaders[rows], self._logits[rows]
        vocab = logits.shape[1]
        group = torch.arange(leaders.shape[1], device=leaders.device).expand_as(leaders)
        group = highest(leaders, group, min(count, leaders.shape[1]))
        entries = group[:, :, None] * GROUP + torch.arange(GROUP, device=group.device)
        entries = entries.flatten(1)
        found = logits.gather(1, entries.clamp(max=vocab - 1)).to(torch.float32)
        return highest(found, entries, count, entries >= vocab)


def _grouped(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] as [N, ceil(V / GROUP), GROUP], -inf beyond V."""
    short = -logits.shape[1] % GROUP
    if short:
        logits = pad(logits, (0, short), value=float("-inf"))
    return logits.unflatten(1, (-1, GROUP))
