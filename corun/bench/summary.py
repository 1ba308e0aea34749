"""The numbers of each mode, as tables and figures show them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from corun.bench import metrics, mode_names
from corun.bench.metrics import Determinism, KVUse, Stats
from corun.bench.records import Run
from corun.bench.results import Comparison, Group, Results

FORMAT = "corun-bench-summary/1"


@dataclass(frozen=True, slots=True)
class ModeNumbers:
    """One mode on one workload under one load.

    throughput: output tokens/s over all repeats; lowest, highest: of single repeats. ttft, tpot:
    seconds, over the requests of all repeats. padded, padded_decode: share of padding among the
    rows of all steps and of decode-only steps. Padding and KV use are the first repeat's.
    None: not recorded, or (determinism) not repeated.
    """

    mode: str
    repeats: int
    requests: int
    output_tokens: int
    seconds: float
    throughput: float
    lowest: float
    highest: float
    ttft: Stats | None
    tpot: Stats | None
    padded: float | None
    padded_decode: float | None
    kv: KVUse | None
    determinism: Determinism | None


def mode_numbers(runs: Sequence[Run]) -> ModeNumbers:
    """The numbers of the repeats of one mode (at least one)."""
    rates = [metrics.throughput(run) for run in runs]
    first = runs[0]
    return ModeNumbers(
        mode=first.mode,
        repeats=len(runs),
        requests=len(first.requests),
        output_tokens=sum(metrics.output_tokens(run) for run in runs),
        seconds=sum(run.wall_s for run in runs),
        throughput=metrics.aggregate_throughput(runs),
        lowest=min(rates),
        highest=max(rates),
        ttft=metrics.stats(metrics.ttfts(runs)),
        tpot=metrics.stats(metrics.tpots(runs)),
        padded=metrics.padded_share(first),
        padded_decode=metrics.padded_share(first, decode_only=True),
        kv=metrics.kv_use(first),
        determinism=metrics.determinism(runs),
    )


def total(group: Group, mode: str) -> float | None:
    """A mode's aggregate throughput over a group; None where it did not run every workload."""
    return metrics.aggregate_throughput(group.runs(mode)) if group.complete(mode) else None


def determinism(group: Group, mode: str) -> Determinism | None:
    """A mode's determinism over all workloads of a group that were repeated; None for none."""
    found = [metrics.determinism(c.modes.get(mode, ())) for c in group.comparisons]
    return joined(d for d in found if d is not None)


def joined(parts: Iterable[Determinism]) -> Determinism | None:
    """Several determinism checks as one: requests added up, the fewest repeats and orders."""
    known = list(parts)
    if not known:
        return None
    return Determinism(
        sum(d.equal for d in known),
        sum(d.requests for d in known),
        min(d.repeats for d in known),
        min(d.orders for d in known),
    )


def verdict(found: Determinism | None) -> str:
    """What a determinism check showed, in words."""
    if found is None:
        return "not checked"
    text = f"{found.equal:,} of {found.requests:,} equal"
    return text if found.orders > 1 else f"{text} (same order)"


def short_verdict(found: Determinism | None) -> str:
    """The same for a legend."""
    if found is None:
        return "bits not checked"
    if not found.holds:
        return "outputs differ"
    return "bits equal" if found.orders > 1 else "bits equal, same order only"


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` as a multiple of `base`; None where either is missing."""
    return value / base if value is not None and base else None


def to_mapping(results: Results) -> dict[str, Any]:
    """Every number of a directory's runs, as JSON values."""
    return {"format": FORMAT, "groups": [_group(group) for group in results.groups]}


def _group(group: Group) -> dict[str, Any]:
    load = group.load
    return {
        "model": load.model,
        "arrivals": load.arrivals,
        "max_num_seqs": load.max_num_seqs,
        "aggregate_tokens_per_s": {mode: total(group, mode) for mode in group.modes},
        "workloads": [_comparison(c) for c in group.comparisons],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    modes = [asdict(mode_numbers(runs)) for runs in comparison.modes.values()]
    return {"workload": comparison.workload, "modes": modes}


def plain_total(group: Group, mode: str) -> float | None:
    """The aggregate of the plain vLLM that `mode` is measured against; None as for ``total``."""
    plain = mode_names.plain_of(mode, group.modes)
    return total(group, plain) if plain else None
