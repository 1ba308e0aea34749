"""Tables of verifications, as ``corun verify --json`` writes them."""

from recorded import Record, Records, runner
from table_lines import head, notes, row


def verify_table(records: Records, link: str) -> str:
    """The verifications, a line each. link: what their directory is called in links."""
    lines = head(
        "policy",
        "model",
        "runner",
        "suite, engines",
        "equal tokens",
        "equal logprobs",
        "mixed steps / preempted / cached tokens",
        "verdict",
    )
    for file, record in records.items():
        settings = record["settings"]
        cells = (
            f"`{record['policy']}`",
            f"[{record['model']}]({link}/{file}), {record['device']}",
            runner(record),
            f"{settings['suite']}, {settings['engines']}",
            _equal([record], "token"),
            _equal([record], "logprob"),
            _reuse(record),
            record["verdict"],
        )
        lines.append(row(cells))
    noted = [r for r in records.values() if "note" in r]
    lines += notes(f"{r['model']}, {runner(r)}: {r['note']}." for r in noted)
    return "\n".join(lines)


def verify_summary(records: Records) -> str:
    """The verifications of each policy, added up."""
    lines = head(
        "policy", "device", "verifications", "engines", "equal tokens", "equal logprobs", "verdict"
    )
    for policy in dict.fromkeys(r["policy"] for r in records.values()):
        of_policy = [r for r in records.values() if r["policy"] == policy]
        verdicts = dict.fromkeys(r["verdict"] for r in of_policy)
        cells = (
            f"`{policy}`",
            "; ".join(dict.fromkeys(r["device"] for r in of_policy)),
            f"{len(of_policy)}",
            f"{sum(r['settings']['engines'] for r in of_policy)}",
            _equal(of_policy, "token"),
            _equal(of_policy, "logprob"),
            ", ".join(verdicts),
        )
        lines.append(row(cells))
    return "\n".join(lines)


def _equal(records: list[Record], what: str) -> str:
    """Of all values compared, how many had equal bits."""
    equal, of = (
        sum(r["total"][name] for r in records)
        for name in (f"{what}_values_equal", f"{what}_values")
    )
    return f"{equal:,} of {of:,}"


def _reuse(record: Record) -> str:
    """What the step audit counted, over all engines; older records did not count it."""
    audits = record["audit"]
    if not audits or any("mixed_steps" not in audit for audit in audits):
        return "not counted"
    mixed, preempted, cached = (
        sum(audit[name] for audit in audits)
        for name in ("mixed_steps", "preempted", "cached_tokens")
    )
    return f"{mixed:,} / {preempted:,} / {cached:,}"
